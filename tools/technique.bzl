"""technique() declares one technique, technique_family() the list of a family's techniques.

    technique(
        name = "mine",
        cuda_srcs = ["mine_cuda.cu"],
        deps = ["//core/flash"],
    )

makes, in a folder attention/mine with mine.h, mine.cc and mine_test.cc,

    :mine                          the library, which registers the technique, and the comments of mine.h that
                                   `apply --technique=mine --help` shows, wherever it is linked in
    :mine_cuda                     its device code, where it has cuda_srcs
    :mine_test                     its own test
    :mine_conformance_test         what every technique must pass, on the CPU; no source of its own
    :mine_cuda_conformance_test    the same in the simulator of GPUs, and on a GPU where there is one; under --config=gpu
                                   on that alone
    :mine_benchmark                Google Benchmark over the usual problems; no source of its own, built by name alone

The last three link the harness's mains, which walk the registry.
"""

load("@rules_cc//cc:defs.bzl", "cc_library")
load("//tools/cuda:cuda_library.bzl", "cuda_binary", "cuda_library", "cuda_test")

def header_text(name, technique, hdrs):
    """Makes NAME.cc, which registers the comments of a technique's header (core/header_text.h).

    Args:
      name: of the target and the file.
      technique: the name that the technique registers.
      hdrs: its header, and further ones whose first comments belong to its formula.
    """
    native.genrule(
        name = name,
        srcs = hdrs,
        outs = [name + ".cc"],
        cmd = "LC_ALL=C awk -f $(location //tools:header_text.awk) -v technique=%s %s > $@" % (
            technique,
            " ".join(["$(location %s)" % header for header in hdrs]),
        ),
        tools = ["//tools:header_text.awk"],
        visibility = ["//visibility:private"],
    )

def technique(
        name,
        srcs = None,
        hdrs = None,
        formula_hdrs = [],
        deps = [],
        cuda_srcs = [],
        cuda_hdrs = [],
        cuda_deps = [],
        cuda_spills = {},
        test_deps = [],
        test_data = [],
        test_size = "medium",
        conformance_size = "medium",
        cuda_conformance_size = "large",
        counterpart = "//attention/dense",
        visibility = ["//visibility:public"]):
    """Declares the targets of a technique (see the head of this file).

    Args:
      name: the folder's, which is the name that the technique registers.
      srcs: C++ sources; by default NAME.cc.
      hdrs: headers; by default NAME.h.
      formula_hdrs: headers that the comment at the head of NAME.h refers to; their own heads are shown behind it.
      deps: libraries beside //core:technique.
      cuda_srcs: CUDA sources, with private headers: kernels that no engine of core/ has (see core/cuda/kernel_table.h).
      cuda_hdrs: plain C++ headers of the CUDA sources, which `srcs` include.
      cuda_deps: libraries of the CUDA sources, beside //core/cuda:kernel.
      cuda_spills: kernels whose spills of registers are accepted, with the reason (cuda_library).
      test_deps: libraries of NAME_test.cc beside this technique and GoogleTest.
      test_data: files that NAME_test.cc reads.
      test_size: of NAME_test. Some take seconds, which a slow and busy machine makes minutes.
      conformance_size: of the conformance test on the CPU.
      cuda_conformance_size: of the conformance test on devices.
      counterpart: the technique that this one is held against (Technique::Counterpart), linked into the conformance test
        and the benchmark.
      visibility: of the library.
    """
    if cuda_srcs:
        cuda_library(
            name = name + "_cuda",
            srcs = cuda_srcs,
            hdrs = cuda_hdrs,
            spills = cuda_spills,
            visibility = ["//visibility:private"],
            deps = cuda_deps + ["//core/cuda:kernel"],
        )
        deps = deps + [":%s_cuda" % name]

    header_text(
        name = name + "_header_text",
        technique = name,
        hdrs = [name + ".h"] + formula_hdrs,
    )
    cc_library(
        name = name,
        srcs = (srcs if srcs != None else [name + ".cc"]) + [":%s_header_text" % name],
        hdrs = hdrs if hdrs != None else [name + ".h"],
        alwayslink = True,
        visibility = visibility,
        deps = deps + [
            "//core:header_text",
            "//core:technique",
        ],
    )

    cuda_test(
        name = name + "_test",
        size = test_size,
        srcs = [name + "_test.cc"],
        data = test_data,
        deps = test_deps + [
            ":" + name,
            "//core:technique",
            "//core:testing",
            "@com_google_googletest//:gtest_main",
        ],
    )

    own_label = "//" + native.package_name()
    linked = [":" + name] + ([counterpart] if counterpart not in ["", own_label] else [])
    # Written by the program itself (harness/conformance/interface.h); a new technique has none yet.
    interface = native.glob(["testdata/interface.txt"], allow_empty = True)
    cuda_test(
        name = name + "_conformance_test",
        size = conformance_size,
        on_gpu = False,
        args = ["--technique=" + name] + ["--interface=$(rootpath %s)" % file for file in interface],
        data = interface,
        deps = linked + ["//harness:conformance_main"],
    )

    # The same program: a second one would be linked, and kept, for its arguments alone.
    native.sh_test(
        name = name + "_cuda_conformance_test",
        size = cuda_conformance_size,
        shard_count = 3,  # of minutes on a slow machine
        srcs = [":%s_conformance_test" % name],
        args = [
            "--technique=" + name,
            "--devices=simulator,cuda",
        ],
        tags = ["gpu"],  # what --config=gpu runs, on a GPU alone
    )
    cuda_binary(
        name = name + "_benchmark",
        testonly = True,
        args = ["--technique=" + name],
        tags = ["manual"],  # by name: `bazel test //...` need not link it, which tests the same main with toys
        deps = linked + ["//harness:benchmark_main"],
    )

def technique_family(names):
    """The list of a family's techniques, in the family's BUILD file.

    Makes :techniques, which links all of them, and :techniques_test, which fails where the family's folder holds a
    technique that the list lacks. (Not ":all": Bazel's command line reads that as every target of the package.)

    Args:
      names: folders of this package that call technique(), in alphabetical order.
    """
    if names != sorted(names):
        fail("//%s: the techniques are not in alphabetical order" % native.package_name())
    family = native.package_name()
    cc_library(
        name = "techniques",
        visibility = ["//visibility:public"],
        deps = ["//%s/%s" % (family, name) for name in names],
    )
    native.sh_test(
        name = "techniques_test",
        size = "small",
        srcs = ["//tools:technique_family_test.sh"],
        args = ["$(rootpath BUILD)"] + names,
        data = ["BUILD"],
        # It looks at folders that are no input of it, so a result of yesterday says nothing.
        tags = ["external"],
    )

