"""build_flags: a C++ header that says how the build was configured, for results to record."""

_HEADER = """\
// Written by tools/build_flags.bzl.
#ifndef {guard}
#define {guard}

namespace tfb {{

// What Bazel hands to the compiler beyond its toolchain's own flags; a target may add some.
constexpr char kCompileFlags[] = "{flags}";
constexpr char kCompilationMode[] = "{mode}";

}}  // namespace tfb

#endif  // {guard}
"""

def _quoted(text):
    return text.replace("\\", "\\\\").replace("\"", "\\\"")

def _build_flags_impl(ctx):
    cpp = ctx.fragments.cpp
    header = ctx.actions.declare_file(ctx.attr.name + ".h")
    ctx.actions.write(header, _HEADER.format(
        flags = _quoted(" ".join(cpp.copts + cpp.cxxopts)),
        guard = "TFB_%s_H_" % header.short_path[:-len(".h")].replace("/", "_").upper(),
        mode = ctx.var["COMPILATION_MODE"],
    ))
    return [DefaultInfo(files = depset([header]))]

build_flags = rule(
    implementation = _build_flags_impl,
    doc = "Makes NAME.h.",
    fragments = ["cpp"],
)
