#!/usr/bin/env bash
# Puts SNIP's step hook into the source of a vendored Megatron, for teams that allow no patching at run time.
#
#   bash scripts/apply_patches.sh PATH             PATH: the folder that holds megatron/ (a checkout, a site-packages)
#   bash scripts/apply_patches.sh --revert PATH    as released again
#   bash scripts/apply_patches.sh --check PATH     changes nothing; exit code 0: patched, 3: as released
#
# Only files as they were released are touched (patches/SHA256SUMS); of anything else nothing is, and exit code is 2.
# Applying or reverting twice does nothing the second time. A result is compared with its own SHA-256 and compiled
# before it takes the place of the file.
set -uo pipefail

patches="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../patches" && pwd -P)" || exit 2

fail() {
    printf 'apply_patches: %s\n' "$1" >&2
    exit 2
}

mode=apply target=""
for argument in "$@"; do
    case "$argument" in
        --revert) mode=revert ;;
        --check) mode=check ;;
        -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
        -*) fail "$argument: unknown; give --revert, --check or nothing, and the folder that holds megatron/" ;;
        *) [[ -z "$target" ]] || fail "one folder at a time, got $target and $argument" && target="$argument" ;;
    esac
done
[[ -n "$target" ]] || fail "which Megatron? give the folder that holds megatron/"
[[ -d "$target/megatron" ]] || fail "$target: there is no megatron/ in it; give the folder that holds megatron/"

sum_of() { sha256sum -- "$1" | cut -d ' ' -f 1; }

# The release whose file this is, patched or not.
file="" state="" wanted="" releases=()
while read -r version path released patched; do
    [[ "$version" == \#* ]] && continue
    releases+=("$version") file="$path"
    [[ -f "$target/$path" ]] || fail "$target/$path: there is no such file; SNIP needs megatron.training beside megatron.core"
    case "$(sum_of "$target/$path")" in
        "$released") state=released wanted="$patched" && break ;;
        "$patched") state=patched wanted="$released" && break ;;
    esac
done <"$patches/SHA256SUMS"
[[ -n "$state" ]] || fail "$target/$file: not the file of a released megatron-core (${releases[*]}); nothing was changed. By hand: \
make the three changes of the nearest of $patches/*.diff, see patches/README.md"
diff="$patches/megatron-core-$version.diff"

# Changes a copy; "$@": how the diff is applied. The copy takes the file's place only if it is what it should be.
change() {
    local work
    work="$(mktemp -d)" || return 1
    # shellcheck disable=SC2064  # the folder of now
    trap "rm -rf -- '$work'" EXIT
    mkdir -p "$work/$(dirname -- "$file")" && cp -p -- "$target/$file" "$work/$file" || return 1
    if command -v patch >/dev/null; then
        patch --quiet --directory="$work" --strip=1 --no-backup-if-mismatch "$@" <"$diff" || return 1
    else
        (cd -- "$work" && GIT_CEILING_DIRECTORIES="${work%/*}" git apply --unidiff-zero "$@" "$diff") || return 1
    fi
    [[ "$(sum_of "$work/$file")" == "$wanted" ]] || return 1
    "${PYTHON:-python3}" -I -m py_compile "$work/$file" || return 1
    # Beside the file first: the move is then one step, and nobody reads half of it.
    cp -p -- "$work/$file" "$target/$file.snip-new" && mv -f -- "$target/$file.snip-new" "$target/$file"
}

case "$mode $state" in
    "check released") echo "megatron-core $version: $file: as released" && exit 3 ;;
    "check patched" | "apply patched") echo "megatron-core $version: $file: patched" ;;
    "revert released") echo "megatron-core $version: $file: as released" ;;
    *)
        flags=()
        [[ "$mode" == revert ]] && flags=(--reverse)
        change ${flags[@]+"${flags[@]}"} ||
            fail "$target/$file: could not be changed (is it writable? are patch or git, and python3, in PATH?); it is as it was"
        [[ "$mode" == apply ]] && echo "megatron-core $version: $file: patched now" ||
            echo "megatron-core $version: $file: as released again"
        ;;
esac
