"""@local_cuda: the CUDA toolkit of this machine, as tools/cuda/find_toolkit finds it, or the statement that there is none.

    toolkit.bzl   NVCC, the compiler's path, and VERSION, the last line of its --version; both "" where there is none.
                  HAS_GPU, whether the machine has an NVIDIA GPU and its driver; GPU_ARCHS, what nvcc calls its GPUs
                  (tools/cuda/find_gpus), [] where they or nvcc are not found
    :runtime      the static CUDA runtime; nothing where there is none
"""

_BUILD = """\
cc_library(
    name = "runtime",
    linkopts = {linkopts},
    visibility = ["//visibility:public"],
)
"""

def _cuda_toolkit_impl(ctx):
    found = ctx.execute([ctx.path(Label("//tools/cuda:find_toolkit"))])
    if found.stderr:
        print(found.stderr.strip())  # buildifier: disable=print
    nvcc = ""
    version = ""
    linkopts = []
    if found.return_code == 0:
        root, _, runtime, version = found.stdout.strip().split("\n")
        nvcc = root + "/bin/nvcc"
        linkopts = [
            runtime,
            # Where a program looks for cuBLAS, which it opens at run time. Elsewhere, the system's folders remain.
            "-Wl,-rpath," + runtime.rpartition("/")[0],
            "-ldl",
            "-lrt",
            "-lpthread",
        ]
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)
    ctx.file("BUILD", _BUILD.format(linkopts = linkopts))

    # The driver's devices; in WSL, the window to the host's driver.
    devices = [path.basename for path in ctx.path("/dev").readdir()]
    has_gpu = any([name == "dxg" or name.startswith("nvidia") and name[6:].isdigit() for name in devices])
    archs = []
    if has_gpu and nvcc:
        gpus = ctx.execute([ctx.path(Label("//tools/cuda:find_gpus")), nvcc])
        if gpus.stderr:
            print(gpus.stderr.strip())  # buildifier: disable=print
        if gpus.return_code == 0:
            archs = gpus.stdout.strip().split("\n")
    ctx.file(
        "toolkit.bzl",
        "NVCC = %r\nVERSION = %r\nHAS_GPU = %r\nGPU_ARCHS = %r\n" % (nvcc, version, has_gpu, archs),
    )

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    # Beside what find_toolkit reads: what it found, which tools/bazel tells, so that installing a toolkit is enough.
    environ = ["CUDA_HOME", "HOME", "PATH", "TFB_CUDA_TOOLKIT", "XDG_CACHE_HOME"],
    local = True,  # looks again when Bazel's server starts, be it without tools/bazel
)
