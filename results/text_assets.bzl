"""Files as strings in C++, so that a page is one file and the program too."""

load("@rules_cc//cc:defs.bzl", "cc_library")

def text_assets(name, header, texts, visibility = None):
    """Makes a library of the constants that `header` declares in namespace tfb.

    Args:
      name: of the library.
      header: declares `extern const char NAME[]` for each text.
      texts: the name of each constant, and the files that follow each other in it.
      visibility: of the library.
    """
    lines = ["echo '#include \"%s/%s\"'" % (native.package_name(), header), "echo 'namespace tfb {'"]
    for constant, files in texts.items():
        lines.append("echo 'const char %s[] = R\"asset('" % constant)
        lines += ["cat $(location %s)" % file for file in files]
        lines.append("echo ')asset\";'")
    lines.append("echo '}'")
    native.genrule(
        name = name + "_source",
        srcs = [file for files in texts.values() for file in files],
        outs = [name + ".cc"],
        cmd = "{ " + "; ".join(lines) + "; } > $@",
        visibility = ["//visibility:private"],
    )
    cc_library(
        name = name,
        srcs = [":" + name + "_source"],
        hdrs = [header],
        visibility = visibility,
    )
