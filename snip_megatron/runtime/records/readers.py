"""Readers of a run directory. They accept a run that is still being written, or that crashed during a write."""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from snip_megatron.precision import PrecisionMap, strict_json
from snip_megatron.precision.errors import SnipError, located
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.runtime.records.storage import read_lines

RUN_SCHEMA = "snip.run/1"
SCORES_SCHEMA = "snip.scores/1"
CONFIG, EVENTS, METRICS, REPORT = "config.json", "events.jsonl", "metrics.jsonl", "report.html"
TIMINGS = "timings.json"
"""The table of times of the run's own GEMMs, where its budget weighs them."""
STEP_FILES = {"stats": ".npz", "problems": ".json", "maps": ".json", "plans": ".json", "scores": ".json"}
"""Folders of the run directory, and the suffix of the step files in each."""
_STEP_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})\Z")


def step_of(path: Path, suffix: str) -> int | None:
    """Return N for a file named ``step_<N><suffix>``, or None for any other name."""
    match = _STEP_NAME.match(path.name.removesuffix(suffix)) if path.name.endswith(suffix) else None
    return int(match[1]) if match else None


def step_path(run: Path, folder: str, step: int) -> Path:
    """Return the path of a step file; ``folder`` is a key of STEP_FILES."""
    return run / folder / f"step_{int(step)}{STEP_FILES[folder]}"


def step_files(run: Path, folder: str, extra: str = "") -> dict[int, Path]:
    """Return the step files of a folder by step, ascending; none if it is missing. Raises SnipError if it cannot be
    read.

    ``folder`` is a key of STEP_FILES, and ``extra`` a further suffix: ``.1`` is that of files that a resumed run has
    set aside.
    """
    try:
        files = list((run / folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise SnipError(f"{run / folder}: cannot be read ({error})") from None
    found = {step: file for file in files if (step := step_of(file, STEP_FILES[folder] + extra)) is not None}
    return dict(sorted(found.items()))


def read_config(run: Path | str) -> dict[str, Any]:
    """Return ``config.json``, an object with ``config`` and ``facts``. Raises SnipError if it is missing or broken."""
    path = Path(run) / CONFIG
    try:
        body = _object(path.read_text(encoding="utf-8"), str(path), RUN_SCHEMA, "config")
    except (FileNotFoundError, NotADirectoryError):
        raise SnipError(f"{run}: not a run directory ({CONFIG} is missing); give the directory of --snip-dir") from None
    except (OSError, ValueError) as error:
        raise SnipError(f"{path}: cannot be read ({error})") from None
    return body if isinstance(body.get("facts"), dict) else body | {"facts": {}}


def read_events(run: Path | str) -> list[dict[str, Any]]:
    """Return the events in the order in which they were written; none if the file is missing.

    Torn lines are skipped. Raises SnipError if the file cannot be read.
    """
    return [record for record in read_lines(Path(run) / EVENTS) if isinstance(record.get("event"), str)]


def read_metrics(run: Path | str) -> list[dict[str, Any]]:
    """Return the metrics, one record a step, ascending. Of a step that was recorded twice, the last record is used."""
    by_step = {record["step"]: record for record in read_lines(Path(run) / METRICS)}
    return [by_step[step] for step in sorted(by_step)]


def read_maps(run: Path | str, *, skipped: list[str] | None = None) -> dict[int, PrecisionMap]:
    """Return the maps by the step of their file, ascending.

    The message of a broken file is added to ``skipped``. Without this list it is raised as a SnipError.
    """
    return _parsed(Path(run), "maps", PrecisionMap.from_json, skipped)


def read_plans(run: Path | str, *, skipped: list[str] | None = None) -> dict[int, PrecisionPlan]:
    """Return the plans by the step before which they were adopted, ascending. See :func:`read_maps`."""
    return _parsed(Path(run), "plans", PrecisionPlan.from_json, skipped)


def read_scores(
    run: Path | str, *, skipped: list[str] | None = None, last: int | None = None
) -> dict[int, dict[str, Any]]:
    """Return the scores files by step, ascending: all, or the ``last`` ones. See :func:`read_maps`."""
    return _parsed(Path(run), "scores", functools.partial(_object, schema=SCORES_SCHEMA, name="scores"), skipped, last)


@functools.cache  # the model, the warm-up and rank 0 need the same maps, and each file is read over the network
def replayed_maps(run: str) -> Mapping[int, PrecisionMap]:
    """Return step → map of every adoption that a run directory recorded, which ``--snip-replay`` repeats.

    Raises SnipError if no adoption is recorded, or a map is missing or broken.
    """
    steps = [int(event["step"]) for event in read_events(run) if event["event"] == "adopt"]
    if not steps:
        raise SnipError(
            f"--snip-replay {run}: no adopted map is recorded there; give the directory of a run under SNIP"
        )
    maps = read_maps(run)
    if lost := [step for step in steps if step not in maps]:
        path = step_path(Path(run), "maps", lost[0])
        raise SnipError(f"--snip-replay {run}: events.jsonl adopts a map at step {lost[0]} but {path} is missing")
    return {step: maps[step] for step in steps}


def _object(text: str | bytes, where: str, schema: str, name: str) -> dict[str, Any]:
    """Parse an object of ``schema`` that holds an object ``name``. Raises SnipError."""
    with located(where):
        body = strict_json.read_object(text)
        strict_json.check_schema(body, schema)
        strict_json.mapping(body.get(name), name)
    return body


def _parsed[T](
    run: Path, folder: str, parse: Callable[..., T], skipped: list[str] | None, last: int | None = None
) -> dict[int, T]:
    found: dict[int, T] = {}
    files = list(step_files(run, folder).items())
    for step, file in files if last is None else files[-last:]:
        try:
            found[step] = parse(strict_json.read_file(file), where=str(file))
        except SnipError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
    return found
