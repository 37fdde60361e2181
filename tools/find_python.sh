#!/bin/sh
# Prints the path of a Python to make .venv with: 3.12 or newer, with venv and pip. Exits 1, with one line, when there is none.
# Every candidate is run before it is believed: pyenv leaves shims on PATH for versions that are not switched on.
# The versions that the lock is tested with come first. With arguments, only those versions are looked for: find_python.sh 3.12

versions="${*:-3.13 3.12 3.14 3.15 3.16 3.17 3.18 3.19}"
pyenv="${PYENV_ROOT:-$HOME/.pyenv}/versions"
without_venv=""

try() { # candidate: prints its path and ends the search if it will do
    [ -x "$1" ] || return 0
    "$1" -c 'import sys, sysconfig; sys.exit(sys.version_info < (3, 12) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' >/dev/null 2>&1 || return 0
    if "$1" -c 'import ensurepip, ssl, venv' >/dev/null 2>&1; then
        # The base of a virtual environment, so that an activated .venv can be made anew.
        "$1" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'
        exit 0
    fi
    without_venv=" ($1 lacks venv, pip or ssl; on Debian and Ubuntu install its -venv package)"
}

on_path() { # name: every place on PATH, since a broken shim may hide a good one
    old_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        IFS=$old_ifs
        try "${folder:-.}/$1"
    done
    IFS=$old_ifs
}

for version in $versions; do
    on_path "python$version"
    for folder in "$pyenv/$version"*; do
        try "$folder/bin/python"
    done
done
if [ $# -gt 0 ]; then
    echo "kvjax needs Python $*: none works on PATH or under $pyenv$without_venv" >&2
    exit 1
fi
on_path python3
on_path python

echo "kvjax needs Python 3.12 or newer: looked for python3.12 to python3.19, python3 and python on PATH," \
    "and for 3.12 to 3.19 under $pyenv; none works$without_venv" >&2
exit 1
