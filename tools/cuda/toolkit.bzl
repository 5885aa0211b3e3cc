"""@local_cuda: the CUDA toolkit of this machine, or the statement that there is none.

Looked for in $CUDA_HOME, /usr/local/cuda, and where the nvcc on PATH is, in that order.
"""

_BUILD = """\
cc_library(
    name = "runtime",
    linkopts = {linkopts},
    visibility = ["//visibility:public"],
)
"""

def _roots(ctx):
    roots = []
    if ctx.os.environ.get("CUDA_HOME"):
        roots.append(ctx.path(ctx.os.environ["CUDA_HOME"]))
    roots.append(ctx.path("/usr/local/cuda"))
    nvcc = ctx.which("nvcc")
    if nvcc:
        roots.append(nvcc.realpath.dirname.dirname)
    return roots

def _find(ctx):
    """Returns (root, static runtime library) of the first complete toolkit, or (None, None)."""
    for root in _roots(ctx):
        if not root.get_child("bin").get_child("nvcc").exists:
            continue
        for lib in ["lib64", "lib", "lib/x86_64-linux-gnu", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"]:
            runtime = ctx.path("%s/%s/libcudart_static.a" % (root, lib))
            if runtime.exists:
                return root, runtime
    return None, None

def _cuda_toolkit_impl(ctx):
    root, runtime = _find(ctx)
    nvcc = ""
    version = ""
    linkopts = []
    if root:
        nvcc = "%s/bin/nvcc" % root

        # The last line names the build, such as "Build cuda_13.0.r13.0/compiler.36424714_0".
        version = ctx.execute([nvcc, "--version"]).stdout.strip().split("\n")[-1]
        linkopts = [str(runtime), "-ldl", "-lrt", "-lpthread"]
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)
    ctx.file("BUILD", _BUILD.format(linkopts = linkopts))
    ctx.file("toolkit.bzl", "NVCC = %r\nVERSION = %r\n" % (nvcc, version))

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    environ = ["CUDA_HOME", "PATH"],
    local = True,  # looks again when Bazel's server starts, so that installing a toolkit is enough
)
