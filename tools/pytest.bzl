"""pytest_test: a rule that runs pytest. It is defined here because py_test and sh_test make older versions of Bazel download rules_cc."""

def _pytest_test_impl(ctx):
    script = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.write(
        script,
        "#!/bin/sh\nexec {} {}\n".format(ctx.file._runner.short_path, " ".join(ctx.attr.paths)),
        is_executable = True,
    )
    runfiles = ctx.runfiles(files = ctx.files.data + [ctx.file._runner])
    for dependency in ctx.attr.data:
        runfiles = runfiles.merge(dependency[DefaultInfo].default_runfiles)
    return [DefaultInfo(executable = script, runfiles = runfiles)]

pytest_test = rule(
    implementation = _pytest_test_impl,
    test = True,
    attrs = {
        "data": attr.label_list(allow_files = True, doc = "the tests, the files they read, and the libraries they import"),
        "paths": attr.string_list(doc = "the paths that pytest gets"),
        "_runner": attr.label(default = "//:tools/bazel_pytest.sh", allow_single_file = True),
    },
)
