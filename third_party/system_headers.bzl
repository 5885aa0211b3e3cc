"""Headers in a folder of their own under /usr/include, which cc_library cannot name."""

def _system_headers_impl(ctx):
    return [CcInfo(compilation_context = cc_common.create_compilation_context(
        defines = depset(ctx.attr.defines),
        system_includes = depset([ctx.attr.include]),
    ))]

system_headers = rule(
    implementation = _system_headers_impl,
    attrs = {
        "defines": attr.string_list(),
        "include": attr.string(mandatory = True, doc = "An absolute path."),
    },
    provides = [CcInfo],
)
