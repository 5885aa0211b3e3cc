"""CUDA sources in C++ programs, each compiled twice: by nvcc for GPUs, and by the C++ compiler for the simulator of
core/cuda/simulator.

    cuda_library(
        name = "flash_kernels",
        srcs = ["flash_f32.cu"],
        hdrs = ["flash_kernels.h"],
        deps = ["//core/cuda:kernel"],
    )

To C++ libraries it is its headers, and they are compiled alike whatever becomes of the kernels: nothing in them names a
kernel (core/cuda/kernel_table.h). The program decides. cuda_test and cuda_binary are cc_test and cc_binary that link the
kernels of all libraries that they depend on:

    cuda_test                          the simulator's, and nvcc's where there is a toolkit
    cuda_binary                        nvcc's where the machine has a GPU and a toolkit, or with --config=cuda;
                                       the simulator's with --config=simulator
    cuda_binary, for_tests = True      as cuda_test

cc_test and cc_binary link none: their programs say so when they are asked for a device. What no program links is compiled
by `bazel build //...`, but not for a program.

Only .cu sources can include CUDA's headers: what C++ includes of a cuda_library is plain C++. With simulated = False a
library is for GPUs alone.

A simulated object is compiled with -fsanitize=thread, whose calls before every load and store are renamed to the
simulator's. Both objects may end up in one program, so a source defines nothing with external linkage: all stands in
an anonymous namespace, in .cuh files too.
"""

load("@local_cuda//:toolkit.bzl", "NVCC", "VERSION")
load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_test")

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

# --- Whether there is a toolkit, and --//tools/cuda:enabled; what programs link

EnabledInfo = provider("Whether something is wanted.", fields = ["value"])

def _enabled_impl(ctx):
    return [EnabledInfo(value = ctx.build_setting_value)]

cuda_setting = rule(
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

def _has_toolkit(ctx):
    return bool(NVCC) and ctx.attr._enabled[EnabledInfo].value

# --- The library

KernelsInfo = provider(
    "Compiled kernels, apart from the C++ that launches them.",
    fields = {
        "for_gpu": "CcInfo to link, by nvcc; empty where there is no toolkit",
        "resources": "files, one a source, of the registers and memory that nvcc gives each kernel",
        "simulated": "CcInfo to link, with the simulator",
    },
)

def _merge(infos):
    return KernelsInfo(
        for_gpu = cc_common.merge_cc_infos(cc_infos = [info.for_gpu for info in infos]),
        resources = depset(transitive = [info.resources for info in infos]),
        simulated = cc_common.merge_cc_infos(cc_infos = [info.simulated for info in infos]),
    )

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
    """Returns the object, and the file of what its kernels need (kernel_resources.h)."""
    output = _object(ctx, source, "o")
    resources = _object(ctx, source, "resources")
    args = ctx.actions.args()
    args.add_all([NVCC, resources])
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
        executable = ctx.executable._compile_kernels,
        arguments = [args],
        # The toolkit is no input of the action; its version in the environment stands for it.
        env = dict(ctx.configuration.default_shell_env, CUDA_TOOLKIT = VERSION, PATH = "/usr/bin:/bin"),
        inputs = depset(ctx.files.srcs, transitive = [context.headers, cc_toolchain.all_files]),
        mnemonic = "CudaCompile",
        outputs = [output, resources],
        progress_message = "Compiling %s" % source.short_path,
    )
    return output, resources

def _link(ctx, objects, suffix, runtime, deps):
    """A CcInfo that links kernels, what they run on, and behind them what they call; an empty one where there are none."""
    if not objects:
        return CcInfo()
    cc_toolchain = ctx.attr._cc_toolchain[cc_common.CcToolchainInfo]
    objects = depset(objects)
    linking, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        alwayslink = True,  # a table registers itself; nothing names it
        cc_toolchain = cc_toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(objects = objects, pic_objects = objects),
        disallow_dynamic_library = True,
        feature_configuration = cc_common.configure_features(
            ctx = ctx,
            cc_toolchain = cc_toolchain,
            requested_features = ctx.features,
            unsupported_features = ctx.disabled_features,
        ),
        linking_contexts = [runtime[CcInfo].linking_context, deps.linking_context],
        name = ctx.label.name + suffix,
    )
    return CcInfo(linking_context = linking)

