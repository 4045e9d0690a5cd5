"""Readers of a run directory. They accept a run that is still being written, or that crashed during a write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.records.storage import read_lines

RUN_SCHEMA = "snip.run/1"
SCORES_SCHEMA = "snip.scores/1"
CONFIG, EVENTS, METRICS, REPORT = "config.json", "events.jsonl", "metrics.jsonl", "report.html"
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
    """Return the step files of a folder by step, ascending.

    Args:
        run: the run directory.
        folder: a key of STEP_FILES. A missing folder has no files.
        extra: a further suffix; ``.1`` selects the files that a resumed run has set aside.

    Raises:
        SnipError: the folder cannot be read.
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
    """Return ``config.json`` as an object with schema, config and facts.

    Raises:
        SnipError: the file is missing or broken.
    """
    path = Path(run) / CONFIG
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise SnipError(f"{run}: not a run directory ({CONFIG} is missing); give the directory of --snip-dir") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SnipError(f"{path}: cannot be read ({error})") from None
    if not isinstance(body, dict) or body.get("schema") != RUN_SCHEMA or not isinstance(body.get("config"), dict):
        raise SnipError(f'{path}: "schema" must be "{RUN_SCHEMA}" with an object "config"')
    if not isinstance(body.get("facts"), dict):
        body["facts"] = {}
    return body


def read_events(run: Path | str) -> list[dict[str, Any]]:
    """Return the events in the order in which they were written.

    Torn lines are skipped. A missing file gives an empty list. Raises SnipError if the file cannot be read.
    """
    return [record for record in _lines(Path(run) / EVENTS) if isinstance(record.get("event"), str)]


def read_metrics(run: Path | str) -> list[dict[str, Any]]:
    """Return the metrics, one record a step, ascending. Of a step that was recorded twice, the last record is used.

    Raises SnipError if the file cannot be read.
    """
    by_step = {record["step"]: record for record in _lines(Path(run) / METRICS)}
    return [by_step[step] for step in sorted(by_step)]


def read_maps(run: Path | str, *, skipped: list[str] | None = None) -> dict[int, PrecisionMap]:
    """Return the maps by the step of their file, ascending.

    Args:
        run: the run directory.
        skipped: if given, receives the message of each broken file, which is then left out.

    Raises:
        SnipError: a file is broken, and ``skipped`` is None.
    """
    return _parsed(Path(run), "maps", lambda text, where: PrecisionMap.from_json(text, where=where), skipped)


def read_plans(run: Path | str, *, skipped: list[str] | None = None) -> dict[int, PrecisionPlan]:
    """Return the plans by the step before which they were adopted, ascending. See :func:`read_maps`."""
    return _parsed(Path(run), "plans", lambda text, where: PrecisionPlan.from_json(text, where=where), skipped)


def read_scores(
    run: Path | str, *, skipped: list[str] | None = None, last: int | None = None
) -> dict[int, dict[str, Any]]:
    """Return the scores files by step, ascending: all, or the ``last`` ones. See :func:`read_maps`."""
    return _parsed(Path(run), "scores", _parse_scores, skipped, last)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return read_lines(path)
    except OSError as error:
        raise SnipError(f"{path}: cannot be read ({error})") from None


def _parse_scores(text: str, where: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SnipError(f"{where}: not JSON ({error})") from None
    if not isinstance(body, dict) or body.get("schema") != SCORES_SCHEMA or not isinstance(body.get("scores"), dict):
        raise SnipError(f'{where}: "schema" must be "{SCORES_SCHEMA}" with an object "scores"')
    return body


def _parsed[T](
    run: Path, folder: str, parse: Callable[[str, str], T], skipped: list[str] | None, last: int | None = None
) -> dict[int, T]:
    found: dict[int, T] = {}
    files = list(step_files(run, folder).items())
    for step, file in files if last is None else files[-last:]:
        try:
            found[step] = parse(file.read_text(encoding="utf-8"), str(file))
        except (OSError, ValueError, SnipError) as error:
            fault = error if isinstance(error, SnipError) else SnipError(f"{file}: cannot be read ({error})")
            if skipped is None:
                raise fault from None
            skipped.append(str(fault))
    return found
