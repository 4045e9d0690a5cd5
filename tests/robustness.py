"""The tests that compare numbers, under several kernels, thread counts and seeds. From the repository's root:

    python tests/robustness.py --out benchmarks/robustness_<machine>_<date>.md
    python tests/robustness.py --settings avx2 seed-1 --tests tests/unit/gemm

PyTorch, oneDNN and MKL choose kernels by the processor, and other kernels add in another order. A test must not depend
on that order. Prints one table and, with ``--out``, writes it as Markdown. Exit code 1 when any test failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/distributed/test_layout_matrix.py",
    "tests/distributed/test_oracle.py",
    "tests/distributed/test_experts.py",
    "tests/distributed/test_score_sources.py",
    "tests/distributed/test_layers_parallel.py",
    "tests/unit/quantization",
    "tests/unit/gemm",
    "tests/unit/layers",
    "tests/unit/statistics",
    "tests/unit/optimizers",
    "tests/unit/sensitivity",
)
"""They compare layouts, kernels, or a computation with the same in another order."""
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
_AVX512 = {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"}
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "avx2": _AVX2,
    "avx512": _AVX512,
    "no-vectors": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
    "two-threads": {"OMP_NUM_THREADS": "2"},
    "seed-1": {"SNIP_TEST_SEED": "1"},
    "avx2-two-threads-seed-2": _AVX2 | {"OMP_NUM_THREADS": "2", "SNIP_TEST_SEED": "2"},
}
"""Variables beside the environment's own. SNIP_TEST_SEED is added to the seed of trainings (distributed/launch.py)."""
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")


def processor() -> tuple[str, list[str]]:
    """The processor's name and which of FLAGS it has."""
    described: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        described.setdefault(name.strip(), value.strip())
    flags = described.get("flags", "").split()
    return described.get("model name", "unknown"), [flag for flag in FLAGS if flag in flags]


def run(settings: dict[str, str], tests: list[str]) -> tuple[int, int, list[str], float]:
    """(passed, skipped, what failed, seconds) of one pytest under these variables."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"CUDA_VISIBLE_DEVICES": ""} | settings
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if not report.exists():
            return 0, 0, [f"pytest: exit code {done.returncode}"], time.monotonic() - started
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed, skipped = [], 0
    for case in cases:
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failed.append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        skipped += "skipped" in outcomes
    if done.returncode and not failed:
        failed.append(f"pytest: exit code {done.returncode}")
    return len(cases) - len(failed) - skipped, skipped, failed, time.monotonic() - started


def page(rows: dict[str, tuple[int, int, list[str], float]]) -> str:
    """The table, with what it takes to repeat it."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    name, flags = processor()
    command = shlex.join(["python", "tests/robustness.py", *sys.argv[1:]])
    lines = [
        f"`{command}`, commit {commit.stdout.strip()[:12] or 'unknown'}.",
        f"{os.cpu_count()} cores, {name}: {', '.join(flags)}.",
        "",
        "| setting | variables | passed | skipped | failed | minutes |",
        "|---|---|---|---|---|---|",
    ]
    for setting, (passed, skipped, failed, seconds) in rows.items():
        variables = " ".join(f"{key}={value}" for key, value in SETTINGS[setting].items()) or "none"
        counts = f"{passed} | {skipped} | {len(failed)}"
        lines.append(f"| {setting} | {variables} | {counts} | {seconds / 60:.0f} |")
    failures = [f"- {setting}: {test}" for setting, row in rows.items() for test in row[2]]
    return "\n".join([*lines, *(["", "Failed:", "", *failures] if failures else [])]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Numerical tests under several kernels, thread counts and seeds")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="pytest's arguments instead of the named tests")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    arguments = parser.parse_args()
    rows = {}
    for name in arguments.settings:
        if "avx512" in name and "avx512f" not in processor()[1]:
            continue
        print(f"== {name}: {SETTINGS[name]}", flush=True)
        rows[name] = run(SETTINGS[name], arguments.tests)
        if arguments.out:
            arguments.out.write_text(f"# Numerical tests under other kernels, threads and seeds\n\n{page(rows)}")
    print(page(rows))
    return 1 if any(row[2] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
