"""The frozen configuration of a run. The ``--snip-*`` arguments are generated from its options."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from snip_megatron.numerics.products import BACKENDS, LIBRARIES
from snip_megatron.precision import FOUR_BIT, GRANULARITIES, Format, PrecisionMap, candidates_fault
from snip_megatron.precision.budget import MAX_LOSS, Budget
from snip_megatron.precision.errors import SnipError, cut, did_you_mean
from snip_megatron.precision.phases import Schedule
from snip_megatron.precision.recipes import is_recipe_file, read_recipes
from snip_megatron.runtime.options import (
    add_options,
    add_settings,
    check_option,
    given_options,
    load_schedule,
    option,
    parse_pins,
    parse_tolerance,
    setting,
)
from snip_megatron.runtime.run_data import replayed_maps
from snip_megatron.sensitivity.policies import ESTIMATORS, FIXED, LATE, POLICIES, Q_RULES, UNSOLVED, formats_of, in_nats
from snip_megatron.sensitivity.request import BACKWARD_SHARE, STANDING_SHARE, SolveRequest
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

GRADIENT_REDUCTION = ("fp32", "fp8")
DEPLOYED = ("map", "bf16")


@dataclass(frozen=True)
class SnipConfig:
    """The SNIP configuration of a run.

    An option ``x_y`` is the argument ``--snip-x-y``. A setting has no argument of its own: ``--snip-settings`` or a
    script sets it. ``budget`` also takes the text ``KIND=VALUE``.

    Raises SnipError if a value of an enabled configuration is invalid or conflicts with another.
    """

    enabled: bool = False
    budget: Budget = option(  # noqa: RUF009  a field, whose default is frozen
        SHARE,
        "what every map must reach. loss=NATS: the fastest map whose predicted rise of the loss stays within this"
        " bound, 0 or more; speedup=FACTOR: this predicted speedup of the decoder linears over bf16, 1 or more;"
        " fp4=SHARE: this share of the decoder linears' FLOPs runs in four bits, 0 to 1",
        metavar="KIND=VALUE",
        shown="loss=0.002 on Hopper and Blackwell, fp4=0.75 where formats are emulated; with --mock-data, which has no"
        " loss to protect, the fastest map",
    )
    schedule: str = option(
        "static",
        "phases of the run: static (none; a map stays until the next update), auto (four phases with a map each) or a"
        " snip.schedule/1 file. With phases, the budget is the average over the run",
        metavar="static|auto|FILE",
        shown="auto beside the default budget of loss=0.002, otherwise static",
    )
    deploy: str | None = option(
        None,
        "with phases: formats in which the trained model will be deployed. Without this argument: bf16 with --snip-eval"
        " bf16, otherwise map",
        choices=DEPLOYED,
    )
    formats: tuple[str, ...] = option(
        ("fp8", "fp4"),
        "candidate formats, comma separated: fp8, fp4, fp8_tensor, nvfp4, mxfp4, mxfp8 and their variants"
        " (docs/choosing.md); with speedup= and loss= also bf16",
        metavar="F,F",
        shown="what the GPU multiplies (bf16,fp8,fp8_tensor on Hopper, bf16,mxfp8,nvfp4 on Blackwell); with fp4= and"
        " where formats are emulated fp8,fp4",
    )
    timings: str | None = option(
        None,
        "table of times for a budget of speedup= or loss=: a file of snip calibrate, or a name such as h200; flops: the"
        " ideal rates of no card."
        " Without this argument the run times its own GEMMs before its first update",
        metavar="FILE",
    )
    granularity: str = option(
        "gemm", "gemm: one format per GEMM; layer: one format per linear, as in the paper", choices=GRANULARITIES
    )
    update_interval: int = option(1000, "training steps between two updates of the map; 0: no updates", least=0)
    first_update: int = option(
        FIRST_UPDATE,
        "training step, counted from 0, before which the first update starts",
        least=0,
        shown="100, or a tenth of a shorter run, but at least 5",
    )
    lag: int = option(10, "training steps from the probe of an update to the adoption of its map", least=1)
    wait: float = option(
        0.0,
        "seconds that training waits, at most, for a map that is due. With enough, the steps of adoptions are"
        " repeatable; 0: the adoption is postponed by another lag",
        metavar="SECONDS",
        least=0,
    )
    policy: str = option(
        "snip", "rule that scores the options: snip, fisher, ... (snip_megatron/sensitivity/README.md)", names=POLICIES
    )
    estimator: str = option(
        "fisher",
        "with --snip-policy snip: fisher measures loss divergence by one pass, noise weight divergence too by two",
        choices=ESTIMATORS,
    )
    q: str = option(
        "split", "with --snip-policy snip: rule that combines loss and weight divergence (split, paper)", names=Q_RULES
    )
    probe_microbatches: int = option(1, "microbatches of a probe on each data parallel rank", metavar="B", least=1)
    stage_tolerance: str = option(
        "0.02",
        "with fp4=: how far the share of a pipeline stage may be below the budget, 0 to 1; none: no constraint",
        metavar="SHARE",
    )
    pin: tuple[str, ...] = option(
        (), "fixed format of all linears or GEMMs that match GLOB; the last match applies; repeatable"
    )
    map: str | None = option(
        None,
        "train under this map, without updates: a snip.map/1 file, or YAML of Megatron's --te-precision-config-file",
        metavar="MAP",
    )
    replay: str | None = option(
        None, "repeat the adoptions of another run, given by its run directory, at their steps", metavar="RUN"
    )
    gemm: str = option("auto", "GEMM backend; auto: the one for this device", choices=BACKENDS)
    gradient_reduction: str = option(
        "fp32",
        "how the distributed optimizer reduces gradients over data parallel ranks. fp8: partial sums are exchanged in"
        " FP8 and added in FP32, which adds an error",
        choices=GRADIENT_REDUCTION,
    )
    fusions: str = option(
        "auto",
        "quantisation in the kernel that computes a tensor. auto: SwiGLU and its gradient are computed with the"
        " quantisation for the linears that read them",
        choices=("none", "auto"),
    )
    eval: str = option(
        "map", "formats of validation: the map's, bf16, or both on equal batches", choices=("map", "bf16", "both")
    )
    guard_steps: int = option(
        100, "training steps after an adoption during which the guard watches for loss spikes; 0: no guard", least=0
    )
    guard_sigma: float = option(
        6.0, "a spike is a loss this many standard deviations above the mean before the adoption", positive=True
    )
    guard_blame: bool = option(
        False, "when the guard takes a map back, find out first whether rounding or a bug is to blame, and which GEMM"
    )
    blame: str | None = option(
        None,
        "train nothing: load the checkpoint before this iteration, counted from 1 as Megatron prints it, say whether"
        " rounding or a bug is to blame for it, and which GEMM, and exit",
        metavar="STEP[,STEP]",
    )
    seed: int = option(1234, "seed of stochastic rounding, probes and tie-breaking")
    dir: str | None = option(
        None,
        "run directory for events, statistics, maps and the report; by default the folder snip of --save, if given",
        metavar="DIR",
    )
    overwrite: bool = option(
        False,
        "write into a run directory of another configuration or of an earlier run. Records of the earlier run are"
        " removed, unless the run resumes",
    )
    no_compat: tuple[str, ...] = option(
        (),
        "switch off this set of compatibility patches (snip_megatron/megatron/README.md); repeatable",
        metavar="NAME",
    )

    backward_share: float = setting(
        BACKWARD_SHARE,
        "with --snip-q split: sum of the scores of all dgrads and wgrads over that of all fprops, in the candidates"
        " with the fewest bits",
        least=0,
    )
    standing_share: float = setting(
        STANDING_SHARE,
        "with phases: share of an fprop's loss that disappears once the fprop runs in a precise format again",
        least=0,
        most=1,
    )
    probe_tokens: int = setting(
        512, "tokens of each microbatch at which noise probes compare activations and gradients", least=1
    )
    gemm_library: str = setting(
        "auto",
        "library for fp8 and fp4 GEMMs. auto: cuBLASLt, and on Hopper DeepGEMM for fprop and dgrad if all ranks can"
        " load it; deepgemm, cublas: with and without DeepGEMM, and no start if the library cannot be loaded",
        choices=LIBRARIES,
    )
    guard_blame_seconds: float = setting(
        60.0, "seconds that the guard takes at most to find out what is to blame", positive=True
    )
    deadline: float = setting(
        600.0, "seconds after which a solver process that does not answer is killed and replaced", positive=True
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", _parse_budget(self.budget))
        if not self.enabled:
            return
        for field in dataclasses.fields(self)[1:]:
            check_option(field, getattr(self, field.name))
        _ = self.tolerance, self.pins  # which raise SnipError
        if (conflict := next(_conflicts(self), None)) is not None:
            raise SnipError(conflict)

    # -- derived -----------------------------------------------------------------------------------------------
    @functools.cached_property
    def phases(self) -> Schedule | None:
        """The phases of ``schedule``. None if it is static. Raises SnipError if its file is invalid.

        A file is read once.
        """
        return load_schedule(self.schedule, self.budget.kind)

    @property
    def measured_formats(self) -> tuple[str, ...]:
        """The candidate formats without bf16. Probes measure their errors relative to bf16."""
        return tuple(f for f in self.formats if f != Format.BF16.value)

    @property
    def tolerance(self) -> float | None:
        """The tolerance of a pipeline stage's fp4 share. None if stages are not constrained."""
        return parse_tolerance(self.stage_tolerance)

    @property
    def pins(self) -> tuple[tuple[str, str], ...]:
        """The (glob, format) pairs in the order of ``pin``. The last matching pair applies."""
        return parse_pins(self.pin)

    @property
    def deployed(self) -> str:
        """The formats in which the trained model is deployed: ``map`` or ``bf16``."""
        return self.deploy or ("bf16" if self.eval == "bf16" else "map")

    @property
    def late(self) -> bool:
        """Whether the policy fixes a plan of two maps at the start of the run."""
        return self.policy in LATE and self.map is None and self.replay is None

    @property
    def updates(self) -> bool:
        """Whether the run computes maps itself, rather than using fixed or replayed ones."""
        return self.update_interval > 0 and self.map is None and self.replay is None and self.policy not in UNSOLVED

    def is_update_step(self, step: int) -> bool:
        """Return whether an update starts before the 0-based ``step``."""
        since = step - self.first_update
        return self.updates and since >= 0 and since % self.update_interval == 0

    def formats_in_use(self) -> frozenset[Format]:
        """Return the formats that GEMMs of the run may use. Raises SnipError if a file of maps cannot be read."""
        if self.policy in FIXED or not (self.replay or self.map):
            return formats_of(self.policy, self.formats, self.pins)
        if self.replay is not None:
            return frozenset(fmt for each in replayed_maps(self.replay).values() for fmt in each.choices.values())
        assert self.map is not None
        if is_recipe_file(self.map):
            return frozenset(fmt for _, fmt in read_recipes(self.map, "--snip-map")) | {Format.BF16}
        return frozenset(PrecisionMap.load(self.map, "--snip-map").choices.values())

    def probed_microbatches(self, microbatches: int, group: int) -> int:
        """Return how many of a step's microbatches a probe runs on a rank. Some schedules run whole groups of them."""
        return min(microbatches, -(-self.probe_microbatches // group) * group)

    def request(self, **facts: Any) -> SolveRequest:
        """Return the request that every update of this run solves.

        ``facts`` are fields of the request that depend on the model and the machine, such as ``times``.
        """
        shared = {f.name for f in dataclasses.fields(SolveRequest)} & {f.name for f in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in shared} | {"pins": self.pins}
        return SolveRequest(**(values | {"stage_tolerance": self.tolerance} | facts))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, as ``config.json`` of the run directory holds them."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"budget": str(self.budget)}
        del values["blame"], values["guard_blame"], values["guard_blame_seconds"]  # which change no training
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def resolve(
    options: Mapping[str, Any],
    backend: str | None,
    *,
    has_end: bool,
    steps: int | None = None,
    mock: bool = False,
    recipe: tuple[str, ...] = (),
) -> SnipConfig:
    """Return the configuration of a training under SNIP.

    Options that are not set get the value that suits the machine. The schedule is ``auto`` beside the default budget of
    the loss, if the run can have phases. At the default share of FP4, phases gain nothing (docs/results.md).

    Args:
        options: Fields of :class:`SnipConfig` that the user has set, by name. A tuple may be a text with commas.
        backend: GEMM backend whose cards multiply the formats. None if formats are emulated.
        has_end: Whether training ends at a known step.
        steps: The number of training steps. None if it is not known.
        mock: Whether the data are random tokens.
        recipe: Candidate formats that replace the backend's.

    Raises:
        SnipError: If an option is unknown, a value is invalid, or two values cannot be combined.
    """
    defined = {field.name: field for field in dataclasses.fields(SnipConfig)}
    if unknown := sorted(set(options) - set(defined)):
        close = did_you_mean(unknown[0], defined)
        raise SnipError(f"unknown option {cut(unknown[0])}=; the options are the fields of SnipConfig{close}")
    values = dict(options)
    for name, value in options.items():
        if isinstance(defined[name].default, tuple):
            values[name] = tuple(value.split(",") if isinstance(value, str) else value)
    defaults: dict[str, Any] = {"first_update": first_update(steps)}
    if "budget" in values:
        values["budget"] = _parse_budget(values["budget"])
    else:
        multiplied = MULTIPLIED.get(backend, ())
        is_native = bool(multiplied) and set(values.get("formats", recipe)) <= set(multiplied)
        saves = is_native and in_nats(values.get("policy", "snip"), values.get("q", "split"))
        defaults["budget"] = SHARE if not saves else FASTEST if mock else LOSS
        has_updates = values.get("update_interval", 1) and not {"map", "replay"} & set(values)
        if defaults["budget"] is LOSS and has_end and has_updates and values.get("granularity", "gemm") == "gemm":
            defaults["schedule"] = "auto"
    kind = (defaults | values)["budget"].kind
    defaults["formats"] = candidates(kind, None if values.get("timings") == "flops" else backend, recipe)
    return SnipConfig(enabled=True, **(defaults | values))


def resolve_arguments(args: argparse.Namespace, backend: str | None = None) -> SnipConfig:
    """Return the configuration that parsed arguments ask for, as :func:`resolve` does.

    Megatron's arguments beside SNIP's tell when training ends, whether its data are random tokens, and which recipe of
    its own FP8 or FP4 it names. A namespace without SNIP's arguments gives a configuration that is not enabled. Raises
    SnipError as :func:`resolve` does, and if an argument is given without ``--snip``.
    """
    options = given_options(args, SnipConfig)
    if not getattr(args, "snip", False):
        if getattr(args, "snip_config", None) is not None:
            raise SnipError("--snip-config has no effect without --snip: add --snip, or leave it out")
        # The entry applies compatibility patches with or without SNIP.
        if without_effect := [name for name in options if name != "no_compat"]:
            argument = f"--snip-{without_effect[0].replace('_', '-')}"
            raise SnipError(f"{argument} has no effect without --snip: add --snip, or leave it out")
        return SnipConfig(**options)
    steps = training_steps(args)
    mock, recipe = bool(getattr(args, "mock_data", False)), getattr(args, "snip_recipe", ())
    return resolve(options, backend, has_end=steps is not None, steps=steps, mock=mock, recipe=recipe)


def training_steps(args: argparse.Namespace) -> int | None:
    """Return the number of training steps. None if Megatron's arguments do not give it."""
    batch = getattr(args, "global_batch_size", None) or 1
    return getattr(args, "train_iters", None) or (getattr(args, "train_samples", None) or 0) // batch or None


def _parse_budget(value: Budget | str) -> Budget:
    budget = value if isinstance(value, Budget) else Budget.parse(value, "--snip-budget")
    if budget.value < 0:
        raise SnipError(f"--snip-budget {budget}: must be 0 or more nats")
    return budget


def _conflicts(config: SnipConfig) -> Iterator[str]:
    """Yield one line for each combination of values that is not possible. Each line names the arguments."""
    budget, named = config.budget, f"--snip-budget {config.budget}"
    formats = f"--snip-formats {cut(','.join(config.formats))}"
    fault = candidates_fault(config.formats, granularity=config.granularity, share=not budget.timed)
    if fault is not None:
        yield f"{formats}: {fault}"
    if config.updates and not budget.timed and budget.value > 0 and not FOUR_BIT.intersection(config.formats):
        yield f"{formats}: none has four bits, so {named} cannot be reached; add fp4"
    if budget.kind == "fp4" and config.timings is not None and config.blame is None:
        yield (
            f"--snip-timings {config.timings} cannot be combined with {named}, which is a share of FLOPs; use"
            " --snip-budget speedup= or loss="
        )
    if budget.kind == "loss" and config.updates and not in_nats(config.policy, config.q):
        yield (
            f"{named} bounds a loss, and the scores of --snip-policy {config.policy} with --snip-q {config.q} are"
            " none; use --snip-policy snip with --snip-q split, or fisher"
        )
    if config.policy == "snip" and config.q == "paper" and config.estimator == "fisher":
        yield (
            "--snip-q paper cannot be combined with --snip-estimator fisher, which measures no weight divergence; use"
            " --snip-estimator noise"
        )
    if config.policy in LATE and budget.timed:
        yield (
            f"--snip-policy {config.policy} cannot be combined with {named}: its switch follows from an average share"
            " of FLOPs; use fp4="
        )
    if config.phases is None and config.deploy is not None:
        yield (
            f"--snip-deploy {config.deploy} has no effect with --snip-schedule static: use auto or a file"
            " of phases, or leave it out"
        )
    if config.phases is not None:
        for argument, present, why in (
            (f"map {config.map}", config.map is not None, "the map is fixed"),
            (f"replay {config.replay}", config.replay is not None, "what was recorded is adopted, phases included"),
            ("update-interval 0", config.update_interval == 0, "a plan is made by updates"),
            (f"policy {config.policy}", not config.updates, "its maps are fixed"),
            (f"granularity {config.granularity}", config.granularity != "gemm", "phases need --snip-granularity gemm"),
        ):
            if present:
                yield (
                    f"--snip-{argument} cannot be combined with --snip-schedule {cut(config.schedule)}: {why}; leave"
                    " one of them out"
                )
    if config.updates and config.update_interval <= config.lag:
        yield (
            f"--snip-lag {config.lag}: must be smaller than --snip-update-interval {config.update_interval}, so that an"
            " update is adopted before the next begins"
        )
    fixed = [name for name in ("map", "replay") if getattr(config, name) is not None]
    if len(fixed) == 2:
        yield "--snip-map and --snip-replay cannot be combined: both fix the maps; give one"
    if fixed and config.pin:
        yield f"--snip-pin cannot be combined with --snip-{fixed[0]}: its maps are used as they are"


# -- what suits the machine -------------------------------------------------------------------------------------------
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


def dominated(budget: Budget, formats: tuple[str, ...], backend: str | None, *, times: bool = True) -> str | None:
    """Return a line if a uniform format is as fast as every map of this budget and has no larger error, else None.

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


# -- the command line ----------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--snip`` and one ``--snip-*`` argument for each option of :class:`SnipConfig`, and return ``parser``."""
    parser.formatter_class = _Help
    group = parser.add_argument_group("SNIP", "choice of number formats during training")
    group.add_argument("--snip", action="store_true", help="choose the format of every GEMM while training")
    add_options(group, SnipConfig)
    add_settings(group)
    group.add_argument("--snip-help", action=_SnipHelp, help="list SNIP's arguments alone, and exit")
    return parser


class _SnipHelp(argparse.Action):
    """Prints the help of SNIP's arguments, without Megatron's, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, *_: Any) -> NoReturn:
        parser = argparse.ArgumentParser(add_help=False, usage="<Megatron's arguments> --snip [--snip-...]")
        add_arguments(parser).print_help()
        raise SystemExit(0)


class _Help(argparse.HelpFormatter):
    """Shows a help text with a bare percent sign as it is. Megatron 0.19 has one, with which ``--help`` fails."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except ValueError:
            return action.help or ""


def parse_snip_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse SNIP's arguments among others, without torch and Megatron.

    ``snip`` and ``snip_no_compat`` of the result are needed before Megatron is imported. :func:`resolve_arguments`
    checks the values. Raises SnipError if a value has the wrong type, or an argument is unknown.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        args, unknown = add_arguments(parser).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise SnipError(str(error)) from None
    for word in unknown:
        if (argument := word.partition("=")[0]).startswith("--snip-"):
            close = did_you_mean(argument, parser._option_string_actions)
            raise SnipError(f"unrecognized arguments: {cut(argument)}{close}")
    args.snip_no_compat = given_options(args, SnipConfig).get("no_compat", ())
    return args


def given_arguments(argv: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the configuration that SNIP's arguments among ``argv`` set. Raises SnipError."""
    return given_options(parse_snip_arguments(argv), SnipConfig)
