# Writes C++ that registers the comments of a technique's header (core/header_text.h):
#
#   awk -f header_text.awk -v technique=NAME HEADER [HEADER ...]
#
# The head is the comment that begins the first header; those of further headers follow, each under its path. The class
# is the first header's `class ... : public TechniqueOf<...>`, or of another class whose name ends in Technique.

function text(line) {
    sub(/^\/\/ ?/, "", line)
    return line "\n"
}

FNR == 1 {
    in_head = 1
    ++headers
    if (headers > 1) head = head "\n" FILENAME ":\n\n"
}
in_head && /^\/\// {
    head = head text($0)
    if (headers == 1) has_head = 1
    next
}
{ in_head = 0 }
headers > 1 { nextfile }
/^\/\// {
    comment = comment text($0)
    next
}
/^class .*: public [A-Za-z]*Technique/ { of_class = comment }
{ comment = "" }

END {
    if (!has_head) {
        print ARGV[1] ": begins with no comment, which would be the formula" > "/dev/stderr"
        exit 1
    }
    print "// From " ARGV[1] ", by tools/header_text.awk."
    print "#include \"core/header_text.h\"\n"
    print "namespace {\n"
    print "const bool registered = tfb::RegisterHeaderText(\"" technique "\", {R\"TEXT(" head ")TEXT\", R\"TEXT(" of_class ")TEXT\"});\n"
    print "}  // namespace"
}
