"""cuda_library: CUDA sources for C++ targets to depend on, each compiled twice: by nvcc for GPUs, and by the C++
compiler for the simulator of core/cuda/simulator.

    cuda_library(
        name = "flash_kernels",
        srcs = ["flash_f32.cu"],
        hdrs = ["flash_kernels.h"],
        deps = ["//core/cuda:kernel"],
    )

It is a C++ library to its users (CcInfo). Only .cu sources can include CUDA's headers: what C++ includes of a
cuda_library is plain C++. Where there is no toolkit it holds the simulated objects alone. With simulated = False it
is for GPUs alone; where there is no toolkit the target is then incompatible, which Bazel reports as skipped.

A simulated object is compiled with -fsanitize=thread, whose calls before every load and store are renamed to the
simulator's. Both objects end up in one program, so a source may define with external linkage only what
core/cuda/kernel_table.h gives two names: all else stands in an anonymous namespace, in .cuh files too.
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

def _object(ctx, source, suffix):
    return ctx.actions.declare_file("_objs/%s/%s.%s" % (ctx.label.name, source.basename[:-len(".cu")], suffix))

_SIMULATOR_FLAGS = [
    # Calls before accesses, and where an address is misaligned; what calls back is in simulator_hooks.txt.
    "-fsanitize=thread,alignment",
    "--param=tsan-instrument-func-entry-exit=0",
    # Findings name the line that calls, and frames reach the page below the stack before what lies beyond.
    "-fno-optimize-sibling-calls",
    "-fstack-clash-protection",
    # As nvcc takes it.
    "-fno-strict-aliasing",
]

def _compile_for_simulator(ctx, cc_toolchain, source, context):
    cpp = ctx.fragments.cpp
    compiled = _object(ctx, source, "instrumented.o")
    args = ctx.actions.args()
    args.add_all(["-x", "c++", "-std=c++17", "-O2", "-g1", "-DNDEBUG", "-fPIC", "-Wall", "-Werror"])
    args.add("-Wno-unknown-pragmas")  # unroll
    flags = cpp.copts + cpp.cxxopts
    args.add_all([f for f in flags if not f.startswith(("-std=", "-fsanitize", "-fno-sanitize"))])
    args.add_all(_SIMULATOR_FLAGS)
    args.add_all(context.quote_includes, before_each = "-iquote")
    args.add_all(context.includes, before_each = "-I")
    args.add_all(context.system_includes, before_each = "-isystem")
    args.add_all(context.defines, format_each = "-D%s")
    args.add_all(ctx.attr.local_defines, format_each = "-D%s")
    args.add("-c", source)
    args.add("-o", compiled)
    ctx.actions.run(
        executable = cc_toolchain.compiler_executable,
        arguments = [args],
        env = dict(ctx.configuration.default_shell_env, PATH = "/usr/bin:/bin"),
        inputs = depset(ctx.files.srcs, transitive = [context.headers, cc_toolchain.all_files]),
        mnemonic = "CudaSimulatorCompile",
        outputs = [compiled],
        progress_message = "Compiling %s for the simulator" % source.short_path,
    )
    renamed = _object(ctx, source, "simulated.o")
    args = ctx.actions.args()
    args.add(ctx.file._hook_names, format = "--redefine-syms=%s")
    args.add_all([compiled, renamed])
    ctx.actions.run(
        executable = cc_toolchain.objcopy_executable,
        arguments = [args],
        inputs = depset([compiled, ctx.file._hook_names], transitive = [cc_toolchain.all_files]),
        mnemonic = "CudaSimulatorHooks",
        outputs = [renamed],
        progress_message = "Renaming the hooks of %s" % source.short_path,
    )
    return renamed

def _compile(ctx, cc_toolchain, source, context):
    output = _object(ctx, source, "o")
    args = ctx.actions.args()
    args.add_all(["-std=c++17", "-x", "cu", "--expt-relaxed-constexpr", "-Werror=all-warnings"])
    args.add("--ftz=true")  # denormals count as zero, as in the engines of the CPU (core/denormals.h)
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
    for_gpu = bool(NVCC) and ctx.attr._enabled[EnabledInfo].value
    linked = ([ctx.attr._runtime] if for_gpu else []) + ([ctx.attr._simulator] if ctx.attr.simulated else [])
    deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps + linked])
    own = cc_common.create_compilation_context(
        headers = depset(ctx.files.hdrs),
        quote_includes = depset([".", ctx.bin_dir.path]),
    )
    context = cc_common.merge_cc_infos(
        cc_infos = [CcInfo(compilation_context = own), deps],
    ).compilation_context

    sources = [source for source in ctx.files.srcs if source.extension == "cu"]
    objects = []
    if for_gpu:
        objects += [_compile(ctx, cc_toolchain, source, context) for source in sources]
    if ctx.attr.simulated:
        objects += [_compile_for_simulator(ctx, cc_toolchain, source, context) for source in sources]
    objects = depset(objects)
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
        "simulated": attr.bool(default = True, doc = "Compile for the simulator too."),
        "local_defines": attr.string_list(doc = "Macros for these sources alone."),
        "srcs": attr.label_list(allow_files = [".cu", ".h", ".cuh", ".inc"], doc = "Sources and private headers."),
        "_architectures": attr.label(default = "//:cuda_archs"),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
        "_enabled": attr.label(default = "//tools/cuda:enabled"),
        "_hook_names": attr.label(default = "//tools/cuda:simulator_hooks.txt", allow_single_file = True),
        "_runtime": attr.label(default = "@local_cuda//:runtime"),
        "_simulator": attr.label(default = "//core/cuda/simulator"),
    },
    fragments = ["cpp"],
    provides = [CcInfo],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, simulated = True, target_compatible_with = [], **kwargs):
    """See the head of this file."""
    _cuda_library(
        name = name,
        simulated = simulated,
        target_compatible_with = target_compatible_with + ([] if simulated else REQUIRES_CUDA),
        **kwargs
    )

# For target_compatible_with of any target that makes sense with CUDA alone.
REQUIRES_CUDA = select({
    "//tools/cuda:is_available": [],
    "//conditions:default": ["@platforms//:incompatible"],
})
