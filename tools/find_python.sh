#!/bin/sh
# Prints the path of a Python that can make .venv: 3.12 or newer, with venv and pip. If there is none, prints one line and exits with 1.
# Every candidate is run first, because pyenv leaves programs on PATH for versions that are not active, and these fail.
# The versions that the lock is tested with come first. With arguments, only those versions are looked for: find_python.sh 3.12

versions="${*:-3.13 3.12 3.14 3.15 3.16 3.17 3.18 3.19}"
pyenv="${PYENV_ROOT:-$HOME/.pyenv}/versions"
without_venv=""

try() { # argument: a candidate; if it works, prints its path and ends the search
    [ -x "$1" ] || return 0
    "$1" -c 'import sys, sysconfig; sys.exit(sys.version_info < (3, 12) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' >/dev/null 2>&1 || return 0
    if "$1" -c 'import ensurepip, ssl, venv' >/dev/null 2>&1; then
        # In a virtual environment, prints the Python that made it, so that .venv can be made anew while it is active.
        "$1" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'
        exit 0
    fi
    without_venv=" ($1 lacks venv, pip or ssl; on Debian and Ubuntu install its -venv package)"
}

on_path() { # argument: a name; tries it in every folder of PATH, because one that fails may come before one that works
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
