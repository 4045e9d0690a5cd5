"""The frozen configuration of a run. The ``--snip-*`` arguments are generated from its fields."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from snip_megatron.config.conflicts import check_cost, check_fixed_maps, check_formats, check_updates
from snip_megatron.config.guard import LEAST_LOSSES, GuardSettings
from snip_megatron.config.options import (
    add_options,
    check_choice,
    check_option,
    flag,
    given_options,
    option,
    options_of,
    settings,
)
from snip_megatron.config.schedule import DEPLOYED, check_schedule, load_schedule
from snip_megatron.errors import SnipError, cut
from snip_megatron.gemm import BACKENDS, LIBRARIES
from snip_megatron.precision import GRANULARITIES, LINEAR_KINDS, Format
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.phases import Schedule

EVAL_MODES = ("map", "bf16", "both")
COMMUNICATION = ("bf16", "gather", "all")
GRADIENT_REDUCTION = ("fp32", "fp8", "fp8-feedback")
FUSIONS = ("none", "auto")
COSTS = ("auto", "time", "flops")
LATE = ("late-forward", "late-all")


@dataclass(frozen=True)
class SnipConfig:
    """The SNIP settings of a run. Field ``x_y`` is the argument ``--snip-x-y``.

    Raises:
        SnipError: ``enabled`` is set, and an argument is invalid or conflicts with another.
    """

    enabled: bool = False
    budget: str = option(
        "fp4=0.75",
        "what every map must reach. fp4=SHARE: this share of the decoder linears' FLOPs runs in four bits, 0 to 1;"
        " speedup=FACTOR: this predicted speedup of the decoder linears over bf16, 1 or more; loss=NATS: the fastest"
        " map whose predicted rise of the loss stays within this bound, 0 or more",
        metavar="KIND=VALUE",
    )
    schedule: str = option(
        "static",
        "phases of the run: static (none; a map stays until the next update), auto (four phases with a map each) or a"
        " snip.schedule/1 file. With phases, the budget is the average over the run",
        metavar="static|auto|FILE",
    )
    deploy: str | None = option(
        None,
        "with phases: formats in which the trained model will be deployed. The plan minimises the loss of this model."
        " Without this argument: bf16 with --snip-eval bf16, otherwise map",
        choices=DEPLOYED,
    )
    standing_share: float | None = option(
        None,
        "with phases: share of an fprop's loss, 0 to 1, that disappears once the fprop runs in a precise format again."
        " Without this argument: 0.8",
        type=float,
        metavar="SHARE",
    )
    forgetting: float | None = option(
        None,
        "with phases: rate per run, 0 or more, at which later training repairs what imprecise steps leave in the"
        " weights. Without this argument: 0",
        type=float,
        metavar="RATE",
        least=0,
    )
    formats: tuple[str, ...] = option(
        ("fp8", "fp4"),
        "candidate formats, comma separated: fp8, fp4, fp8_tensor, nvfp4, mxfp4, mxfp8 and their variants"
        " (docs/choosing.md); with speedup= and loss= also bf16",
        metavar="F,F",
    )
    cost: str = option(
        "auto",
        "what a choice saves: flops or time. auto is flops with a budget of fp4=, and time with speedup= and loss=",
        choices=COSTS,
    )
    timings: str | None = option(
        None,
        "table of measured times for --snip-cost time, which snip calibrate wrote. Without this argument: the package's"
        " table of this GPU",
        metavar="FILE",
    )
    granularity: str = option(
        "gemm",
        "gemm: one format per GEMM; layer: one format per linear, as in the paper",
        choices=GRANULARITIES,
    )
    update_interval: int = option(
        1000,
        "training steps between two updates of the map; 0: no updates, or with --snip-trigger only those that it starts"
        " after the first",
        type=int,
        metavar="N",
        least=0,
    )
    trigger: float = option(
        0.0,
        "start an update early if the coefficient of variation, over linears, of the change of their gradient norms"
        " exceeds this value; 0: off",
        type=float,
        least=0,
    )
    first_update: int = option(
        100, "training step, counted from 0, before which the first update starts", type=int, metavar="N", least=0
    )
    lag: int = option(
        10, "training steps from the probe of an update to the adoption of its map", type=int, metavar="N", least=1
    )
    wait: float = option(
        0.0,
        "seconds that training waits, at most, for a map that is due. With enough, the steps of adoptions are"
        " repeatable; 0: the adoption is postponed by another lag",
        type=float,
        metavar="SECONDS",
        least=0,
    )
    policy: str = option(
        "snip",
        "rule that scores the options: snip, fisher, ... (snip_megatron/sensitivity/README.md)",
        metavar="NAME",
    )
    estimator: str = option(
        "noise",
        "with --snip-policy snip: how loss and weight divergence are estimated (noise, fisher)",
        metavar="NAME",
    )
    q: str = option(
        "split",
        "with --snip-policy snip: rule that combines loss and weight divergence into one score (split, noise, paper)",
        metavar="NAME",
    )
    backward_share: float = option(
        0.08,
        "with --snip-q split: sum of the scores of all dgrads and wgrads over that of all fprops, in the candidates"
        " with the fewest bits",
        type=float,
        metavar="SHARE",
        least=0,
    )
    backward_noise: bool = option(False, "run one more probe pass, with noise in the gradients, as in the paper")
    probe_microbatches: int = option(
        1, "microbatches that a probe runs on each data parallel rank", type=int, metavar="B", least=1
    )
    probe_tokens: int = option(
        512,
        "tokens of each microbatch at which noise probes compare activations and gradients",
        type=int,
        metavar="N",
        least=1,
    )
    probe_noise: float = option(
        0.03, "size of the noise that noise probes add, relative to that of the tensor", type=float, positive=True
    )
    protect: tuple[str, ...] = option(
        ("fc2", "proj"),
        "with --snip-policy layer-type: kinds of linears to protect (qkv, proj, fc1, fc2), comma separated, the most"
        " protected first",
        metavar="KIND,KIND",
    )
    stage_tolerance: str = option(
        "0.02",
        "with a budget of fp4=: how far the share of a pipeline stage may be below the budget, 0 to 1; none: no"
        " constraint",
        metavar="SHARE",
    )
    change_penalty: float = option(
        0.0,
        "loss that is added for every option whose format changes, as a multiple of the mean loss of an option's worst"
        " format",
        type=float,
        least=0,
    )
    pin: tuple[str, ...] = option(
        (), "fixed format of all linears or GEMMs that match GLOB; the last match applies; repeatable"
    )
    map: str | None = option(None, "train under this snip.map/1 file, without updates", metavar="MAP.json")
    replay: str | None = option(
        None, "repeat the adoptions of another run, given by its run directory, at their steps", metavar="RUN"
    )
    gemm: str = option("auto", "GEMM backend; auto: the one for this device", choices=BACKENDS)
    gemm_library: str = option(
        "auto",
        "library for fp8 and fp4 GEMMs on Hopper. auto: DeepGEMM for fprop and dgrad if it is installed; deepgemm: for"
        " wgrad too, whose last bits then differ from those of cuBLAS; cublas: cuBLAS alone",
        choices=LIBRARIES,
    )
    communication: str = option(
        "bf16",
        "how linears communicate under sequence parallelism. gather: shards of X, and of G where that is less, are"
        " quantised before they are gathered, with the same numbers; all: in addition, partial sums of quantised GEMMs"
        " are exchanged in FP8, which adds an error",
        choices=COMMUNICATION,
    )
    gradient_reduction: str = option(
        "fp32",
        "how the distributed optimizer reduces gradients over data parallel ranks. fp8: partial sums are exchanged in"
        " FP8 and added in FP32, which adds an error; fp8-feedback: what is lost is added in the next step",
        choices=GRADIENT_REDUCTION,
    )
    fusions: str = option(
        "auto",
        "quantisation in the kernel that computes a tensor. auto: SwiGLU and its gradient are computed with the"
        " quantisation for the linears that read them",
        choices=FUSIONS,
    )
    eval: str = option(
        "map", "formats of validation: those of the map, bf16, or both on the same batches", choices=EVAL_MODES
    )
    solver_time: float = option(
        10.0,
        "time limit of the solver for an update, in CP-SAT's deterministic seconds",
        type=float,
        metavar="SECONDS",
        positive=True,
    )
    deadline: float = option(
        600.0,
        "seconds after which a solver process that does not answer is killed and replaced",
        type=float,
        metavar="SECONDS",
        positive=True,
    )
    guard_steps: int = option(
        100,
        "training steps after an adoption during which the guard watches for loss spikes; 0: no guard",
        type=int,
        metavar="N",
    )
    guard_sigma: float = option(
        6.0, "a loss is a spike if it is this many standard deviations above the mean before the adoption", type=float
    )
    guard_patience: int = option(
        3, "number of spikes in a row after which the guard restores the last good map", type=int, metavar="N"
    )
    guard_window: int = option(
        50,
        f"number of losses, {LEAST_LOSSES} or more, before the adoption from which mean and standard deviation are"
        " computed",
        type=int,
        metavar="N",
    )
    guard_bar: float = option(
        0.9,
        "after the guard has restored a map: limit of the next map's predicted loss, as a multiple of the predicted"
        " loss of the map that was taken back",
        type=float,
    )
    seed: int = option(1234, "seed of stochastic rounding, probes and tie-breaking", type=int, metavar="N")
    dir: str | None = option(
        None,
        "run directory for events, statistics, maps and the report. Without this argument: the folder snip of --save,"
        " if that is given",
        metavar="DIR",
    )
    overwrite: bool = option(
        False,
        "write into a run directory of another configuration or of an earlier run. Records of the earlier run are"
        " removed, unless the run resumes",
    )
    no_compat: tuple[str, ...] = option(
        (),
        "switch off this set of compatibility patches (snip_megatron/megatron/compat.md); repeatable",
        metavar="NAME",
    )

    # Not an argument: snip validate-proxy sets it, so that updates force every option alone and record what it does.
    truth: bool = False

    def __post_init__(self) -> None:
        if self.enabled:
            self._validate()

    # -- derived -----------------------------------------------------------------------------------------------
    @functools.cached_property
    def wanted(self) -> Budget:
        """The budget. Raises SnipError if the argument is invalid."""
        budget = Budget.parse(self.budget, "--snip-budget")
        if budget.value < 0:
            raise SnipError(f"--snip-budget {cut(self.budget)}: must be 0 or more nats")
        return budget

    @property
    def measured_formats(self) -> tuple[str, ...]:
        """The candidate formats without bf16. Probes measure their errors relative to bf16."""
        return tuple(f for f in self.formats if f != Format.BF16.value)

    @property
    def timed(self) -> bool:
        """Whether the budget is one of predicted time or loss, rather than an fp4 share of FLOPs."""
        return self.wanted.timed

    @property
    def tolerance(self) -> float | None:
        """The tolerance of a pipeline stage's fp4 share; None if stages are not constrained."""
        return parse_tolerance(self.stage_tolerance)

    @property
    def pins(self) -> tuple[tuple[str, str], ...]:
        """The (glob, format) pairs in the order given. The last matching pair applies."""
        return parse_pins(self.pin)

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
        return load_schedule(self.schedule, self.wanted.kind)

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
        return self.next_update(step) == step

    def next_update(self, step: int) -> int | None:
        """Return the first 0-based step from ``step`` on before which an update starts; None if there is none."""
        if not self.updates:
            return None
        since = step - self.first_update
        if since <= 0:
            return self.first_update
        return None if self.update_interval == 0 else step + -since % self.update_interval

    # -- validation --------------------------------------------------------------------------------------------
    def _validate(self) -> None:
        from snip_megatron.sensitivity.policies import ESTIMATORS, POLICIES, Q_RULES

        _ = self.wanted, self.tolerance, self.pins, self.guard, self.protected_kinds
        for name, known in (("policy", POLICIES), ("estimator", ESTIMATORS), ("q", Q_RULES)):
            check_choice(name, getattr(self, name), known)
        for field in options_of(self):
            check_option(field, getattr(self, field.name))
        values = self.as_dict()
        check_formats(values, self.wanted, updates=self.updates)
        check_cost(values, self.wanted, updates=self.updates)
        check_schedule(values, self.phases, updates=self.updates, timed=self.timed)
        check_updates(values, updates=self.updates)
        check_fixed_maps(values)

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
        values = given_options(args, cls) | settings(getattr(args, "snip_settings", None), cls)
        # The entry applies compatibility patches with or without SNIP.
        useless = [] if enabled else [name for name in values if name != "no_compat"]
        if useless:
            raise SnipError(f"{flag(useless[0])} has no effect without --snip: add --snip, or leave it out")
        return cls(enabled=enabled, **values)


