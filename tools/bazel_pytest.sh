#!/bin/sh
# Runs pytest for one Bazel test: the project's files are those that the target depends on, everything else comes from .venv.
# Bazel lays the files out as in the repository; here they are linked under the names they are imported by. `python -S` leaves out
# the editable install, so a layer that the target does not depend on cannot be imported.
set -eu

venv=$(dirname "$(readlink -f pyproject.toml)")/.venv
if ! [ -x "$venv/bin/python" ]; then
    echo "$venv is missing: run 'make venv' first" >&2
    exit 1
fi

imports=$TEST_TMPDIR/imports
place() { # folder, imported as
    [ -d "$1" ] || return 0
    mkdir -p "$imports/$2"
    ln -s "$PWD/$1"/* "$imports/$2"
}
place pallas_kernels pallas_kernels
place kvjax kvjax
place models kvjax/models
place serving kvjax/serving

for packages in "$venv"/lib/python3*/site-packages; do
    export PYTHONPATH="$imports:$packages"
done
export HOME="$TEST_TMPDIR"
exec "$venv/bin/python" -SP -m pytest -p no:cacheprovider --rootdir=. --config-file=pyproject.toml --junitxml="$XML_OUTPUT_FILE" "$@"
