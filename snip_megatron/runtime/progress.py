"""The progress of a running job on rank 0: its account so far, one line beside Megatron's, figures for the metrics."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from snip_megatron.errors import SnipError
from snip_megatron.precision import PrecisionMap
from snip_megatron.records.readers import read_events, read_maps, read_metrics
from snip_megatron.runtime.account import Account, Stretch, duration, is_quantised


class Progress:
    """What a running job knows about its own speed.

    Args:
        run: the run directory, whose records of earlier jobs count as well; None without one.
        unjudged: see :func:`progress_line`.
    """

    def __init__(self, run: Path | None, *, unjudged: str | None) -> None:
        self._unjudged = unjudged
        self._account = _account_of(run)
        self._fp4_share: float | None = None
        self._figures: dict[int, dict[str, Any]] = {}
        self._news: dict[str, float] | None = None

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Note an event."""
        self._account.event(kind, fields)
        if kind == "adopt":
            self._fp4_share = fields.get("fp4_fraction")

    def adopted(self, step: int, precision_map: PrecisionMap) -> None:
        """Note that a map is in force from ``step`` on."""
        self._account.adopted(step, precision_map.version, is_quantised(precision_map))

    def update_due(self, step: int) -> None:
        """Note that an update precedes ``step``. Before the first one, the peak is that of training alone."""
        if not self._account.updates:
            self._of(step - 1)["peak_bytes"] = peak_bytes()

    def step(self, step: int, seconds: float) -> Stretch | None:
        """Note the duration of a usual training step. Returns the steps under a map that makes them longer, once."""
        self._account.step(step, seconds)
        self._of(step)["step_s"] = seconds
        return self._account.slower() if self._unjudged is None else None

    def show(self, step: int) -> None:
        """Print the line, and have its figures ready for :meth:`news`."""
        self._of(step)["peak_bytes"] = peak_bytes()
        line = progress_line(self._account, self._fp4_share, unjudged=self._unjudged)
        if line is not None:
            print(line, flush=True)
        self._news = self._account.figures(judged=self._unjudged is None)

    def news(self) -> dict[str, float] | None:
        """Return the figures of the latest :meth:`show` once; None afterwards. See ``step_report.News``."""
        news, self._news = self._news, None
        return news

    def take(self, step: int) -> dict[str, Any]:
        """Return the fields of ``step`` in the metrics: ``step_s``, at some steps ``peak_bytes``."""
        return self._figures.pop(step, {})

    def _of(self, step: int) -> dict[str, Any]:
        return self._figures.setdefault(step, {})


def _account_of(run: Path | None) -> Account:
    account = Account()
    if run is not None:
        with contextlib.suppress(SnipError):  # a record that cannot be read must not keep a job from training
            events, metrics = read_events(run), read_metrics(run)
            account.read(events, metrics, dict(read_maps(run, skipped=[])))
    return account


def peak_bytes() -> int:
    """Return the peak of the bytes that this process had allocated: GPU memory, or resident memory without a GPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def progress_line(account: Account, fp4_share: float | None, *, unjudged: str | None) -> str | None:
    """Return the line that a run prints beside Megatron's own; None before the first step.

    Args:
        account: the account so far.
        fp4_share: the fp4 share of FLOPs of the map in force; None without a map.
        unjudged: why speeds mean nothing in this run, such as ``emulated``; None if they do.
    """
    now = account.now()
    if now is None:
        return None
    share = "" if fp4_share is None else f", {fp4_share:.0%} fp4"
    parts = [f"map {now.version}{share}" if now.quantised else "bf16"]
    if now.step_s is None:
        return f"snip: {parts[0]} | measuring steps"
    speed = "" if not now.quantised else f", {unjudged or f'{_factor(now.speedup)} bf16'}"
    parts.append(f"{duration(now.step_s)} a step{speed}")
    saved = None if unjudged else account.saved_s()
    if saved is not None:
        parts.append(f"{'saved' if saved >= 0 else 'lost'} {duration(abs(saved))}, updates included")
    return f"snip: {' | '.join(parts)}"


def _factor(speedup: float | None) -> str:
    return "? x" if speedup is None else f"{speedup:.2f} x"
