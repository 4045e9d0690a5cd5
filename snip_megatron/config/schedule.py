"""The schedule of a run: whether its map may change with time, and in which phases (``--snip-schedule``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError, cut
from snip_megatron.precision.phases import AUTO, Schedule

DEPLOYED = ("map", "bf16")


def load_schedule(schedule: str, budget: str, prefix: str = "--snip-") -> Schedule | None:
    """Return the phases that ``--snip-schedule`` selects.

    Args:
        schedule: ``static``, ``auto`` or the name of a ``snip.schedule/1`` file.
        budget: the kind of the run's budget: ``fp4``, ``speedup`` or ``loss``.
        prefix: that of the arguments, for errors.

    Returns:
        The phases; None for ``static``.

    Raises:
        SnipError: the file cannot be read, or a phase has a budget of another kind than the run.
    """
    if schedule == "static":
        return None
    if schedule == "auto":
        return AUTO
    try:
        text = Path(schedule).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise SnipError(
            f"{prefix}schedule {schedule}: cannot be read ({reason}); give static, auto or a snip.schedule/1 file"
        ) from None
    phases = Schedule.from_json(text, where=f"{prefix}schedule {schedule}")
    for i, phase in enumerate(phases.phases):
        if phase.budget is not None and phase.budget.kind != budget:
            raise SnipError(
                f"{prefix}schedule {schedule}: phases[{i}].budget: {phase.budget} cannot be combined with"
                f" {prefix}budget {budget}=: a phase's budget is of the same kind, fp4= or speedup="
            )
    return phases


def check_schedule(values: Mapping[str, Any], phases: Schedule | None, *, updates: bool, timed: bool) -> None:
    """Check the arguments that belong to a schedule, and what cannot be combined with one.

    Args:
        values: the fields of the configuration by name.
        phases: the phases of ``--snip-schedule``; None for ``static``.
        updates: whether the run solves maps itself.
        timed: whether the budget is one of predicted time or loss.

    Raises:
        SnipError: an argument is invalid or conflicts with another.
    """
    deploy, standing, forgetting = (values[name] for name in ("deploy", "standing_share", "forgetting"))
    if standing is not None and not 0.0 <= standing <= 1.0:
        raise SnipError(f"--snip-standing-share {standing}: must be a number between 0 and 1")
    if values["policy"].startswith("late-") and timed:
        raise SnipError(
            f"--snip-policy {values['policy']} cannot be combined with --snip-budget {cut(values['budget'])}: its"
            " switch follows from an average share of FLOPs; use fp4="
        )
    if phases is not None:
        _check_phases(values, updates=updates)
        return
    for name, value in (("deploy", deploy), ("standing-share", standing), ("forgetting", forgetting)):
        if value is not None:
            raise SnipError(
                f"--snip-{name} {value} has no effect with --snip-schedule static: use auto or a file of phases, or"
                " leave it out"
            )


def _check_phases(values: Mapping[str, Any], *, updates: bool) -> None:
    conflicts = (
        ("map", values["map"] is not None, "the map is fixed"),
        ("replay", values["replay"] is not None, "what was recorded is adopted, phases included"),
        ("update_interval", not (values["update_interval"] or values["trigger"]), "a plan is made by updates"),
        ("policy", not updates, "its maps are fixed"),
        ("granularity", values["granularity"] != "gemm", "phases weigh a linear's three GEMMs one by one"),
        ("change_penalty", values["change_penalty"] > 0, "a plan has no penalty of changes"),
    )
    for name, present, why in conflicts:
        if present:
            raise SnipError(
                f"--snip-{name.replace('_', '-')} {values[name]} cannot be combined with --snip-schedule"
                f" {cut(values['schedule'])}: {why}; leave one of them out"
            )
