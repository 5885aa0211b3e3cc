"""wheel(): a Python wheel of sources, a shared library and programs (make_wheel.py)."""

def _wheel_impl(ctx):
    folder = ctx.actions.declare_directory(ctx.label.name)
    library = [file for file in ctx.files.library if file.extension == "so"]
    arguments = ctx.actions.args()
    arguments.add(folder.path)
    arguments.add_all(library)
    programs = [program[DefaultInfo].files_to_run.executable for program in ctx.attr.programs]
    arguments.add_all(programs)
    arguments.add("--data")
    data = []
    for program in ctx.attr.programs:
        for file in program[DefaultInfo].default_runfiles.files.to_list():
            if file not in programs:
                data.append(file)
                arguments.add(file.path)
                arguments.add("bin/%s.runfiles/%s/%s" % (program.label.name, ctx.workspace_name, file.short_path))
    arguments.add("--sources")
    arguments.add_all(ctx.files.srcs)
    ctx.actions.run(
        arguments = [arguments],
        executable = ctx.executable._make,
        inputs = ctx.files.srcs + library + programs + data,
        mnemonic = "Wheel",
        outputs = [folder],
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([folder]), runfiles = ctx.runfiles([folder]))]

wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "library": attr.label(mandatory = True),
        "programs": attr.label_list(),
        "srcs": attr.label_list(allow_files = True),
        "_make": attr.label(
            allow_single_file = True,
            cfg = "exec",
            default = "make_wheel.py",
            executable = True,
        ),
    },
)
