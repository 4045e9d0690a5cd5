#!/usr/bin/env bash
# Finds a Python >= 3.12, makes or repairs the virtual environment with the pinned dependencies, puts it first in PATH.
#
#   bash scripts/bootstrap.sh      only make the environment
#   source scripts/bootstrap.sh    make it and use it (scripts/demo.sh and scripts/test.sh do)
#
# Environment:
#   SNIP_PYTHON   the interpreter to build on (default: the first suitable one in PATH, then among pyenv's versions)
#   SNIP_VENV     where the environment lives (default: .venv in the repository)
#
# Finding Python uses bash alone, so that a bare PATH still ends in one clear line.

snip_root="$(cd -- "${BASH_SOURCE[0]%/*}/.." && pwd -P)"

# A CPython in [$2, $3) that can make virtual environments (Debian ships venv apart).
snip_suits() {
    "$1" -I -c "import sys, venv, ensurepip
sys.exit(not ($2 <= sys.version_info[:2] < $3 and sys.implementation.name == 'cpython'))" </dev/null &>/dev/null
}

snip_candidates() {
    local root name
    for name in python3.12 python3.13 python3 python; do
        # A pyenv shim answers to a name it has no selected version for: it is only a candidate, run before belief.
        type -P "$name"
    done
    for root in ${PYENV_ROOT:+"$PYENV_ROOT"} ${HOME:+"$HOME/.pyenv"}; do
        for name in "$root"/versions/3.12*/bin/python3 "$root"/versions/3.*/bin/python3; do
            [[ -x "$name" ]] && printf '%s\n' "$name"
        done
    done
    return 0
}

# Prints the interpreter to use. 3.12 and 3.13 come first: megatron-core has wheels for these and must be compiled for others.
snip_find_python() {
    local candidate range
    if [[ -n "${SNIP_PYTHON:-}" ]]; then
        snip_suits "$SNIP_PYTHON" "(3, 12)" "(4, 0)" && printf '%s\n' "$SNIP_PYTHON" && return 0
        printf 'snip: SNIP_PYTHON=%s is not a CPython >= 3.12 with the venv module\n' "$SNIP_PYTHON" >&2
        return 1
    fi
    for range in "(3, 14)" "(4, 0)"; do
        while IFS= read -r candidate; do
            snip_suits "$candidate" "(3, 12)" "$range" && printf '%s\n' "$candidate" && return 0
        done < <(snip_candidates)
    done
    printf 'snip: no Python >= 3.12 (with its venv module) in PATH or among pyenv versions; get one with "%s" or "%s", %s\n' \
        'pyenv install 3.12' 'apt install python3.12 python3.12-venv' 'or name one in SNIP_PYTHON' >&2
    return 1
}

snip_python="$(snip_find_python)" || exit 1
SNIP_VENV="$("$snip_python" -I "$snip_root/scripts/bootstrap.py" --print-venv)" || exit 1
"$snip_python" -I "$snip_root/scripts/bootstrap.py" || exit
export SNIP_VENV VIRTUAL_ENV="$SNIP_VENV" PATH="$SNIP_VENV/bin:$PATH"
# The installation leaves byte code to the first import. Where none may be written, every process would compile torch and
# Megatron again, which takes three times as long as to load them.
unset PYTHONHOME PYTHONDONTWRITEBYTECODE
