"""Budget, formats and schedule that suit the machine, for arguments that are not set."""

from collections.abc import Mapping
from typing import Any

from snip_megatron.precision import FOUR_BIT, Format
from snip_megatron.precision.budget import MAX_LOSS, Budget
from snip_megatron.sensitivity.policies import in_nats
from snip_megatron.timing.cost_model import CostModel

MULTIPLIED: Mapping[str | None, tuple[str, ...]] = {
    "hopper": ("bf16", "fp8", "fp8_tensor"),
    "blackwell": ("bf16", "mxfp8", "nvfp4"),
}
"""Name of :func:`native_backend` → the formats that its cards multiply, each faster than those before it."""

LOSS = Budget("loss", 0.002)
"""The default budget where formats save time: the largest predicted rise of the loss, in nats."""

FASTEST = Budget("loss", MAX_LOSS)
"""The default budget on mock data, whose loss needs no protection: no bound, so the fastest map."""

SHARE = Budget("fp4", 0.75)
"""The default budget where all formats are emulated."""

FIRST_UPDATE, EARLIEST_UPDATE = 100, 5
"""The default step of the first update, and that of a very short run."""


def first_update(steps: int | None) -> int:
    """Return the default step of the first update in a run of ``steps`` steps. None if the number is not known."""
    return FIRST_UPDATE if steps is None else max(EARLIEST_UPDATE, min(FIRST_UPDATE, steps // 10))


def backend_of(model: CostModel) -> str | None:
    """Return "hopper" or "blackwell" if a cost model has times of what such a card multiplies.

    Returns None for ideal times. For times of an emulation it returns their backend.
    """
    if model.table is None or model.table.backend != "transformer_engine":
        return None if model.table is None else model.table.backend
    return "hopper" if {Format.MXFP8, Format.NVFP4}.isdisjoint(model.table.formats) else "blackwell"


def candidates(kind: str, backend: str | None, recipe: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the default candidate formats.

    Args:
        kind: Kind of the budget.
        backend: GEMM backend whose times decide. None if formats are emulated or times are ideal (``flops``).
        recipe: Formats of the FP8 or FP4 recipe that Megatron's own arguments name, if any.
    """
    if recipe and kind != "fp4":
        return ("bf16", *recipe)
    if recipe:
        return recipe if FOUR_BIT.intersection(recipe) else (*recipe, "nvfp4" if "mxfp8" in recipe else "fp4")
    if kind == "fp4":
        return ("mxfp8", "nvfp4") if backend == "blackwell" else ("fp8", "fp4")
    return MULTIPLIED.get(backend, ("bf16", "fp8", "fp4"))


def defaults(
    options: Mapping[str, Any],
    backend: str | None,
    *,
    has_end: bool,
    steps: int | None = None,
    mock: bool = False,
    recipe: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the defaults of budget, formats, schedule and first update.

    The schedule is ``auto`` beside the default budget of the loss, if the run can have phases. At the default share of
    FP4, phases gain nothing (docs/results.md).

    Args:
        options: Fields of a SnipConfig that the user has set.
        backend: See :func:`candidates`.
        has_end: Whether training ends at a known step.
        steps: The number of training steps. None if it is not known.
        mock: Whether the data are random tokens.
        recipe: See :func:`candidates`.
    """
    multiplied, values = MULTIPLIED.get(backend, ()), dict[str, Any](first_update=first_update(steps))
    nats = in_nats(options.get("policy", "snip"), options.get("q", "split"))
    if "budget" not in options:
        saves = bool(multiplied) and nats and set(options.get("formats", recipe)) <= set(multiplied)
        values["budget"] = SHARE if not saves else FASTEST if mock else LOSS
        if values["budget"] is LOSS and has_end and not _has_one_phase(options):
            values["schedule"] = "auto"
    kind = {**values, **options}["budget"].kind
    values["formats"] = candidates(kind, None if options.get("timings") == "flops" else backend, recipe)
    return values


def _has_one_phase(options: Mapping[str, Any]) -> bool:
    """Return whether the options exclude phases."""
    return (
        not options.get("update_interval", 1)
        or options.get("granularity", "gemm") != "gemm"
        or any(name in options for name in ("map", "replay"))
    )


def dominated(budget: Budget, formats: tuple[str, ...], backend: str | None, *, times: bool = True) -> str | None:
    """Return a line if a uniform format is as fast as every map of this budget, with no larger error. None if not.

    On a card that multiplies no four-bit format, this holds for every share of FP4. ``times`` says whether the host
    knows times, so that the line can name another budget.
    """
    multiplied = MULTIPLIED.get(backend)
    slow = [fmt for fmt in formats if Format(fmt) in FOUR_BIT and fmt not in (multiplied or ())]
    if multiplied is None or budget.kind != "fp4" or not budget.value or not slow:
        return None
    return (
        f"--snip-budget {budget}: no faster than {multiplied[1]} on this card and less exact: {' and '.join(slow)}; so"
        f" {multiplied[1]} everywhere beats these maps"
        + (f"; for speed use --snip-budget {LOSS} --snip-formats {','.join(multiplied)}, the default" if times else "")
    )
