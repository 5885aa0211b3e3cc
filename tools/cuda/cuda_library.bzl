"""cuda_library: CUDA sources compiled by nvcc, for C++ targets to depend on.

    cuda_library(
        name = "flash_cuda",
        srcs = ["flash.cu"],
        hdrs = ["flash_cuda.h"],
        deps = [":tensor"],
    )

It is a C++ library to its users (CcInfo) and links the static CUDA runtime. Only .cu sources can include CUDA's
headers: what C++ includes of a cuda_library is plain C++. Where there is no toolkit the target is incompatible,
which Bazel reports as skipped; a library that has an answer without CUDA chooses its sources with
select({"//tools/cuda:is_available": ...}).
"""

load("@local_cuda//:toolkit.bzl", "NVCC", "VERSION")

# --- The architectures: --//:cuda_archs=sm_80,sm_90a

ArchitecturesInfo = provider("Where device code is to run.", fields = ["names"])

def _architectures_impl(ctx):
    if not ctx.build_setting_value:
        fail("%s names no architecture" % ctx.label)
    for name in ctx.build_setting_value:
        kind, _, number = name.partition("_")
        generation = number.rstrip("af")  # sm_90a: Hopper's own instructions; sm_100f: its family's
        if kind not in ["sm", "compute"] or not generation.isdigit():
            fail("%s: \"%s\" is neither sm_NN (machine code) nor compute_NN (PTX)" % (ctx.label, name))
        if int(generation) < 80:
            fail("%s: \"%s\" is older than Ampere, sm_80, whose instructions the kernels use" % (ctx.label, name))
    return [ArchitecturesInfo(names = ctx.build_setting_value)]

cuda_architectures = rule(
    implementation = _architectures_impl,
    build_setting = config.string_list(flag = True),
)

def _gencode(names):
    """One -gencode per virtual architecture, so that its PTX is made once for machine code and PTX."""
    codes = {}
    for name in names:
        codes.setdefault(name.replace("sm_", "compute_"), []).append(name)
    return [
        "-gencode=arch=%s,code=[%s]" % (virtual, ",".join(code))
        for virtual, code in codes.items()
    ]

# --- Whether there is a toolkit, and --//tools/cuda:enabled

EnabledInfo = provider("Whether CUDA is wanted.", fields = ["value"])

def _enabled_impl(ctx):
    return [EnabledInfo(value = ctx.build_setting_value)]

cuda_enabled = rule(
    implementation = _enabled_impl,
    build_setting = config.bool(flag = True),
)

def _availability_impl(ctx):
    available = bool(NVCC) and ctx.attr.enabled[EnabledInfo].value
    return [config_common.FeatureFlagInfo(value = "yes" if available else "no")]

cuda_availability = rule(
    implementation = _availability_impl,
    attrs = {"enabled": attr.label(providers = [EnabledInfo])},
)

# --- The library

_MODE_FLAGS = {
    "dbg": ["-O0", "-g", "-lineinfo"],
    "fastbuild": ["-O1"],
    "opt": ["-O3", "-DNDEBUG"],
}

def _host_flags(ctx, cc_toolchain):
    """What the C++ compiler gets: the flags of every other translation unit, since both share inline code."""
    cpp = ctx.fragments.cpp
    flags = ["-fPIC", "-ffunction-sections", "-fdata-sections", "-Wall"]
    flags += [f for f in cpp.copts + cpp.cxxopts if not f.startswith("-std=")]
    return ["-ccbin=" + cc_toolchain.compiler_executable] + ["-Xcompiler=" + f for f in flags]

def _include_flags(context):
    return (
        # nvcc knows no -iquote; the host compiler, which it preprocesses with, does.
        ["-Xcompiler=-iquote," + path for path in context.quote_includes.to_list()] +
        ["-I" + path for path in context.includes.to_list()] +
        ["-isystem=" + path for path in context.system_includes.to_list()]
    )

def _compile(ctx, cc_toolchain, source, context):
    output = ctx.actions.declare_file("_objs/%s/%s.o" % (ctx.label.name, source.basename[:-len(".cu")]))
    args = ctx.actions.args()
    args.add_all(["-std=c++17", "-x", "cu", "--expt-relaxed-constexpr", "-Werror=all-warnings"])
    args.add_all(_MODE_FLAGS[ctx.var["COMPILATION_MODE"]])
    args.add_all(_gencode(ctx.attr._architectures[ArchitecturesInfo].names))
    args.add_all(_host_flags(ctx, cc_toolchain))
    args.add_all(_include_flags(context))
    args.add_all(context.defines, format_each = "-D%s")
    args.add_all(ctx.attr.local_defines, format_each = "-D%s")
    args.add_all(ctx.attr.copts)
    args.add("-c", source)
    args.add("-o", output)
    ctx.actions.run(
        executable = NVCC,
        arguments = [args],
        # The toolkit is no input of the action; its version in the environment stands for it.
        env = dict(ctx.configuration.default_shell_env, CUDA_TOOLKIT = VERSION, PATH = "/usr/bin:/bin"),
        inputs = depset(ctx.files.srcs, transitive = [context.headers, cc_toolchain.all_files]),
        mnemonic = "CudaCompile",
        outputs = [output],
        progress_message = "Compiling %s" % source.short_path,
    )
    return output

def _cuda_library_impl(ctx):
    cc_toolchain = ctx.attr._cc_toolchain[cc_common.CcToolchainInfo]
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps + [ctx.attr._runtime]])
    own = cc_common.create_compilation_context(
        headers = depset(ctx.files.hdrs),
        quote_includes = depset([".", ctx.bin_dir.path]),
    )
    context = cc_common.merge_cc_infos(
        cc_infos = [CcInfo(compilation_context = own), deps],
    ).compilation_context

    objects = depset([
        _compile(ctx, cc_toolchain, source, context)
        for source in ctx.files.srcs
        if source.extension == "cu"
    ])
    linking, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        alwayslink = ctx.attr.alwayslink,
        cc_toolchain = cc_toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(objects = objects, pic_objects = objects),
        disallow_dynamic_library = True,
        feature_configuration = features,
        linking_contexts = [deps.linking_context],
        name = ctx.label.name,
    )
    return [
        DefaultInfo(files = objects),
        CcInfo(compilation_context = context, linking_context = linking),
    ]

_cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = {
        "alwayslink": attr.bool(doc = "Keep all objects, such as those that only register something."),
        "copts": attr.string_list(doc = "More flags for nvcc."),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh", ".inc"]),
        "local_defines": attr.string_list(doc = "Macros for these sources alone."),
        "srcs": attr.label_list(allow_files = [".cu", ".h", ".cuh", ".inc"], doc = "Sources and private headers."),
        "_architectures": attr.label(default = "//:cuda_archs"),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
        "_runtime": attr.label(default = "@local_cuda//:runtime"),
    },
    fragments = ["cpp"],
    provides = [CcInfo],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, target_compatible_with = [], **kwargs):
    """See the head of this file."""
    _cuda_library(
        name = name,
        target_compatible_with = target_compatible_with + REQUIRES_CUDA,
        **kwargs
    )

# For target_compatible_with of any target that makes sense with CUDA alone.
REQUIRES_CUDA = select({
    "//tools/cuda:is_available": [],
    "//conditions:default": ["@platforms//:incompatible"],
})
