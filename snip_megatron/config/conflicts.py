"""Which arguments cannot be combined, beside those of schedules (``schedule.py``).

The functions take the fields of :class:`snip_megatron.config.SnipConfig` by name, and raise SnipError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snip_megatron.errors import SnipError, cut
from snip_megatron.precision import FOUR_BIT, Format, candidates_fault
from snip_megatron.precision.budget import Budget

FORMATS = tuple(fmt.value for fmt in Format if fmt is not Format.BF16)


def check_formats(values: Mapping[str, Any], wanted: Budget, *, updates: bool) -> None:
    """Check the candidate formats.

    Args:
        values: the fields of the configuration.
        wanted: the budget.
        updates: whether the run solves maps itself.
    """
    kind = wanted.kind
    formats, budget = values["formats"], f"--snip-budget {cut(values['budget'])}"
    here = f"--snip-formats {cut(','.join(formats))}"
    known = (*FORMATS, Format.BF16.value)
    if set(formats) - set(known) or not formats or len(set(formats)) != len(formats):
        raise SnipError(f"{here}: expected distinct names of {', '.join(known)}")
    if (why := candidates_fault(formats, granularity=values["granularity"], share=kind == "fp4")) is not None:
        raise SnipError(f"{here}: {why}")
    if updates and kind == "fp4" and wanted.value > 0 and not FOUR_BIT.intersection(formats):
        raise SnipError(f"{here}: none has four bits, so {budget} cannot be reached; add fp4")


def check_cost(values: Mapping[str, Any], wanted: Budget, *, updates: bool) -> None:
    """Check what a choice saves, with the arguments of :func:`check_formats`."""
    kind = wanted.kind
    cost, timings, penalty, policy, q = (values[name] for name in ("cost", "timings", "change_penalty", "policy", "q"))
    budget = f"--snip-budget {cut(values['budget'])}"
    if kind == "fp4" and (cost == "time" or timings is not None):
        argument = "--snip-cost time" if cost == "time" else f"--snip-timings {timings}"
        raise SnipError(
            f"{argument} cannot be combined with {budget}, which is a share of FLOPs; use --snip-budget speedup= or"
            " loss="
        )
    if cost == "flops" and timings is not None:
        raise SnipError(f"--snip-timings {timings} cannot be combined with --snip-cost flops: leave one out")
    if kind == "loss" and penalty:
        raise SnipError(
            f"--snip-change-penalty {penalty} cannot be combined with {budget}: the penalty is a loss, and time is what"
            " is minimised there"
        )
    if kind == "loss" and updates and not in_nats(policy, q):
        raise SnipError(
            f"{budget} bounds a loss, and the scores of --snip-policy {policy} with --snip-q {q} are none; use"
            " --snip-policy snip with --snip-q split or noise, or fisher"
        )


def in_nats(policy: str, q: str) -> bool:
    """Return whether a policy's scores are predicted losses in nats (see sensitivity/README.md)."""
    return policy == "fisher" or (policy == "snip" and q in ("split", "noise"))


def check_updates(values: Mapping[str, Any], *, updates: bool) -> None:
    """Check when updates begin."""
    interval, lag = values["update_interval"], values["lag"]
    if updates and 0 < interval <= lag:
        raise SnipError(
            f"--snip-lag {lag}: must be smaller than --snip-update-interval {interval}, so that an update is adopted"
            " before the next begins"
        )


def check_fixed_maps(values: Mapping[str, Any]) -> None:
    """Check ``--snip-map`` and ``--snip-replay``, under which no map is solved for."""
    fixed = [name for name in ("map", "replay") if values[name] is not None]
    if len(fixed) == 2:
        raise SnipError("--snip-map and --snip-replay cannot be combined: both fix the maps; give one")
    for name in ("pin", "trigger"):
        if fixed and values[name]:
            raise SnipError(f"--snip-{name} cannot be combined with --snip-{fixed[0]}: its maps are used as they are")
