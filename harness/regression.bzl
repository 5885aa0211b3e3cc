"""The regression gate of a project as one target.

    load("//harness:regression.bzl", "regression_test")

    regression_test(
        name = "regression",
        acknowledged = "regressions.txt",
        store = "regression_store",
        sweep_args = ["--techniques=mine,dense", "--lengths=64,128"],
    )

`bazel test :regression` measures what is checked out, adds the run to a copy of the store, which is a folder of the package
that //tools:history made, and fails where //tools:history check finds a regression that nobody acknowledged. Errors and
outcomes are compared with the runs of all machines, memory with those of the same kind of machine. Times are compared only
where asked, on a machine that is good for it, since they make a test's verdict depend on what else runs there:

    bazel test :regression --test_arg=--times

`bazel run :regression -- --record` measures and adds the run to the store itself, to be checked in.
"""

def regression_test(name, store, sweep = "//harness:sweep", sweep_args = [], acknowledged = None, size = "medium", **kwargs):
    """Makes the test.

    Args:
      name: of the test.
      store: a folder of this package, with a store.
      sweep: a program as //harness:sweep, with the project's own techniques.
      sweep_args: its flags.
      acknowledged: a file of acknowledgements, or None.
      size: of the test.
      **kwargs: further attributes of the test.
    """
    files = native.glob([store + "/**"])
    if not files:
        fail("%s: no store in %s" % (name, store))
    args = [
        "--sweep=$(rootpath %s)" % sweep,
        "--history=$(rootpath //tools:history)",
        "--store=" + (native.package_name() + "/" if native.package_name() else "") + store,
    ]
    if acknowledged:
        args.append("--acknowledged=$(rootpath %s)" % acknowledged)
    native.sh_test(
        name = name,
        size = size,
        srcs = ["//harness:regression_test.sh"],
        args = args + ["--sweep_flag=" + flag for flag in sweep_args],
        data = [sweep, "//tools:history"] + files + ([acknowledged] if acknowledged else []),
        **kwargs
    )
