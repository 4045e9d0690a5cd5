"""The frozen configuration of a run. The ``--snip-*`` arguments are generated from its fields."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from snip_megatron.config.guard import LEAST_LOSSES, GuardSettings
from snip_megatron.config.schedule import DEPLOYED, check_schedule, load_schedule
from snip_megatron.errors import SnipError, cut
from snip_megatron.gemm import BACKENDS, LIBRARIES
from snip_megatron.phases import Schedule
from snip_megatron.precision import FOUR_BIT, GRANULARITIES, LINEAR_KINDS, Format, candidates_fault

EVAL_MODES = ("map", "bf16", "both")
COMMUNICATION = ("bf16", "gather", "all")
GRADIENT_REDUCTION = ("fp32", "fp8", "fp8-feedback")
PARAMETER_GATHER = ("bf16", "quantized")
FUSIONS = ("none", "auto")
FORMATS = tuple(fmt.value for fmt in Format if fmt is not Format.BF16)
BUDGETS = ("fp4", "speedup", "loss")
COSTS = ("auto", "time", "flops")
LATE = ("late-forward", "late-all")
_LISTS = ("formats", "protect")  # comma separated; the other tuples are arguments that may be repeated


def _option(default: Any, text: str, **argument: Any) -> Any:
    """Make a dataclass field that is also a command line argument with help ``text``.

    ``argument`` holds keyword arguments of ``add_argument``.
    """
    return dataclasses.field(default=default, metadata={"help": text, "argument": argument})


@dataclass(frozen=True)
class SnipConfig:
    """The SNIP settings of a run. Field ``x_y`` is the argument ``--snip-x-y``.

    Raises:
        SnipError: ``enabled`` is set, and an argument is invalid or conflicts with another.
    """

    enabled: bool = False
    budget: str = _option(
        "fp4=0.75",
        "what every map must reach. fp4=SHARE: this share of the decoder linears' FLOPs runs in four bits, 0 to 1;"
        " speedup=FACTOR: this predicted speedup of the decoder linears over bf16, 1 or more; loss=NATS: the fastest"
        " map whose predicted rise of the loss stays within this bound, 0 or more",
        metavar="KIND=VALUE",
    )
    schedule: str = _option(
        "static",
        "phases of the run: static (none; a map stays until the next update), auto (four phases with a map each) or a"
        " snip.schedule/1 file. With phases, the budget is the average over the run",
        metavar="static|auto|FILE",
    )
    deploy: str | None = _option(
        None,
        "with phases: formats in which the trained model will be deployed. The plan minimises the loss of this model."
        " Without this argument: bf16 with --snip-eval bf16, otherwise map",
        choices=DEPLOYED,
    )
    standing_share: float | None = _option(
        None,
        "with phases: share of an fprop's loss, 0 to 1, that disappears once the fprop runs in a precise format again."
        " Without this argument: 0.8",
        type=float,
        metavar="SHARE",
    )
    forgetting: float | None = _option(
        None,
        "with phases: rate per run, 0 or more, at which later training repairs what imprecise steps leave in the"
        " weights. Without this argument: 0",
        type=float,
        metavar="RATE",
    )
    formats: tuple[str, ...] = _option(
        ("fp8", "fp4"),
        "candidate formats, comma separated: fp8, fp4, fp8_tensor, nvfp4, mxfp4, mxfp8 and their variants"
        " (docs/choosing.md); with speedup= and loss= also bf16",
        metavar="F,F",
    )
    cost: str = _option(
        "auto",
        "what a choice saves: flops or time. auto is flops with a budget of fp4=, and time with speedup= and loss=",
        choices=COSTS,
    )
    timings: str | None = _option(
        None,
        "table of measured times for --snip-cost time, which snip calibrate wrote. Without this argument: the package's"
        " table of this GPU",
        metavar="FILE",
    )
    granularity: str = _option(
        "gemm",
        "gemm: one format per GEMM; layer: one format per linear, as in the paper",
        choices=GRANULARITIES,
    )
    update_interval: int = _option(
        1000,
        "training steps between two updates of the map; 0: no updates, or with --snip-trigger only those that it starts"
        " after the first",
        type=int,
        metavar="N",
    )
    trigger: float = _option(
        0.0,
        "start an update early if the coefficient of variation, over linears, of the change of their gradient norms"
        " exceeds this value; 0: off",
        type=float,
    )
    first_update: int = _option(
        100, "training step, counted from 0, before which the first update starts", type=int, metavar="N"
    )
    lag: int = _option(
        10, "training steps from the probe of an update to the adoption of its map", type=int, metavar="N"
    )
    wait: float = _option(
        0.0,
        "seconds that training waits, at most, for a map that is due. With enough, the steps of adoptions are"
        " repeatable; 0: the adoption is postponed by another lag",
        type=float,
        metavar="SECONDS",
    )
    policy: str = _option(
        "snip",
        "rule that scores the options: snip, fisher, hawq, ... (snip_megatron/sensitivity/README.md)",
        metavar="NAME",
    )
    estimator: str = _option(
        "noise",
        "with --snip-policy snip: how loss and weight divergence are estimated (noise, fisher, measured)",
        metavar="NAME",
    )
    q: str = _option(
        "split",
        "with --snip-policy snip: rule that combines loss and weight divergence into one score (split, noise, paper)",
        metavar="NAME",
    )
    backward_share: float = _option(
        0.08,
        "with --snip-q split: sum of the scores of all dgrads and wgrads over that of all fprops, in the candidates"
        " with the fewest bits",
        type=float,
        metavar="SHARE",
    )
    backward_noise: bool = _option(False, "run one more probe pass, with noise in the gradients, as in the paper")
    probe_microbatches: int = _option(
        1, "microbatches that a probe runs on each data parallel rank", type=int, metavar="B"
    )
    probe_tokens: int = _option(
        512,
        "tokens of each microbatch at which noise probes compare activations and gradients",
        type=int,
        metavar="N",
    )
    probe_noise: float = _option(
        0.03, "size of the noise that noise probes add, relative to that of the tensor", type=float
    )
    measured_share: float = _option(
        0.25,
        "with --snip-estimator measured: share of the fprops and dgrads that an update measures, above 0 and at most 1;"
        " the others keep their scores",
        type=float,
        metavar="SHARE",
    )
    measured_twice: bool = _option(
        False,
        "with --snip-estimator measured: measure a second time on other microbatches, which shows the repeatability",
    )
    hessian_probes: int = _option(
        8, "with --snip-policy hawq: number of probe vectors, which take two passes each", type=int, metavar="N"
    )
    protect: tuple[str, ...] = _option(
        ("fc2", "proj"),
        "with --snip-policy layer-type: kinds of linears to protect (qkv, proj, fc1, fc2), comma separated, the most"
        " protected first",
        metavar="KIND,KIND",
    )
    stage_tolerance: str = _option(
        "0.02",
        "with a budget of fp4=: how far the share of a pipeline stage may be below the budget, 0 to 1; none: no"
        " constraint",
        metavar="SHARE",
    )
    change_penalty: float = _option(
        0.0,
        "loss that is added for every option whose format changes, as a multiple of the mean loss of an option's worst"
        " format",
        type=float,
    )
    pin: tuple[str, ...] = _option(
        (), "fixed format of all linears or GEMMs that match GLOB; the last match applies; repeatable"
    )
    group: tuple[str, ...] = _option(
        (),
        "all linears that match GLOB get the same format, separately for fprop, dgrad and wgrad; block:GLOB: within"
        " each block; repeatable",
        metavar="GLOB",
    )
    map: str | None = _option(None, "train under this snip.map/1 file, without updates", metavar="MAP.json")
    replay: str | None = _option(
        None, "repeat the adoptions of another run, given by its run directory, at their steps", metavar="RUN"
    )
    gemm: str = _option("auto", "GEMM backend; auto: the one for this device", choices=BACKENDS)
    gemm_library: str = _option(
        "auto",
        "library for fp8 and fp4 GEMMs on Hopper. auto: DeepGEMM for fprop and dgrad if it is installed; deepgemm: for"
        " wgrad too, whose last bits then differ from those of cuBLAS; cublas: cuBLAS alone",
        choices=LIBRARIES,
    )
    communication: str = _option(
        "bf16",
        "how linears communicate under sequence parallelism. gather: shards of X, and of G where that is less, are"
        " quantised before they are gathered, with the same numbers; all: in addition, partial sums of quantised GEMMs"
        " are exchanged in FP8, which adds an error",
        choices=COMMUNICATION,
    )
    gradient_reduction: str = _option(
        "fp32",
        "how the distributed optimizer reduces gradients over data parallel ranks. fp8: partial sums are exchanged in"
        " FP8 and added in FP32, which adds an error; fp8-feedback: what is lost is added in the next step",
        choices=GRADIENT_REDUCTION,
    )
    parameter_gather: str = _option(
        "bf16",
        "how the distributed optimizer gathers updated parameters over data parallel ranks. quantized: weights whose"
        " fprop and dgrad run in fp8, fp4 or fp8_tensor are quantised before they are gathered, with the same numbers",
        choices=PARAMETER_GATHER,
    )
    fusions: str = _option(
        "none",
        "quantisation in the kernel that computes a tensor. auto: SwiGLU and its gradient are computed with the"
        " quantisation for the linears that read them, if no bit differs from Megatron's functions on this device",
        choices=FUSIONS,
    )
    eval: str = _option(
        "map", "formats of validation: those of the map, bf16, or both on the same batches", choices=EVAL_MODES
    )
    solver_time: float = _option(
        10.0,
        "time limit of the solver for an update, in CP-SAT's deterministic seconds",
        type=float,
        metavar="SECONDS",
    )
    deadline: float = _option(
        600.0,
        "seconds after which a solver process that does not answer is killed and replaced",
        type=float,
        metavar="SECONDS",
    )
    guard_steps: int = _option(
        100,
        "training steps after an adoption during which the guard watches for loss spikes; 0: no guard",
        type=int,
        metavar="N",
    )
    guard_sigma: float = _option(
        6.0, "a loss is a spike if it is this many standard deviations above the mean before the adoption", type=float
    )
    guard_patience: int = _option(
        3, "number of spikes in a row after which the guard restores the last good map", type=int, metavar="N"
    )
    guard_window: int = _option(
        50,
        f"number of losses, {LEAST_LOSSES} or more, before the adoption from which mean and standard deviation are"
        " computed",
        type=int,
        metavar="N",
    )
    guard_bar: float = _option(
        0.9,
        "after the guard has restored a map: limit of the next map's predicted loss, as a multiple of the predicted"
        " loss of the map that was taken back",
        type=float,
    )
    seed: int = _option(1234, "seed of stochastic rounding, probes and tie-breaking", type=int, metavar="N")
    dir: str | None = _option(
        None,
        "run directory for events, statistics, maps and the report. Without this argument: the folder snip of --save,"
        " if that is given",
        metavar="DIR",
    )
    overwrite: bool = _option(
        False,
        "write into a run directory of another configuration or of an earlier run. Records of the earlier run are"
        " removed, unless the run resumes",
    )
    no_compat: tuple[str, ...] = _option(
        (),
        "switch off this set of compatibility patches (snip_megatron/megatron/compat.md); repeatable",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        if self.enabled:
            self._validate()

    # -- derived -----------------------------------------------------------------------------------------------
    @property
    def wanted(self) -> tuple[str, float]:
        """The budget: its kind, one of BUDGETS, and its value.

        The value is an fp4 share in [0, 1], a speedup of 1 or more, or a loss of 0 or more nats. Raises SnipError if
        the argument is invalid.
        """
        kind, _, text = self.budget.partition("=")
        if kind not in BUDGETS:
            raise SnipError(
                f"--snip-budget {cut(self.budget)}: expected fp4=SHARE, speedup=FACTOR or loss=NATS, for example"
                " fp4=0.75"
            )
        if kind == "fp4":
            return kind, _share("--snip-budget", self.budget, text)
        try:
            figure = float(text)
        except ValueError:
            figure = math.nan
        least, most, what = (1.0, 1e6, "a factor of 1 or more") if kind == "speedup" else (0.0, 1e100, "0 or more nats")
        if not least <= figure <= most:
            raise SnipError(f"--snip-budget {cut(self.budget)}: must be {what}")
        return kind, figure

    @property
    def measured_formats(self) -> tuple[str, ...]:
        """The candidate formats without bf16. Probes measure their errors relative to bf16."""
        return tuple(f for f in self.formats if f != Format.BF16.value)

    @property
    def timed(self) -> bool:
        """Whether the budget is one of predicted time or loss, rather than an fp4 share of FLOPs."""
        return self.wanted[0] != "fp4"

    @property
    def tolerance(self) -> float | None:
        """The tolerance of a pipeline stage's fp4 share; None if stages are not constrained."""
        if self.stage_tolerance.lower() == "none":
            return None
        return _share("--snip-stage-tolerance", self.stage_tolerance, self.stage_tolerance)

    @property
    def pins(self) -> tuple[tuple[str, str], ...]:
        """The (glob, format) pairs in the order given. The last matching pair applies."""
        pairs = []
        for text in self.pin:
            glob, equals, fmt = text.rpartition("=")
            if not equals or not glob or fmt not in Format._value2member_map_:
                known = ", ".join(f.value for f in Format)
                raise SnipError(f"--snip-pin {cut(text)}: expected GLOB=FORMAT with FORMAT one of {known}")
            pairs.append((glob, fmt))
        return tuple(pairs)

    @property
    def protected_kinds(self) -> tuple[str, ...]:
        """The full names of the kinds of linears in ``protect``."""
        kinds = {kind.rpartition("linear_")[2]: kind for kind in LINEAR_KINDS}
        if unknown := [name for name in self.protect if name not in kinds]:
            raise SnipError(
                f"--snip-protect {cut(unknown[0])}: unknown kind of linear; choose among {', '.join(kinds)}"
            )
        return tuple(kinds[name] for name in self.protect)

    @property
    def guard(self) -> GuardSettings:
        """The ``--snip-guard-*`` arguments. Raises SnipError if one is out of range."""
        return GuardSettings(self.guard_steps, self.guard_sigma, self.guard_patience, self.guard_window, self.guard_bar)

    @property
    def phases(self) -> Schedule | None:
        """The phases of ``schedule``; None for a static one. Raises SnipError if a file of phases is invalid."""
        return load_schedule(self.schedule, self.wanted[0])

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
        from snip_megatron.sensitivity.policies import UNSOLVED

        fixed = self.policy in UNSOLVED
        wanted = self.update_interval > 0 or self.trigger > 0
        return wanted and self.map is None and self.replay is None and not fixed

    def is_update_step(self, step: int) -> bool:
        """Return whether an update starts before the 0-based ``step``."""
        if not self.updates or step < self.first_update:
            return False
        since = step - self.first_update
        return since == 0 if self.update_interval == 0 else since % self.update_interval == 0

    # -- validation --------------------------------------------------------------------------------------------
    def _validate(self) -> None:
        from snip_megatron.sensitivity.policies import ESTIMATORS, POLICIES
        from snip_megatron.sensitivity.quality import Q_RULES

        _ = self.wanted, self.tolerance, self.pins, self.guard, self.protected_kinds
        for name, value, known in (
            ("policy", self.policy, POLICIES),
            ("estimator", self.estimator, ESTIMATORS),
            ("q", self.q, Q_RULES),
            ("granularity", self.granularity, GRANULARITIES),
            ("gemm", self.gemm, BACKENDS),
            ("gemm-library", self.gemm_library, LIBRARIES),
            ("communication", self.communication, COMMUNICATION),
            ("gradient-reduction", self.gradient_reduction, GRADIENT_REDUCTION),
            ("parameter-gather", self.parameter_gather, PARAMETER_GATHER),
            ("fusions", self.fusions, FUSIONS),
            ("eval", self.eval, EVAL_MODES),
            ("cost", self.cost, COSTS),
        ):
            if value not in known:
                raise SnipError(f"--snip-{name} {cut(value)}: unknown; choose one of {', '.join(known)}")
        self._validate_formats()
        self._validate_cost()
        check_schedule(self.as_dict(), self.phases, updates=self.updates, timed=self.timed)
        for name, least in (
            ("update_interval", 0),
            ("first_update", 0),
            ("lag", 1),
            ("probe_microbatches", 1),
            ("hessian_probes", 1),
            ("probe_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise SnipError(f"{_flag(name)} {getattr(self, name)}: must be at least {least}")
        if self.updates and 0 < self.update_interval <= self.lag:
            raise SnipError(
                f"--snip-lag {self.lag}: must be smaller than --snip-update-interval {self.update_interval},"
                " so that an update is adopted before the next begins"
            )
        if not 0.0 < self.measured_share <= 1.0:
            raise SnipError(f"--snip-measured-share {self.measured_share}: must be above 0, 1 at most")
        if self.measured_twice and (self.policy, self.estimator) != ("snip", "measured"):
            raise SnipError("--snip-measured-twice has no effect without --snip-estimator measured: leave it out")
        for name in ("wait", "change_penalty", "trigger", "backward_share"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise SnipError(f"{_flag(name)} {getattr(self, name)}: must be a finite number, 0 or more")
        for name in ("probe_noise", "solver_time", "deadline"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise SnipError(f"{_flag(name)} {getattr(self, name)}: must be positive")
        if self.map is not None and self.replay is not None:
            raise SnipError("--snip-map and --snip-replay cannot be combined: both fix the maps; give one")
        fixed = "map" if self.map is not None else "replay" if self.replay is not None else None
        for name in ("pin", "group", "trigger"):
            if fixed is not None and getattr(self, name):
                raise SnipError(f"--snip-{name} cannot be combined with --snip-{fixed}: its maps are used as they are")

    def _validate_formats(self) -> None:
        kind, figure = self.wanted
        names = cut(",".join(self.formats))
        known = (*FORMATS, Format.BF16.value)
        if set(self.formats) - set(known) or not self.formats or len(set(self.formats)) != len(self.formats):
            raise SnipError(f"--snip-formats {names}: expected distinct names of {', '.join(known)}")
        if (why := candidates_fault(self.formats, granularity=self.granularity)) is not None:
            raise SnipError(f"--snip-formats {names}: {why}")
        if Format.BF16.value in self.formats and kind == "fp4":
            raise SnipError(
                f"--snip-formats {names}: bf16 is no candidate under --snip-budget {cut(self.budget)}, where it costs"
                " nothing; use --snip-pin GLOB=bf16, or --snip-budget speedup= or loss="
            )
        if not self.measured_formats:
            raise SnipError(f"--snip-formats {names}: leaves nothing to choose; add fp8, fp8_tensor or fp4")
        if self.updates and kind == "fp4" and figure > 0 and not FOUR_BIT.intersection(self.formats):
            raise SnipError(
                f"--snip-formats {names}: none has four bits, so --snip-budget {cut(self.budget)} cannot be reached;"
                " add fp4"
            )

    def _validate_cost(self) -> None:
        kind, _ = self.wanted
        if kind == "fp4" and (self.cost == "time" or self.timings is not None):
            argument = "--snip-cost time" if self.cost == "time" else f"--snip-timings {self.timings}"
            raise SnipError(
                f"{argument} cannot be combined with --snip-budget {cut(self.budget)}, which is a share of FLOPs;"
                " use --snip-budget speedup= or loss="
            )
        if self.cost == "flops" and self.timings is not None:
            raise SnipError(f"--snip-timings {self.timings} cannot be combined with --snip-cost flops: leave one out")
        if kind == "loss" and self.change_penalty:
            raise SnipError(
                f"--snip-change-penalty {self.change_penalty} cannot be combined with --snip-budget {cut(self.budget)}:"
                " the penalty is a loss, and time is what is minimised there"
            )
        if kind == "loss" and self.updates and not in_nats(self.policy, self.q):
            raise SnipError(
                f"--snip-budget {cut(self.budget)} bounds a loss, and the scores of --snip-policy {self.policy} with"
                f" --snip-q {self.q} are none; use --snip-policy snip with --snip-q split or noise, or fisher"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, as ``config.json`` of the run directory holds them."""
        return {
            f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in dataclasses.fields(self)
        }

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> SnipConfig:
        """Build the configuration from the arguments of :func:`add_arguments`.

        Raises:
            SnipError: an argument is invalid, conflicts with another, or is given without ``--snip``.
        """
        enabled = bool(getattr(args, "snip", False))
        values: dict[str, Any] = {}
        for f in _option_fields():
            value = getattr(args, f"snip_{f.name}", None)
            if value is None or value is False:
                continue
            # The entry applies compatibility patches with or without SNIP.
            if not enabled and f.name != "no_compat":
                raise SnipError(f"{_flag(f.name)} has no effect without --snip: add --snip, or leave it out")
            values[f.name] = _tuple(f.name, value) if isinstance(f.default, tuple) else value
        return cls(enabled=enabled, **values)


def in_nats(policy: str, q: str) -> bool:
    """Return whether a policy's scores are predicted losses in nats (see sensitivity/README.md)."""
    return policy in ("fisher", "hawq") or (policy == "snip" and q in ("split", "noise"))


def _share(argument: str, text: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise SnipError(f"{argument} {cut(text)}: the share must be a number between 0 and 1")
    return share


def _tuple(name: str, value: Any) -> tuple[str, ...]:
    return tuple(part for part in value.split(",") if part) if name in _LISTS else tuple(value)


def _flag(name: str) -> str:
    return f"--snip-{name.replace('_', '-')}"


def _option_fields() -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(SnipConfig) if "help" in f.metadata]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--snip`` and one ``--snip-*`` argument for each field of :class:`SnipConfig`, and return ``parser``.

    Choices are checked by SnipConfig instead of argparse, so that an error is one line.
    """
    group = parser.add_argument_group("SNIP", "choice of number formats during training")
    group.add_argument("--snip", action="store_true", help="choose the format of every GEMM while training")
    for f in _option_fields():
        kwargs: dict[str, Any] = {"help": f.metadata["help"], "dest": f"snip_{f.name}", "default": None}
        argument = dict(f.metadata["argument"])
        choices = argument.pop("choices", None)
        if choices:
            kwargs["help"] += f" ({', '.join(choices)})"
        if isinstance(f.default, bool):
            kwargs["action"] = "store_true"
            kwargs["default"] = False
        elif isinstance(f.default, tuple) and f.name not in _LISTS:
            kwargs |= {"action": "append", "metavar": argument.get("metavar", "GLOB=FORMAT")}
        else:
            kwargs |= {
                "type": argument.get("type", str),
                "metavar": argument.get("metavar", "NAME" if choices else "X"),
            }
            if f.default is not None:
                kwargs["help"] += f"; default: {','.join(f.default) if isinstance(f.default, tuple) else f.default}"
        group.add_argument(_flag(f.name), **kwargs)
    return parser
