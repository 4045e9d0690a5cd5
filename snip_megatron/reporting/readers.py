"""Readers of a run directory: tolerant to a crash in mid-write, and to a run that is still being written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.precision import PrecisionMap
from snip_megatron.reporting.storage import read_lines

RUN_SCHEMA = "snip.run/1"
SCORES_SCHEMA = "snip.scores/1"
CONFIG, EVENTS, METRICS, REPORT = "config.json", "events.jsonl", "metrics.jsonl", "report.html"
STEP_FILES = {"stats": ".npz", "problems": ".json", "maps": ".json", "scores": ".json"}
"""Folder of the run directory and the suffix of its step files."""
_STEP_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})\Z")


def step_of(path: Path, suffix: str) -> int | None:
    """The step in the name of ``step_<N><suffix>``, or None for any other name."""
    match = _STEP_NAME.match(path.name.removesuffix(suffix)) if path.name.endswith(suffix) else None
    return int(match[1]) if match else None


def read_config(run: Path | str) -> dict[str, Any]:
    """``config.json`` as written: schema, config, facts. Raises SnipError if it is missing or broken."""
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
    """The events in the order written; torn lines are skipped, a missing file is an empty list. Raises SnipError."""
    return [record for record in _lines(Path(run) / EVENTS) if isinstance(record.get("event"), str)]


def read_metrics(run: Path | str) -> list[dict[str, Any]]:
    """The metrics, one record a step, by step; of a step recorded twice the last one. Raises SnipError."""
    by_step = {record["step"]: record for record in _lines(Path(run) / METRICS)}
    return [by_step[step] for step in sorted(by_step)]


def read_maps(run: Path | str, *, skipped: list[str] | None = None) -> dict[int, PrecisionMap]:
    """Maps by the step of their file, ascending.

    A file that is no map raises SnipError, or its message is added to ``skipped`` when that list is given.
    """
    return _step_files(Path(run), "maps", lambda text, where: PrecisionMap.from_json(text, where=where), skipped)


def read_scores(run: Path | str, *, skipped: list[str] | None = None) -> dict[int, dict[str, Any]]:
    """Bodies of the scores files (version, scores) by step, ascending; broken files as in :func:`read_maps`."""
    return _step_files(Path(run), "scores", _parse_scores, skipped)


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


def _step_files[T](run: Path, folder: str, parse: Callable[[str, str], T], skipped: list[str] | None) -> dict[int, T]:
    found: dict[int, T] = {}
    try:
        files = list((run / folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return found
    except OSError as error:
        raise SnipError(f"{run / folder}: cannot be read ({error})") from None
    steps = {step: file for file in files if (step := step_of(file, STEP_FILES[folder])) is not None}
    for step in sorted(steps):
        try:
            found[step] = parse(_text(steps[step]), str(steps[step]))
        except SnipError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SnipError(f"{path}: cannot be read ({error})") from None
