"""The whole of ``tests/gpu`` in one call, which ``gpu_test.sh`` starts: processes of pytest that share a card.

Each file is run by a process of its own, or by several. Tests marked ``alone`` follow when the card is free. Every
process appends what came of each test to a file, so that nothing is lost if it dies or is stopped at the limit. A test
without an outcome counts as an error.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
REPOSITORY = SCRIPTS.parent
GPU = REPOSITORY / "tests" / "gpu"
RESULTS = REPOSITORY / "benchmarks/results/reliability"
REPORT, PART = "GPU_SUITE_REPORT", "GPU_SUITE_PART"
ALONE_S = 95.0
"""Seconds at the end that are kept for the tests that need the card alone."""
PARTS = {
    "test_families.py": 1, "test_graphs.py": 1, "test_timed_training.py": 1, "test_blame_gpu.py": 4,
    "test_grouped_gpu.py": 2, "test_swiglu.py": 2, "test_emulated_gpu.py": 1, "test_host_path.py": 1,
    "test_linear.py": 1,
}  # fmt: skip
"""Files in the order in which they start, the longest first, and into how many processes each is split."""


# -- in a process of pytest ----------------------------------------------------------------------------------------
def _add(**fields: Any) -> None:
    if path := os.environ.get(REPORT):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep this process's part of the tests: neighbours, which share compiled kernels."""
    index, count = map(int, os.environ.get(PART, "0/1").split("/"))
    begin, end = (len(items) * place // count for place in (index, index + 1))
    if dropped := [*items[:begin], *items[end:]]:
        items[:] = items[begin:end]
        config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish(session: Any) -> None:
    _add(collected=[item.nodeid for item in session.items])


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _add(test=report.nodeid, outcome="error", seconds=0.0, text=str(report.longrepr))
    elif report.skipped:  # a whole file
        _add(test=report.nodeid, outcome="skipped", seconds=0.0, text=_reason(report.longrepr))


def pytest_runtest_logreport(report: Any) -> None:
    if report.skipped:
        _add(test=report.nodeid, outcome="skipped", seconds=report.duration, text=_reason(report.longrepr))
    elif report.failed:
        outcome = "failed" if report.when == "call" else "error"
        text = "\n".join([report.longreprtext, *(content for _, content in report.sections)])
        _add(test=report.nodeid, outcome=outcome, seconds=report.duration, text=text)
    elif report.when == "call":
        _add(test=report.nodeid, outcome="passed", seconds=report.duration, text="")


def _reason(skip: Any) -> str:
    text = skip[2] if isinstance(skip, tuple) else str(skip)
    return str(text).removeprefix("Skipped: ")


# -- the processes -------------------------------------------------------------------------------------------------
_BEGAN = time.monotonic()


def say(message: str) -> None:
    """Print a line of the timeline."""
    print(f"{time.monotonic() - _BEGAN:5.0f} s  {message}", flush=True)


@dataclass
class Shard:
    """Tests that one process runs.

    Attributes:
        files: The files of tests, in tests/gpu.
        marks: The expression of pytest's ``-m``.
        part: Which tests of the files, ``<index>/<count>``.
    """

    files: list[Path]
    marks: str
    part: str = "0/1"
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    seconds: float | None = None
    folder: Path = field(default_factory=Path)

    @property
    def name(self) -> str:
        names = self.files[0].stem.removeprefix("test_") if len(self.files) == 1 else f"{len(self.files)} files"
        return names if self.part == "0/1" else f"{names} {self.part}"

    def start(self, folder: Path, extra: list[str]) -> None:
        self.folder, self.began = folder, time.monotonic()
        say(f"begins: {self.name}")
        folder.mkdir()
        command = [sys.executable, "-m", "pytest", "-p", "gpu_suite", "-p", "no:cacheprovider", "-qsm", self.marks]
        folders = [str(REPOSITORY), str(GPU), str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {REPORT: str(folder / "report.jsonl"), PART: self.part, "PYTHONPATH": os.pathsep.join(folders)}
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *map(str, self.files), *extra], cwd=REPOSITORY, env=os.environ | own, stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def ended(self) -> bool:
        if self.seconds is None and self.process is not None and self.process.poll() is not None:
            self.seconds = time.monotonic() - self.began
            say(f"ends after {self.seconds:.0f} s: {self.name}: exit code {self.process.returncode}")
        return self.seconds is not None

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace") if self.process is not None else ""

    def results(self) -> Iterator[dict[str, Any]]:
        """Yield the outcome of every test. One without an outcome, and a process without tests to run, is an error."""
        path, collected, seen = self.folder / "report.jsonl", None, set()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # a line that was cut off
                entry = json.loads(line)
                if "collected" in entry:
                    collected = entry["collected"]
                else:
                    seen.add(entry["test"])
                    yield entry
        end = "was not started" if self.process is None else f"ended with {self.process.returncode} before this test"
        text = f"{end}\n{self.log()[-2000:]}"
        for test in [self.name] if collected is None else [each for each in collected if each not in seen]:
            yield {"test": test, "outcome": "error", "seconds": 0.0, "text": text}


def run(shards: list[Shard], slots: int, until: float, work: Path, extra: list[str]) -> None:
    """Run shards in their order, as many at once as there are slots, and stop what runs at the time ``until``."""
    waiting, running = list(shards), list[Shard]()
    while (waiting or running) and time.monotonic() < until:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
            running[-1].start(work / f"{len(list(work.iterdir()))}-{re.sub(r'\W+', '-', running[-1].name)}", extra)
        time.sleep(0.2)
        running = [shard for shard in running if not shard.ended()]
    if running:
        say(f"at the limit: {', '.join(shard.name for shard in running)}")
    stop(running, work)


def stop(shards: list[Shard], work: Path) -> None:
    """End processes of pytest and the trainings that they started, by a variable that all of them have."""
    mark = f"GPU_SUITE_WORK={work}".encode()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(path.name) != os.getpid() and mark in (path / "environ").read_bytes().split(b"\0"):
                    os.kill(int(path.name), number)
        end = time.monotonic() + 5.0
        while any(not shard.ended() for shard in shards) and time.monotonic() < end:
            time.sleep(0.1)


# -- the result ----------------------------------------------------------------------------------------------------
def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Count outcomes, one a test: an error of its teardown counts beside the test's own outcome."""
    counts = Counter(each["outcome"] for each in results)
    skipped = Counter(each["text"] for each in results if each["outcome"] == "skipped")
    return {
        "passed": counts["passed"], "failed": counts["failed"], "errors": counts["error"],
        "skipped": dict(sorted(skipped.items())),
    }  # fmt: skip


def card() -> tuple[str, int]:
    """Return the name of the card, ``cpu`` without one, and how many there are. No context stays on it."""
    code = "import torch.cuda as c; n = c.device_count(); print(c.get_device_name() if n else 'cpu', n, sep='|')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, count = done.stdout.splitlines()[-1].split("|")
    return name, int(count)


def commit() -> str:
    """Return the commit: $SNIP_COMMIT, else git's. A copy of the tree may have no .git."""
    head = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError):
        found = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
        return os.environ.get("SNIP_COMMIT") or found or "unknown"
    return os.environ.get("SNIP_COMMIT") or "unknown"


