"""Values of a configuration that are more than a number or a name: phases, pins, tolerances."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from snip_megatron.errors import SnipError, cut
from snip_megatron.precision import Format
from snip_megatron.precision.phases import AUTO, Schedule

LEAST_LOSSES = 10
"""Minimum number of losses for a spike test. With fewer losses, the guard reacts only to NaN and Inf."""


def load_schedule(schedule: str, budget: str) -> Schedule | None:
    """Return the phases that ``--snip-schedule`` selects; None for ``static``.

    ``schedule`` is ``static``, ``auto``, the name of a ``snip.schedule/1`` file, or the text of one, and ``budget`` the
    kind of the run's budget. Raises SnipError if the file cannot be read, or a phase has a budget of another kind.
    """
    if schedule in ("static", "auto"):
        return AUTO if schedule == "auto" else None
    text, is_text = schedule, schedule.startswith("{")
    here = f"--snip-schedule {cut(schedule) if is_text else schedule}"
    if not is_text:
        try:
            text = Path(schedule).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text"
            raise SnipError(f"{here}: cannot be read ({reason}); give static, auto or a snip.schedule/1 file") from None
    phases = Schedule.from_json(text, where=here)
    for i, phase in enumerate(phases.phases):
        if phase.budget is not None and phase.budget.kind != budget:
            raise SnipError(
                f"{here}: phases[{i}].budget: {phase.budget} cannot be combined with --snip-budget {budget}=: a"
                " phase's budget is of the same kind, fp4= or speedup="
            )
    return phases


def parse_pins(pins: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Parse the values of ``--snip-pin``: (glob, format) pairs. Raises SnipError if one is not GLOB=FORMAT."""
    pairs = []
    for text in pins:
        glob, equals, fmt = text.rpartition("=")
        if not equals or not glob or fmt not in Format._value2member_map_:
            known = ", ".join(f.value for f in Format)
            raise SnipError(f"--snip-pin {cut(text)}: expected GLOB=FORMAT with FORMAT one of {known}")
        pairs.append((glob, fmt))
    return tuple(pairs)


def parse_tolerance(text: str) -> float | None:
    """Parse the value of ``--snip-stage-tolerance``: a share, or None for ``none``. Raises SnipError."""
    if text.lower() == "none":
        return None
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise SnipError(f"--snip-stage-tolerance {cut(text)}: the share must be a number between 0 and 1")
    return share
