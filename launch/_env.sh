#!/usr/bin/env bash
# Sourced by the other scripts. Afterwards the working directory is the repository root and `python` is that of .venv,
# which holds what requirements.txt names, and jax's own packages for TANGO_PLATFORM (cpu, gpu or tpu); `install_extras`
# adds more to it. Nothing is done twice. Three variables change that:
#   PYTHON=/path/to/python3.12         the interpreter that .venv is made with
#   TANGO_VENV=.venv-3.13              another name than .venv, for a second environment beside it
#   TANGO_PYTHON=/path/to/bin/python   an environment that has the requirements already (a container image, conda, a
#                                      cluster's module): it is used as it is, and no .venv is made

platform=${TANGO_PLATFORM:-cpu}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/${TANGO_VENV:-.venv}

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
    say "making ${venv##*/} with $python, $(version_of "$python") (a few seconds)"
    "$python" -m venv --clear "$venv" || fail "$python could not make $venv; see the message above."
}

# install_once STAMP WANTED WHAT PIP_ARGUMENTS...: the stamp holds what was installed and is written last, so that the
# next run repairs a broken installation. A stamp that begins with what is wanted will do: it has more.
install_once() {
    local stamp=$venv/$1 wanted=$2 what=$3
    shift 3
    [[ -f $stamp && "$(<"$stamp")" == "$wanted"* ]] && return
    say "installing $what into ${venv##*/} (1 to 5 minutes; only when it has changed)"
    rm -f "$stamp"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@" ||
        fail "pip could not install $what; the reason is above." \
            "Check the network and the disk space (1.5 GB), then run this script again."
    printf '%s\n' "$wanted" >"$stamp"
}

install_requirements() {
    local accelerator=()
    case $platform in
        gpu) accelerator=("jax[cuda12]") ;;
        tpu) accelerator=("jax[tpu]") ;;
    esac
    # The accelerator comes last: what was installed for a GPU does for a CPU too.
    install_once installed_requirements.txt "$(cat "$root/requirements.txt" && echo "${accelerator[@]}")" \
        "requirements.txt${accelerator[*]:+ and ${accelerator[*]}}" -r "$root/requirements.txt" "${accelerator[@]}"
}

list_extras='
import sys, tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(item for name in sys.argv[1:] for item in extras[name]), sep="\n")'

list_missing='
import importlib.metadata, re, sys
names = [re.match(r"[\w.-]+", item)[0] for item in sys.argv[1:]]
installed = {re.sub(r"[-_.]+", "-", item.name).lower() for item in importlib.metadata.distributions()}
print(*(name for name in names if re.sub(r"[-_.]+", "-", name).lower() not in installed))'

# install_extras NAMES...: these extras of pyproject.toml, for the scripts that need them. Call it after sourcing this.
install_extras() {
    local wanted packages missing extras="$*"
    wanted=$(python -c "$list_extras" "$@") || fail "cannot read the extras ${extras// /, } from pyproject.toml."
    mapfile -t packages <<<"$wanted"
    if [[ -z "${TANGO_PYTHON:-}" ]]; then
        # With the requirements, so that pip changes none of them to a version out of bounds.
        install_once installed_extras.txt "$wanted" "the extras ${extras// /, }" \
            -r "$root/requirements.txt" "${packages[@]}"
        return
    fi
    missing=$(python -c "$list_missing" "${packages[@]}") || fail "TANGO_PYTHON=$TANGO_PYTHON cannot list its packages."
    [[ -z $missing ]] || fail "TANGO_PYTHON=$TANGO_PYTHON lacks ${missing// /, }." \
        "Install them ($TANGO_PYTHON -m pip install -e '${root}[${extras// /,}]')," \
        "or unset TANGO_PYTHON to have .venv made."
}

use_ready_environment() {
    # Found, not imported: that would take seconds.
    local bin has_requirements='import importlib.util as u; assert all(map(u.find_spec, ("jax", "flax", "orbax")))'
    if ! usable "$TANGO_PYTHON" os || ! "$TANGO_PYTHON" -c "$has_requirements" 2>/dev/null; then
        fail "TANGO_PYTHON=$TANGO_PYTHON is $(version_of "$TANGO_PYTHON"), or lacks jax, flax or orbax." \
            "Install requirements.txt there (Python 3.11 to 3.13), or unset TANGO_PYTHON to have .venv made."
    fi
    bin=$(cd -- "$(dirname -- "$(command -v -- "$TANGO_PYTHON")")" && pwd)
    [[ -x $bin/python ]] || fail "TANGO_PYTHON=$TANGO_PYTHON has no \`python\` beside it, which the scripts call."
    export PATH=$bin:$PATH
}

case $platform in
    cpu | gpu | tpu) ;;
    *) fail "TANGO_PLATFORM=$platform is none of cpu, gpu, tpu." ;;
esac
# It is emptied where it is broken, so no other folder will do; .gitignore leaves out all of these.
[[ ${venv#"$root"/} == .venv* && ${venv#"$root"/} != */* ]] ||
    fail "TANGO_VENV=$TANGO_VENV must be the name of a folder in $root that begins with .venv."
if [[ -n "${TANGO_PYTHON:-}" ]]; then
    use_ready_environment
else
    make_venv
    install_requirements
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
fi
cd -- "$root" || fail "cannot enter $root."
