#!/bin/sh
# Runs pytest for one Bazel test. The project's files are those that the target depends on; all other packages come from .venv.
# Bazel places the files as in the repository. This script links them under the names by which they are imported. `python -S` leaves
# out the editable install, so that a layer cannot be imported if the target does not depend on it.
set -eu

venv=$(dirname "$(readlink -f pyproject.toml)")/.venv
if ! [ -x "$venv/bin/python" ]; then
    echo "$venv is missing: run 'make venv' first" >&2
    exit 1
fi

imports=$TEST_TMPDIR/imports
place() { # arguments: a source folder, and the path of the name by which it is imported
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
