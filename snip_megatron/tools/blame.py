"""``snip blame RUN``: prints the verdicts of ``--snip-blame`` in a run directory, or the command that asks for one."""

import argparse
from pathlib import Path

from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.run_data import blame_command, read_config, read_events, read_metrics, step_files
from snip_megatron.sensitivity.blame import Blame


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip blame``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory (--snip-dir of a training or of a blame)")


def run(args: argparse.Namespace) -> int:
    """Print the verdicts, or the command of one. Returns 0. Raises SnipError if ``RUN`` is no run directory."""
    path: Path = args.run
    files = [file for file in path.glob("blame_*.json") if file.stem.removeprefix("blame_").isdigit()]
    verdicts = sorted(files, key=lambda file: (len(file.name), file.name))
    for file in verdicts:
        print(Blame.load(file).text(), f"  {file}", sep="\n")
    if not verdicts:
        print(_command(path))
    return 0


def _command(path: Path) -> str:
    """Return the command that finds out what is to blame for the iteration at which a run went wrong."""
    facts = read_config(path)["facts"]
    metrics = list(read_metrics(path))
    alarms = [event["alarm_step"] for event in read_events(path) if event["event"] == "guard" and "alarm_step" in event]
    broken = [row["step"] for row in metrics if row.get("loss") is None]
    steps = alarms[-1:] or broken[:1] or [row["step"] for row in metrics[-1:]]
    if not steps:
        raise SnipError(f"{path}: the run has trained no step")
    maps = {step: file for step, file in step_files(path, "maps").items() if step <= steps[0]}
    return blame_command(facts, steps[0] + 1, maps[max(maps)] if maps else None)
