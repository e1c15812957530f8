#!/usr/bin/env bash
# Sourced by launch/test.sh and launch/quickstart.sh. Afterwards the working directory is the repository root and
# `python` is that of .venv, which holds what requirements.txt names. Nothing is done twice.
# PYTHON=/path/to/python3.12 picks the interpreter that .venv is made with.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

say() { printf 'tango_jax: %s\n' "$*" >&2; }

fail() {
    printf 'tango_jax: error: %s\n' "$*" >&2
    exit 1
}

# usable PYTHON MODULES: it starts, its version is supported and it can import the modules. Starting it matters: a pyenv
# shim of a version that is not selected is on PATH but only prints an error.
usable() {
    "$1" -c "import sys, $2; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))" >/dev/null 2>&1
}

# Without its pyvenv.cfg, .venv/bin/python would be the system's Python, and pip would install there.
usable_venv() { [[ -f $venv/pyvenv.cfg ]] && usable "$venv/bin/python" pip; }

version_of() { "$1" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null || echo "not a Python"; }

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        usable "$PYTHON" "venv, ensurepip" || fail "PYTHON=$PYTHON is $(version_of "$PYTHON"), or lacks the venv module." \
            "Point PYTHON at a Python 3.11, 3.12 or 3.13 (on Debian and Ubuntu with its python3.X-venv package)."
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if usable "$candidate" "venv, ensurepip"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no usable Python 3.11, 3.12 or 3.13 on PATH (python3 is $(version_of python3))." \
        "Install one (on Debian and Ubuntu with its python3.X-venv package), or set PYTHON=/path/to/python3.11."
}

make_venv() {
    local python
    if usable_venv; then
        [[ -z "${PYTHON:-}" || "$(version_of "$PYTHON")" == "$(version_of "$venv/bin/python")" ]] && return
    fi
    python=$(find_python) || exit 1
    say "making .venv with $python, $(version_of "$python") (a few seconds)"
    "$python" -m venv --clear "$venv" || fail "$python could not make $venv; see the message above."
}

install_requirements() {
    # The stamp is a copy of the file that was installed, written last: a broken installation is repaired by the next run.
    local stamp=$venv/installed_requirements.txt
    cmp -s "$root/requirements.txt" "$stamp" && return
    say "installing requirements.txt into .venv (1 to 5 minutes; only when that file has changed)"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -r "$root/requirements.txt" ||
        fail "pip could not install requirements.txt; the reason is above." \
            "Check the network and the disk space (1.5 GB), then run this script again."
    cp "$root/requirements.txt" "$stamp"
}

make_venv
install_requirements
export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
cd -- "$root" || fail "cannot enter $root."
