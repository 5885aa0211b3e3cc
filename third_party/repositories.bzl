"""The outside libraries, under the labels that their own projects give them.

All come from the distribution's packages (tools/setup installs them). To move one to fetched sources, replace its
line here; its users keep their labels.
"""

load("//third_party:abseil.bzl", "abseil_repository")
load("//third_party:system_repository.bzl", "system_repository")

def third_party_repositories():
    abseil_repository(name = "com_google_absl")
    system_repository(
        name = "com_google_protobuf",
        build_file = "//third_party:protobuf.BUILD",
        files = ["/usr/include/google/protobuf/message.h"],
        links = {"/usr/bin/protoc": "bin/protoc"},
        packages = ["libprotobuf-dev", "protobuf-compiler"],
    )
    system_repository(
        name = "com_google_googletest",
        build_file = "//third_party:googletest.BUILD",
        files = ["/usr/include/gtest/gtest.h", "/usr/include/gmock/gmock.h"],
        packages = ["libgtest-dev", "libgmock-dev"],
    )
    system_repository(
        name = "com_google_benchmark",
        build_file = "//third_party:benchmark.BUILD",
        files = ["/usr/include/benchmark/benchmark.h"],
        packages = ["libbenchmark-dev"],
    )
    system_repository(
        name = "eigen",
        build_file = "//third_party:eigen.BUILD",
        files = ["/usr/include/eigen3/Eigen/Core"],
        packages = ["libeigen3-dev"],
    )
    system_repository(
        name = "nlohmann_json",
        build_file = "//third_party:nlohmann_json.BUILD",
        files = ["/usr/include/nlohmann/json.hpp"],
        packages = ["nlohmann-json3-dev"],
    )
    system_repository(
        name = "dlpack",
        build_file = "//third_party:dlpack.BUILD",
        files = ["/usr/include/dlpack/dlpack.h"],
        packages = ["libdlpack-dev"],
    )
    system_repository(
        name = "boost",
        build_file = "//third_party:boost.BUILD",
        files = [
            "/usr/include/boost/context/fiber.hpp",
            "/usr/include/boost/math/distributions/students_t.hpp",
        ],
        packages = ["libboost-context-dev"],
    )
    system_repository(
        name = "faiss",
        build_file = "//third_party:faiss.BUILD",
        files = ["/usr/include/faiss/Index.h"],
        optional = True,
        packages = ["libfaiss-dev"],
    )

    # Bazel 4 would fetch these two; a later Bazel brings its own. The distribution's Bazel 4 has no version number.
    is_bazel_4 = native.bazel_version.startswith("4.") if native.bazel_version else not hasattr(native, "subpackages")
    if is_bazel_4:
        native.local_repository(name = "rules_cc", path = "third_party/rules_cc")
        native.local_repository(name = "remote_coverage_tools", path = "third_party/remote_coverage_tools")
