"""linked_sources() lists the sources of all libraries that programs link."""

_SourcesInfo = provider(fields = ["files"])

def _collect_impl(target, ctx):
    own = []
    for attribute in ["srcs", "hdrs"]:
        for dep in getattr(ctx.rule.attr, attribute, []):
            own += [file for file in dep.files.to_list() if file.is_source]
    deps = [dep[_SourcesInfo].files for dep in getattr(ctx.rule.attr, "deps", []) if _SourcesInfo in dep]

    # Libraries from elsewhere are no concern of ours.
    return [_SourcesInfo(files = depset([] if target.label.workspace_name else own, transitive = deps))]

_collect = aspect(
    implementation = _collect_impl,
    attr_aspects = ["deps"],
)

def _linked_sources_impl(ctx):
    files = depset(transitive = [dep[_SourcesInfo].files for dep in ctx.attr.deps])
    code = [file for file in files.to_list() if file.extension in ["cc", "h", "cu", "cuh"]]
    return [DefaultInfo(files = depset(code), runfiles = ctx.runfiles(files = code))]

linked_sources = rule(
    implementation = _linked_sources_impl,
    attrs = {
        "deps": attr.label_list(aspects = [_collect], doc = "The programs."),
    },
)