def _cuda_library_impl(ctx):
    cc_toolchain = ctx.attr._cc_toolchain[cc_common.CcToolchainInfo]
    deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    own = cc_common.create_compilation_context(
        headers = depset(ctx.files.hdrs),
        quote_includes = depset([".", ctx.bin_dir.path]),
    )
    context = cc_common.merge_cc_infos(
        cc_infos = [CcInfo(compilation_context = own), deps],
    ).compilation_context
    sources = [source for source in ctx.files.srcs if source.extension == "cu"]

    # Compiled when something asks for the objects: a program that links them, or `bazel build` of this target.
    compiled = []
    if _has_toolkit(ctx):
        compiled = [_compile(ctx, cc_toolchain, source, context) for source in sources]
    for_gpu = [output for output, _ in compiled]
    resources = [output for _, output in compiled]
    known = ["known spill: %s: %s\n" % (kernel, why) for kernel, why in ctx.attr.spills.items()]
    known += ["known shared: %s: %s\n" % (kernel, why) for kernel, why in ctx.attr.shared.items()]
    if known:
        accepted = ctx.actions.declare_file("_objs/%s/accepted.resources" % ctx.label.name)
        ctx.actions.write(accepted, "".join(known))
        resources.append(accepted)
    simulated = []
    if ctx.attr.simulated:
        simulated = [_compile_for_simulator(ctx, cc_toolchain, source, context) for source in sources]
    return [
        DefaultInfo(files = depset(for_gpu + simulated)),
        CcInfo(compilation_context = context, linking_context = deps.linking_context),
        _merge([dep[KernelsInfo] for dep in ctx.attr.deps if KernelsInfo in dep] + [KernelsInfo(
            for_gpu = _link(ctx, for_gpu, "_for_gpu", ctx.attr._runtime, deps),
            resources = depset(resources),
            simulated = _link(ctx, simulated, "_simulated", ctx.attr._simulator, deps),
        )]),
    ]

cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = {
        "copts": attr.string_list(doc = "More flags for nvcc."),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh", ".inc"]),
        "simulated": attr.bool(default = True, doc = "Compile for the simulator too."),
        "shared": attr.string_dict(
            doc = "Kernels that may have more shared memory a block than an sm_80, sm_89 or sm_90 has, whose launch then says " +
                  "so: {\"SOURCE: KERNEL\": \"BYTES at most, and for what\"}.",
        ),
        "spills": attr.string_dict(
            doc = "Kernels whose spills of registers are accepted: {\"SOURCE: KERNEL\": \"BYTES of a thread, and why\"}, named " +
                  "as //tools/cuda:kernel_resources prints them.",
        ),
        "local_defines": attr.string_list(doc = "Macros for these sources alone."),
        "srcs": attr.label_list(allow_files = [".cu", ".h", ".cuh", ".inc"], doc = "Sources and private headers."),
        "_architectures": attr.label(default = "//:cuda_archs"),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
        "_compile_kernels": attr.label(
            allow_single_file = True,
            cfg = "exec",
            default = "//tools/cuda:compile_kernels",
            executable = True,
        ),
        "_enabled": attr.label(default = "//tools/cuda:enabled"),
        "_hook_names": attr.label(default = "//tools/cuda:simulator_hooks.txt", allow_single_file = True),
        "_runtime": attr.label(default = "@local_cuda//:runtime"),
        "_simulator": attr.label(default = "//core/cuda/simulator"),
    },
    fragments = ["cpp"],
    provides = [CcInfo, KernelsInfo],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

# --- Programs

def _collect_impl(target, ctx):
    if KernelsInfo in target:
        return []
    return [_merge([dep[KernelsInfo] for dep in getattr(ctx.rule.attr, "deps", []) if KernelsInfo in dep])]

# Kernels of all that a library depends on.
_collect = aspect(
    implementation = _collect_impl,
    attr_aspects = ["deps"],
)

