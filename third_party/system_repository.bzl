"""A library that a distribution package has installed under /usr.

Its headers are in the compiler's own search path and its archives in the linker's, so the BUILD files name them by
link options alone; this rule checks that they are there, and says which package is missing when they are not.
"""

def _system_repository_impl(ctx):
    missing = [f for f in ctx.attr.files + ctx.attr.links.keys() if not ctx.path(f).exists]
    if missing and not ctx.attr.optional:
        fail("@%s: %s not found. Run tools/setup, or install: %s" % (
            ctx.name,
            ", ".join(missing),
            " ".join(ctx.attr.packages),
        ))
    for source, link in ctx.attr.links.items():
        ctx.symlink(source, link)
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)
    ctx.symlink(ctx.attr.build_file, "BUILD")

    # What an optional library's targets are compatible with: everything, or nothing where it is not installed.
    ctx.file("installed.bzl", "COMPATIBLE_WITH = %s\n" % (["@platforms//:incompatible"] if missing else []))

system_repository = repository_rule(
    implementation = _system_repository_impl,
    attrs = {
        "build_file": attr.label(mandatory = True, allow_single_file = True),
        "files": attr.string_list(doc = "Absolute paths that must exist."),
        "links": attr.string_dict(doc = "Absolute path to the name that the BUILD file uses."),
        "optional": attr.bool(doc = "Where it is missing, its targets are incompatible instead of an error."),
        "packages": attr.string_list(doc = "The distribution's packages that hold the files."),
    },
    environ = ["TFB_HOST"],  # changes with the packages (tools/bazel), so that installing one is enough
    local = True,
)
