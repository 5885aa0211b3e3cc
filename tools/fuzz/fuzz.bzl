"""Fuzz targets: run for as long as one likes by libFuzzer, and briefly by every `bazel test`."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_test")

def fuzz_target(name, src, corpus, deps, data = []):
    """A source with LLVMFuzzerTestOneInput, as two targets.

    :NAME is libFuzzer's, built by clang, by name only:
        bazel run --config=fuzz //PACKAGE:NAME -- $PWD/PACKAGE/CORPUS -max_total_time=600
    :NAME_test tries the corpus, its truncations and some thousand mutations, by any compiler.

    Args:
      name: of the target
      src: the source
      corpus: a folder of this package with inputs that reach different code
      deps: of the source
      data: files that it reads
    """
    cc_binary(
        name = name,
        testonly = True,
        srcs = [src],
        linkopts = ["-fsanitize=fuzzer"],
        tags = ["manual"],
        data = data,
        deps = deps,
    )
    cc_test(
        name = name + "_test",
        size = "medium",  # a minute under a sanitizer
        srcs = [src],
        args = [native.package_name() + "/" + corpus],
        data = data + native.glob([corpus + "/*"]),
        deps = deps + ["//tools/fuzz:replay"],
    )
