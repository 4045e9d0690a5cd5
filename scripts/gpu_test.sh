#!/usr/bin/env bash
# All of tests/gpu on one card, in one call of at most nine minutes, and its result file. No release without it, nor
# without the one on two cards (CONTRIBUTING.md).
#
#   bash scripts/gpu_test.sh                       on one card, which nothing else should use meanwhile
#   bash scripts/gpu_test.sh --cards 2             the tests that need two cards
#   bash scripts/gpu_test.sh --out FILE.json       elsewhere than benchmarks/results/reliability
#   bash scripts/gpu_test.sh -k swiglu             further arguments go to pytest
#
# It uses the python in PATH if that one has megatron.core, as in a container; otherwise scripts/bootstrap.sh makes an
# environment. A copy of the tree without .git takes the commit from SNIP_COMMIT. Exit code 1 if a test failed or did not
# run, or if none passed.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1
python="$(type -P python || type -P python3 || true)"
if [[ -z "$python" ]] || ! "$python" -c 'import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in ("torch", "pytest", "megatron", "megatron.core")))'; then
    source scripts/bootstrap.sh
    python="$(type -P python)"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" scripts/gpu_suite.py "$@"
