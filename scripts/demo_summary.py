"""Prints the progress of the demonstration, and at its end the result and whether it is enough."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

MIN_MAPS = 2
MIN_FP4_SHARE = 0.75
MAX_OF_UNIGRAM = 0.92

STEP = re.compile(r"iteration\s+(\d+)/\s*(\d+) .*per iteration \(ms\): ([\d.]+) .*lm loss: ([\d.E+-]+)")
VALIDATION = re.compile(
    r"validation loss at (?:iteration (\d+)).*?\| lm loss value: ([\d.E+-]+|nan|inf)", re.IGNORECASE
)


def watch(lines: Iterable[str], log: TextIO) -> None:
    """Copy Megatron's output to ``log``, and print one short line for each step that it reports."""
    print("starting Python and Megatron on both ranks …", flush=True)
    for line in lines:
        log.write(line)
        log.flush()
        if match := STEP.search(line):
            step, steps, milliseconds, loss = match.groups()
            print(
                f"step {step:>4}/{steps}   loss {float(loss):.4f}   {float(milliseconds) / 1000:.2f} s a step",
                flush=True,
            )
        elif match := VALIDATION.search(line):
            print(f"step {match[1]:>4}       validation loss {float(match[2]):.4f}", flush=True)
        elif line.startswith(("snip", "compat:")):
            print(line.rstrip(), flush=True)


def validation_loss(log: str) -> tuple[int, float] | None:
    """Return (step, nats a token) of the last validation in Megatron's output. None without a validation."""
    validations = VALIDATION.findall(log)
    return (int(validations[-1][0]), float(validations[-1][1])) if validations else None


def criteria(
    adopted: list[dict[str, Any]], loss: tuple[int, float] | None, unigram: float, report: Path
) -> list[tuple[str, bool]]:
    """Return (demand, whether it is met) for each demand on the demonstration."""
    maps = [e for e in adopted if e.get("status") == "optimal" and (e.get("achieved") or 0.0) >= MIN_FP4_SHARE]
    page = report.read_text(encoding="utf-8") if report.is_file() else ""
    return [
        (
            f"at least {MIN_MAPS} maps adopted, optimal, with an fp4 share of at least {MIN_FP4_SHARE}",
            len(maps) >= MIN_MAPS,
        ),
        (
            f"validation loss at most {MAX_OF_UNIGRAM} of the hold-out's unigram entropy",
            loss is not None and loss[1] <= MAX_OF_UNIGRAM * unigram,
        ),
        ("a report was written", "</html>" in page),
    ]


def check(run: Path, data: Path, log: Path, gpu_run: Path) -> int:
    """Print the result of the run and that of a recorded ``gpu_run``. Returns 0 if all demands are met, otherwise 1."""
    from snip_megatron.reporting.report import write_report
    from snip_megatron.reporting.summary import headline, sentences, summarise
    from snip_megatron.runtime.run_data import load_run, read_events, read_maps

    adopted = [event for event in read_events(run) if event["event"] == "adopt"]
    maps = read_maps(run)
    loss = validation_loss(log.read_text(encoding="utf-8", errors="replace"))
    unigram: float = json.loads((data / "manifest.json").read_text())["valid"]["unigram_entropy_nats"]
    report, gpu_report = write_report(run), write_report(gpu_run, run / "recorded.html")
    print("map  step  status     fp4 share  changed GEMMs")
    for event in adopted:
        recorded = maps.get(event["step"])
        if recorded is None or recorded.version != event["version"]:
            print(f"snip: {run}/maps/step_{event['step']}.json is not the map that was adopted", file=sys.stderr)
            return 1
        achieved = event["achieved"] if event.get("achieved") is not None else float("nan")
        print(
            f"{event['version']:>3}  {event['step']:>4}  {event['status']:<9}  {achieved:>9.4f}  {event['changed']:>13}"
        )
    validation = "none" if loss is None else f"{loss[1]:.4f} nats a token after step {loss[0]}"
    print(f"validation loss                   {validation}")
    print(f"unigram entropy of the hold-out   {unigram:.4f} nats a token")
    if loss is not None:
        print(f"ratio                             {loss[1] / unigram:.3f}")
    demands = criteria(adopted, loss, unigram, report)
    for demand, met in demands:
        print(f"{'met    ' if met else 'NOT MET'}  {demand}")
    on_gpu = summarise(load_run(gpu_run))
    lines = [headline(on_gpu), sentences(on_gpu)[0], *on_gpu.warnings]
    print(f"a recorded run on a GPU: {gpu_report}", *lines, sep="\n  ")
    success = all(met for _, met in demands)
    verdict = f"SNIP chose {len(adopted)} maps while this model trained" if success else "a demand is not met"
    print(f"verdict: {verdict}. {headline(summarise(load_run(run)))}")
    print(f"report: {report}")
    return 0 if success else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    watching = commands.add_parser("watch", help="standard input to a log, progress to standard output")
    checking = commands.add_parser("check", help="print the result and judge it")
    for name in ("run", "data", "recorded"):
        checking.add_argument(f"--{name}", type=Path, required=True)
    for command in (watching, checking):
        command.add_argument("--log", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "watch":
        with arguments.log.open("w", encoding="utf-8") as log:
            watch(sys.stdin, log)
        return 0
    return check(arguments.run, arguments.data, arguments.log, arguments.recorded)


if __name__ == "__main__":
    sys.exit(main())
