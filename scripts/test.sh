#!/usr/bin/env bash
# The whole check of this repository: environment, ruff, mypy, import-linter, every test. Arguments go to pytest:
#
#   bash scripts/test.sh                           everything
#   bash scripts/test.sh tests/unit/solver -k cpsat
#   bash scripts/test.sh --stack next              the tests on Megatron's main (or torch: the newest torch), recorded
#
# Exit code: pytest's, or 1 if only ruff, mypy or import-linter failed. pytest's own summary is the last line.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1
[[ "${1:-}" != --stack ]] || exec bash tests/compatibility/stack.sh "${@:2}"
source scripts/bootstrap.sh

failed=()
check() {
    local name="$1"
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy
check "lint-imports" lint-imports

echo "== pytest"
if ((${#failed[@]})); then
    echo "FAILED before the tests: ${failed[*]} (see above); this run will exit non-zero"
fi
# Tests that start ranks stay on two workers, those that run commands and those on SLURM each on one
# (tests/conftest.py). They wait at times, so three workers keep two cores busy. Each rank keeps to one thread.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python -m pytest --numprocesses 3 --dist loadgroup --durations 20 "$@"
status=$?
((status == 0 && ${#failed[@]})) && status=1
exit "$status"