def parse_pins(pins: Iterable[str], prefix: str = "--snip-") -> tuple[tuple[str, str], ...]:
    """Parse the values of ``--snip-pin``: (glob, format) pairs.

    Args:
        pins: the values.
        prefix: prefix of the argument, for errors.

    Raises:
        SnipError: A value is not GLOB=FORMAT.
    """
    pairs = []
    for text in pins:
        glob, equals, fmt = text.rpartition("=")
        if not equals or not glob or fmt not in Format._value2member_map_:
            known = ", ".join(f.value for f in Format)
            raise SnipError(f"{prefix}pin {cut(text)}: expected GLOB=FORMAT with FORMAT one of {known}")
        pairs.append((glob, fmt))
    return tuple(pairs)


def parse_tolerance(text: str, prefix: str = "--snip-") -> float | None:
    """Parse the value of ``--snip-stage-tolerance``: a share, or None for no constraint.

    Args:
        text: the value.
        prefix: prefix of the argument, for errors.

    Raises:
        SnipError: The value is neither a share nor ``none``.
    """
    return None if text.lower() == "none" else _share(f"{prefix}stage-tolerance", text, text)


def _share(argument: str, text: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise SnipError(f"{argument} {cut(text)}: the share must be a number between 0 and 1")
    return share


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--snip`` and one ``--snip-*`` argument for each option of :class:`SnipConfig`, and return ``parser``."""
    group = parser.add_argument_group("SNIP", "choice of number formats during training")
    group.add_argument("--snip", action="store_true", help="choose the format of every GEMM while training")
    add_options(group, SnipConfig)
    group.add_argument("--snip-settings", metavar="JSON", help=argparse.SUPPRESS)  # fields of snip compare
    return parser
