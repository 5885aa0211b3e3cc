"""@com_google_absl: Abseil's packages and targets over the distribution's static archives.

Abseil's archives depend on one another in ways that only its own build knows. So one target links them all as a
group, from which the linker takes the objects that are used, and each public label is an alias for it.
"""

_TARGETS = {
    "algorithm": ["algorithm", "container"],
    "base": ["base", "config", "core_headers", "endian", "log_severity"],
    "cleanup": ["cleanup"],
    "container": [
        "btree",
        "fixed_array",
        "flat_hash_map",
        "flat_hash_set",
        "inlined_vector",
        "node_hash_map",
        "node_hash_set",
    ],
    "debugging": ["failure_signal_handler", "leak_check", "stacktrace", "symbolize"],
    "flags": ["commandlineflag", "config", "flag", "marshalling", "parse", "program_name", "reflection", "usage"],
    "functional": ["any_invocable", "bind_front", "function_ref"],
    "hash": ["hash"],
    "memory": ["memory"],
    "meta": ["type_traits"],
    "numeric": ["bits", "int128"],
    "random": ["bit_gen_ref", "distributions", "random", "seed_sequences"],
    "status": ["status", "statusor"],
    "strings": ["cord", "str_format", "string_view", "strings"],
    "synchronization": ["synchronization"],
    "time": ["time"],
    "types": ["any", "compare", "optional", "span", "variant"],
    "utility": ["utility"],
}

# -lpthread last: the archives use it.
_ROOT = """\
cc_library(
    name = "archives",
    linkopts = ["-Wl,--start-group"] + {archives} + ["-Wl,--end-group", "-lpthread"],
    visibility = ["//visibility:public"],
)

# The archives' code is for programs. A shared library's own linkopts name these, which come before the archives and leave
# nothing for them to define. All of them are needed: one that is needed by another of them alone would not be looked at
# before the archives, which are not all fit for a shared library.
exports_files(["shared.bzl"])
"""

_SHARED = """\
SHARED = ["-Wl,--push-state,--no-as-needed"] + {libraries} + ["-Wl,--pop-state"]
"""

_ALIAS = """\
alias(
    name = "{name}",
    actual = "//:archives",
    visibility = ["//visibility:public"],
)
"""

def _abseil_repository_impl(ctx):
    archives = []
    libraries = []
    for lib_dir in ctx.path("/usr/lib").readdir() + [ctx.path("/usr/lib64")]:
        if lib_dir.exists and lib_dir.get_child("libabsl_base.a").exists:
            names = sorted([
                entry.basename[:-len(".a")]
                for entry in lib_dir.readdir()
                if entry.basename.startswith("libabsl_") and entry.basename.endswith(".a") and
                   "_test_util" not in entry.basename
            ])
            archives = ["-l:%s.a" % name for name in names]

            # What helps with tests of Abseil's own may be there as an archive alone.
            libraries = ["-l:%s.so" % name for name in names if lib_dir.get_child(name + ".so").exists]
            break
    if not archives:
        fail("@%s: libabsl_base.a not found under /usr/lib. Run tools/setup, or install: libabsl-dev" % ctx.name)
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)
    ctx.file("BUILD", _ROOT.format(archives = archives))
    ctx.file("shared.bzl", _SHARED.format(libraries = libraries))
    for package, names in _TARGETS.items():
        ctx.file(
            "absl/%s/BUILD" % package,
            "\n".join([_ALIAS.format(name = name) for name in names]),
        )

abseil_repository = repository_rule(
    implementation = _abseil_repository_impl,
    environ = ["TFB_HOST"],  # see system_repository
    local = True,
)
