"""Which values of a configuration (``run.SnipConfig``, which imports this module) cannot be combined."""

from typing import Any

from snip_megatron.precision import FOUR_BIT, candidates_fault
from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.sensitivity.policies import LATE


def check(config: Any) -> None:
    """Raise SnipError naming the arguments that cannot be combined."""
    _check_formats(config)
    _check_cost(config)
    if config.phases is None:
        if config.deploy is not None:
            raise SnipError(
                f"--snip-deploy {config.deploy} has no effect with --snip-schedule static: use auto or a file"
                " of phases, or leave it out"
            )
    else:
        _check_phases(config)
    if config.updates and 0 < config.update_interval <= config.lag:
        raise SnipError(
            f"--snip-lag {config.lag}: must be smaller than --snip-update-interval {config.update_interval}, so that an"
            " update is adopted before the next begins"
        )
    _check_fixed_maps(config)
    if config.gemm == "transformer_engine" and config.communication != "bf16":
        raise SnipError(
            f"--snip-communication {config.communication} cannot be combined with --snip-gemm transformer_engine, whose"
            " linears communicate themselves; leave one out"
        )


def in_nats(policy: str, q: str) -> bool:
    """Return whether a policy's scores are predicted losses in nats (see sensitivity/README.md)."""
    return policy == "fisher" or (policy == "snip" and q == "split")


def _check_formats(config: Any) -> None:
    formats, wanted = config.formats, config.wanted
    here = f"--snip-formats {cut(','.join(formats))}"
    if (why := candidates_fault(formats, granularity=config.granularity, share=not wanted.timed)) is not None:
        raise SnipError(f"{here}: {why}")
    if config.updates and not wanted.timed and wanted.value > 0 and not FOUR_BIT.intersection(formats):
        budget = f"--snip-budget {cut(config.budget)}"
        raise SnipError(f"{here}: none has four bits, so {budget} cannot be reached; add fp4")


def _check_cost(config: Any) -> None:
    kind, budget = config.wanted.kind, f"--snip-budget {cut(config.budget)}"
    if kind == "fp4" and config.timings is not None:
        raise SnipError(
            f"--snip-timings {config.timings} cannot be combined with {budget}, which is a share of FLOPs; use"
            " --snip-budget speedup= or loss="
        )
    if kind == "loss" and config.updates and not in_nats(config.policy, config.q):
        raise SnipError(
            f"{budget} bounds a loss, and the scores of --snip-policy {config.policy} with --snip-q {config.q} are"
            " none; use --snip-policy snip with --snip-q split, or fisher"
        )
    if config.policy in LATE and config.wanted.timed:
        raise SnipError(
            f"--snip-policy {config.policy} cannot be combined with {budget}: its switch follows from an average share"
            " of FLOPs; use fp4="
        )


def _check_phases(config: Any) -> None:
    conflicts = (
        (f"map {config.map}", config.map is not None, "the map is fixed"),
        (f"replay {config.replay}", config.replay is not None, "what was recorded is adopted, phases included"),
        ("update-interval 0", config.update_interval == 0, "a plan is made by updates"),
        (f"policy {config.policy}", not config.updates, "its maps are fixed"),
        (
            f"granularity {config.granularity}",
            config.granularity != "gemm",
            "phases weigh a linear's three GEMMs one by one",
        ),
    )
    for named, present, why in conflicts:
        if present:
            raise SnipError(
                f"--snip-{named} cannot be combined with --snip-schedule {cut(config.schedule)}: {why}; leave one of"
                " them out"
            )


def _check_fixed_maps(config: Any) -> None:
    """Check ``--snip-map`` and ``--snip-replay``, under which no map is solved for."""
    fixed = [name for name in ("map", "replay") if getattr(config, name) is not None]
    if len(fixed) == 2:
        raise SnipError("--snip-map and --snip-replay cannot be combined: both fix the maps; give one")
    if fixed and config.pin:
        raise SnipError(f"--snip-pin cannot be combined with --snip-{fixed[0]}: its maps are used as they are")