def shards_of(cards: int) -> tuple[list[Shard], list[Shard]]:
    """Return what shares the card, and what needs it alone. On two cards, the tests that need two."""
    found = sorted(GPU.glob("test_*.py"))
    files = [GPU / name for name in PARTS if GPU / name in found]
    rest = [file for file in found if file not in files]
    alone = [file for file in found if "pytest.mark.alone" in file.read_text()]
    if cards == 2:
        two = [file for file in [*files, *rest] if "two_gpus" in file.read_text()]
        return [Shard([file], "two_gpus") for file in two], []
    share = "not alone and not matrix"
    parts = [Shard([file], share, f"{i}/{PARTS[file.name]}") for file in files for i in range(PARTS[file.name])]
    return [*parts, Shard(rest, share)], [Shard(alone, "alone")] if alone else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="bash scripts/gpu_test.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--cards", type=int, choices=(1, 2), default=1, help="2 runs the tests that need two cards")
    parser.add_argument("--out", type=Path, help="result file (default: one in benchmarks/results/reliability)")
    parser.add_argument("--limit", type=float, default=525.0, help="seconds after which what still runs is stopped")
    parser.add_argument("--jobs", type=int, help="processes of pytest at once (default: half of the cores)")
    args, extra = parser.parse_known_args()
    began, date = time.monotonic(), datetime.datetime.now(datetime.UTC).date().isoformat()
    cores = len(os.sched_getaffinity(0))
    name, present = card()
    if present < args.cards:
        print(f"this machine has {present} CUDA devices: tests that need more are skipped", flush=True)
    device = name if args.cards == 1 else f"{args.cards} × {name}"
    slug = re.sub(r"\W+", "-", name.removeprefix("NVIDIA ").lower()) + ("" if args.cards == 1 else f"_x{args.cards}")
    out = args.out or RESULTS / f"gpu_suite_{slug}_{date}.json"
    shared, alone = shards_of(args.cards)
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as folder:
        work = Path(folder)
        os.environ |= {"GPU_SUITE_WORK": folder, "PYTHONUNBUFFERED": "1"}
        for variable, value in (
            ("OMP_NUM_THREADS", 1), ("TORCHINDUCTOR_COMPILE_THREADS", 1), ("AT_ONCE", max(2, cores * 3 // 4)),
        ):  # fmt: skip
            os.environ.setdefault(variable, str(value))
        end = began + args.limit
        run(shared, args.jobs or max(2, cores // 2), end - (ALONE_S if alone else 0.0), work, extra)
        run(alone, 1, end, work, extra)
        results = [entry for shard in [*shared, *alone] for entry in shard.results()]
        logs = [f"== {shard.name}\n{shard.log()[-20_000:]}" for shard in [*shared, *alone]]
    body = {"date": date, "device": device, "commit": commit()} | summary(results)
    body["seconds"] = round(time.monotonic() - began)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(body, indent=1) + "\n")
    bad = [entry for entry in results if entry["outcome"] in ("failed", "error")]
    slowest = sorted(results, key=lambda entry: -entry["seconds"])
    details = out.with_suffix(".log")
    texts = [f"== {entry['outcome']}: {entry['test']}\n{entry['text']}" for entry in bad]
    texts += ["\n".join(f"{entry['seconds']:7.1f} s {entry['outcome']:8} {entry['test']}" for entry in slowest), *logs]
    details.write_text("\n\n".join(texts) + "\n")
    for entry in slowest[:12]:
        print(f"{entry['seconds']:5.0f} s  {entry['test']}")
    for entry in bad[:40]:
        last = [line for line in entry["text"].splitlines() if line.startswith("E ")] or entry["text"].splitlines()
        print(f"{entry['outcome']}: {entry['test']}: {' '.join(last[:1])[:200]}")
    print(json.dumps(body))
    print(f"{out}; what failed, seconds of each test, and output: {details}")
    return int(bool(bad) or not body["passed"])


if __name__ == "__main__":
    sys.exit(main())