def _linked_kernels_impl(ctx):
    wants_gpu = ctx.attr._in_programs_for_gpu[EnabledInfo].value
    if wants_gpu and not NVCC:
        fail("--config=cuda: no CUDA toolkit is found; `tools/setup --cuda` installs one")
    kernels = _merge([dep[KernelsInfo] for dep in ctx.attr.deps if KernelsInfo in dep])
    linked = []
    if ctx.attr.for_tests or wants_gpu:
        linked.append(kernels.for_gpu)
    if ctx.attr.for_tests or ctx.attr._in_programs_simulated[EnabledInfo].value:
        linked.append(kernels.simulated)
    return [cc_common.merge_cc_infos(cc_infos = linked)]

_linked_kernels = rule(
    implementation = _linked_kernels_impl,
    attrs = {
        "deps": attr.label_list(aspects = [_collect], providers = [CcInfo]),
        "for_tests": attr.bool(),
        "_in_programs_for_gpu": attr.label(default = "//tools/cuda:in_programs_for_gpu"),
        "_in_programs_simulated": attr.label(default = "//tools/cuda:in_programs_simulated"),
    },
    provides = [CcInfo],
)

def _with_kernels(name, deps, for_tests, testonly):
    """`deps`, and the kernels that they need."""
    _linked_kernels(
        name = name + "_kernels",
        testonly = testonly,
        for_tests = for_tests,
        visibility = ["//visibility:private"],
        deps = deps,
    )
    return deps + [":%s_kernels" % name]

def cuda_test(name, deps, on_gpu = True, tags = [], **kwargs):
    """A cc_test with kernels (see the head of this file).

    Args:
      name: of the target
      deps: of the test, with the libraries whose kernels it links
      on_gpu: whether it is one of the tests that --config=gpu runs, with kernels on a GPU in place of the simulator
        (core/tested_devices.h); false for tests of the simulator, of the CPU, and by a simulated clock
      tags: as everywhere
      **kwargs: cc_test's other attributes
    """
    cc_test(
        name = name,
        tags = tags + (["gpu"] if on_gpu else []),
        deps = _with_kernels(name, deps, for_tests = True, testonly = True),
        **kwargs
    )

def cuda_binary(name, deps, for_tests = False, testonly = False, **kwargs):
    """A cc_binary with kernels (see the head of this file).

    Args:
      name: of the target
      deps: of the program, with the libraries whose kernels it links
      for_tests: whether it links kernels as tests do, since a test runs it
      testonly: as everywhere
      **kwargs: cc_binary's other attributes
    """
    cc_binary(
        name = name,
        testonly = testonly or for_tests,
        deps = _with_kernels(name, deps, for_tests, testonly or for_tests),
        **kwargs
    )

# --- What kernels need of a GPU

def _kernel_resources_impl(ctx):
    infos = [dep[KernelsInfo] for dep in ctx.attr.deps if KernelsInfo in dep]
    files = depset(transitive = [info.resources for info in infos])
    args = ctx.actions.args()
    args.add(ctx.outputs.out)
    args.add_all(files)
    ctx.actions.run_shell(
        arguments = [args],
        command = "out=$1; shift; cat -- /dev/null \"$@\" > \"$out\"",
        inputs = files,
        mnemonic = "CudaKernelResources",
        outputs = [ctx.outputs.out],
    )
    return [DefaultInfo(
        files = depset([ctx.outputs.out]),
        runfiles = ctx.runfiles(files = [ctx.outputs.out]),
    )]

_kernel_resources = rule(
    implementation = _kernel_resources_impl,
    attrs = {
        "deps": attr.label_list(aspects = [_collect], providers = [CcInfo]),
        "out": attr.output(mandatory = True),
    },
)

def kernel_resources(name, deps, **kwargs):
    """NAME.txt: registers, spills and memory of the kernels of all libraries in `deps`, in the words of nvcc (kernel_resources.h).

    They come with the objects: nothing is compiled for them alone.

    Args:
      name: of the target
      deps: libraries, and what they depend on
      **kwargs: visibility, and what else every rule has
    """
    _kernel_resources(name = name, deps = deps, out = name + ".txt", **kwargs)

# For target_compatible_with of any target that makes sense with CUDA alone.
REQUIRES_CUDA = select({
    "//tools/cuda:is_available": [],
    "//conditions:default": ["@platforms//:incompatible"],
})
