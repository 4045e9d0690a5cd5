#!/usr/bin/env bash
# Runs the tests on a stack that comes next, and records how many fail. scripts/test.sh --stack calls it:
#
#   bash scripts/test.sh --stack next [pytest's ARGS]     Megatron's main (megatron_wheel.sh), all else pinned
#   bash scripts/test.sh --stack torch [pytest's ARGS]    the newest torch, all else pinned
#
# The result is benchmarks/results/reliability/next_<date>.json, or next_torch_<date>.json. Where the suite takes too long
# for one run, record.py beside this file makes it of the JUnit reports of parts.
#
# Environment:
#   SNIP_VENV             where the environment lives (default: .venv-STACK in the repository)
#   MEGATRON_REPOSITORY   a clone of Megatron (default: it is fetched)
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
stack="${1:?which stack? next or torch}"
shift
case "$stack" in
    next) result=next ;;
    torch) result=next_torch ;;
    *) echo "test.sh: --stack $stack: unknown; choose next or torch" >&2 && exit 2 ;;
esac
export SNIP_VENV="${SNIP_VENV:-$PWD/.venv-$stack}"
source scripts/bootstrap.sh

# An environment that is made or brought up to date has the pinned versions again, and another stamp.
if ! cmp -s "$SNIP_VENV/snip-stamp.json" "$SNIP_VENV/snip-stack"; then
    pip=(python -m pip install --quiet --no-input --disable-pip-version-check --no-compile)
    if [[ "$stack" == next ]]; then
        wheel="$(SNIP_PYTHON=python bash tests/compatibility/megatron_wheel.sh "$SNIP_VENV/wheel" \
            ${MEGATRON_REPOSITORY:+"$MEGATRON_REPOSITORY"})"
        "${pip[@]}" --no-deps --force-reinstall "$wheel"
    else
        # A constraint of the machine's own pip configuration would hold torch back.
        PIP_CONSTRAINT=/dev/null "${pip[@]}" --upgrade torch
    fi
    "${pip[@]}" einops # Megatron-FSDP needs it
    cp -- "$SNIP_VENV/snip-stamp.json" "$SNIP_VENV/snip-stack"
fi

report="$(mktemp)"
trap 'rm -f -- "$report"' EXIT
# What this package does is an error if the stack calls it deprecated: in pytest, and in the processes that tests start.
folder="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
cat > "$folder/snip-deprecations.pth" << 'END'
import warnings; [warnings.filterwarnings("error", category=category, module="snip_megatron") for category in (DeprecationWarning, FutureWarning)]
END
warnings=$'error::DeprecationWarning:snip_megatron.*\nerror::FutureWarning:snip_megatron.*'
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
status=0
python -m pytest --junitxml="$report" -o "filterwarnings=$warnings" "$@" || status=$?
python tests/compatibility/record.py "benchmarks/results/reliability/${result}_$(date -u +%F).json" "$report" \
    ${1:+-- "$@"}
exit "$status"
