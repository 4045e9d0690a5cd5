#!/usr/bin/env bash
# Builds a wheel of the Megatron that comes next and prints its path on the last line.
#
#   bash tests/compatibility/megatron_wheel.sh OUT               the commit below, fetched from Megatron's repository
#   bash tests/compatibility/megatron_wheel.sh OUT REPOSITORY    the same commit from a clone, a bare one too
#
# Environment:
#   MEGATRON_COMMIT   another commit
#   SNIP_PYTHON       the interpreter that builds (default: python3), with pip
set -euo pipefail

MEGATRON_COMMIT="${MEGATRON_COMMIT:-d98e8a64ddf34856e74b24714e3bedb2f5a39553}" # main, 2026-08-22: 0.20.0
out="${1:?where should the wheel be? give a folder}"
repository="${2:-https://github.com/NVIDIA/Megatron-LM}"
mkdir -p "$out" && out="$(cd -- "$out" && pwd -P)"
[[ ! -d "$repository" ]] || repository="$(cd -- "$repository" && pwd -P)"

source_tree="$(mktemp -d)"
trap 'rm -rf -- "$source_tree"' EXIT
git init --quiet "$source_tree"
git -C "$source_tree" fetch --quiet --depth 1 "$repository" "$MEGATRON_COMMIT"
git -C "$source_tree" checkout --quiet FETCH_HEAD
# Megatron's own version of a checkout names its commit: 0.20.0+d98e8a64d.
"${SNIP_PYTHON:-python3}" -m pip wheel -qq --no-deps --wheel-dir "$source_tree/wheel" "$source_tree"
wheel="$(echo "$source_tree"/wheel/megatron_core-*.whl)"
cp -- "$wheel" "$out/"
echo "$out/${wheel##*/}"
