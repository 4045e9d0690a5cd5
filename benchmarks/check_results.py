"""Checks the committed result files: ``python -m benchmarks.check_results``.

Each file must be named by a page or by a source file, and all of them together must stay small. A page that names the
Markdown table of a result names the result too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.common import ROOT

RESULTS = ROOT / "benchmarks/results"
MOST_LINES = 60_000
SOURCES = ("docs", "snip_megatron", "launch", "patches", "examples", "benchmarks", "tests")


def result_files() -> list[Path]:
    """Return all result files."""
    return sorted(path for path in RESULTS.rglob("*") if path.is_file())


def unnamed(files: list[Path]) -> list[Path]:
    """Return the result files that neither a page nor a source file names."""
    texts = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py")]
    texts += ROOT.glob("*.md")
    named = "\n".join(path.read_text(encoding="utf-8") for path in texts if not path.is_relative_to(RESULTS))
    linked = {path for path in files if path.name in named or path.stem in named}
    return [path for path in files if path not in linked]


def main() -> int:
    """Print what is wrong. Returns 1 if anything is."""
    files = result_files()
    faults = [f"{path.relative_to(ROOT)}: no page and no source file names it" for path in unnamed(files)]
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    if lines > MOST_LINES:
        faults.append(f"{lines} lines in benchmarks/results; at most {MOST_LINES} are kept")
    print("\n".join(faults), end="\n" if faults else "")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
