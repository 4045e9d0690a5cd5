"""The result of ``snip blame``, ``snip.blame/1``: rounding or a bug, and which GEMM. Without torch.

Three passes over the microbatches of one step are compared: in bf16, in the job's formats by the reference's exact
numerics, and by the job's own kernels. A kernel that differs from the reference on the same inputs is a bug. If the
reference itself is worse than bf16, rounding is to blame, and the GEMMs that cause it are the culprits.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError, located
from snip_megatron.precision.strict_json import JsonFields, read_file, read_object

BLAME_SCHEMA = "snip.blame/1"
BUG, ROUNDING, NOT_PRECISION, UNFINISHED = "bug", "rounding", "not_precision", "unfinished"
PASSES = ("bf16", "reference", "kernels")

EXPLAINED = 0.9  # share of the harm that the smallest set of culprits explains


@dataclass(frozen=True)
class PassFigures(JsonFields):
    """The mean loss of a token in one pass, None if it is not finite, and whether loss and gradients are finite."""

    loss: float | None
    finite: bool


@dataclass(frozen=True)
class Fault(JsonFields):
    """A bug: the first place in execution order where the job's own result differs from the reference's."""

    kind: str  # ``gemm``, ``reduction``, ``gather``, ``replica``, ``parameter`` or ``experts``
    linear: str  # name of the linear, or of a parameter
    # rank, host: where the fault was found
    rank: int
    host: str
    where: str  # rows and columns of the result that differ
    gemm: str | None = None  # the GEMM. None if the fault is in no GEMM
    expert: int | None = None  # global index of the expert. None if the linear belongs to none
    library: str = ""  # what multiplied
    shape: tuple[int, ...] = ()  # rows, columns and depth of the GEMM on this rank
    # sqnr, bound: signal to noise ratio of the worst rows or columns, and the least ratio of a correct result, in dB
    sqnr: float = 0.0
    bound: float = 0.0
    inputs: str | None = None  # file with the inputs, which reproduces the fault alone


@dataclass(frozen=True)
class Culprit(JsonFields):
    """A GEMM whose rounding does harm, or a suspect. The first one is the culprit."""

    linear: str
    gemm: str
    # expert, shard: index of the expert, and tensor parallel rank, that alone are to blame. None if there are no
    # others, if others have the same error, or if the GEMM is not confirmed
    expert: int | None
    shard: int | None
    format: str
    # loss_rise, gradient_error: ``loss_rise`` and ``error`` of :class:`Harm`
    loss_rise: float
    gradient_error: float
    score: float  # what ranks the suspects
    share: float | None  # share of the harm that disappears if this GEMM alone runs in bf16. None if it was not tried
    confirmed: bool  # whether the GEMM is of the smallest set that explains most of the harm


@dataclass(frozen=True)
class Trial(JsonFields):
    """One pass of the bisection: the number of GEMMs restored to bf16, and the share of the harm that disappeared."""

    restored: int
    explained: float


@dataclass(frozen=True)
class Harm(JsonFields):
    """Figures of one GEMM of the model."""

    linear: str
    gemm: str
    format: str
    share: float  # its share of the scores of all GEMMs
    sqnr_of_kernel: float | None  # the least signal to noise ratio of the job's kernel against the reference, in dB
    operand_mse: float  # sum over both operands of the squared error relative to the mean square
    underflow: float  # largest share of an operand's numbers other than zero that are rounded to zero
    loss_rise: float = 0.0  # what rounding of this fprop alone adds to the loss, to second order
    error: float = 0.0  # relative error of the GEMM's result on the inputs of the bf16 pass

    @property
    def bits(self) -> int:
        return Format(self.format).bits


@dataclass(frozen=True)
class Remedy(JsonFields):
    """What leaves the culprits in bf16."""

    # arguments of a job whose maps SNIP chooses. Empty for a job of Megatron's own formats, as ``map`` is None
    pins: tuple[str, ...]
    map: str | None = None  # file of a map
    # Megatron's precision file, or the folder with that of each pipeline stage. It has one format a linear
    megatron: str | None = None
    recipe: str | None = None  # file with a quantizer factory for Transformer Engine
    slowdown: float | None = None  # predicted time of a step over that without the remedy. None if no times are known
    # Megatron's own arguments that keep the layers of all culprits in bf16. Empty if there are none, or if they would
    # keep many other layers in bf16 too
    arguments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what is not there, or differs from the verdict's formats, and why

    def lines(self) -> list[tuple[str, str]]:
        """Return whom each way of the remedy is for, and its arguments."""
        ways = [
            ("where SNIP chooses maps", " ".join(self.pins)),
            ("one map", "" if self.map is None else f"--snip-map {self.map}"),
            ("Megatron's own formats", " ".join(self.arguments)),
            ("Megatron's own formats", "" if self.megatron is None else f"--te-precision-config-file {self.megatron}"),
            ("Transformer Engine's custom recipe", self.recipe or ""),
        ]
        return [way for way in ways if way[1]]


@dataclass(frozen=True)
class Checkpoint(JsonFields):
    """The checkpoint whose weights were used, and its step."""

    path: str
    step: int


@dataclass(frozen=True)
class Weights(JsonFields):
    """The weights of the passes."""

    step: int  # number of steps that have trained them
    digest: str  # of all ranks' parameters. It is equal only on the same layout


@dataclass(frozen=True)
class Blame(JsonFields):
    """The verdict about one step. All ranks have the same."""

    step: int  # the step, counted from 1
    checkpoint: Checkpoint | None
    job: str
    formats: str
    verdict: str
    reason: str
    passes: Mapping[str, PassFigures]
    bug: Fault | None = None
    culprits: tuple[Culprit, ...] = ()
    bisection: tuple[Trial, ...] = ()
    harm: tuple[Harm, ...] = ()
    remedy: Remedy | None = None
    seconds: float = 0.0
    thresholds: Mapping[str, float] | None = None
    # microbatches, step_microbatches: number of its microbatches on a rank that every pass ran, and of all of them
    microbatches: int = 0
    step_microbatches: int = 0
    weights: Weights | None = None

    def to_json(self) -> str:
        """Return the content of a ``snip.blame/1`` file."""
        return json.dumps({"format": BLAME_SCHEMA} | self.as_dict(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def load(cls, path: Path | str) -> "Blame":
        """Read a file of :meth:`to_json`. Raises SnipError."""
        content = read_file(path)
        with located(str(path)):
            body = read_object(content)
            if body.pop("format", None) != BLAME_SCHEMA:
                raise SnipError(f'format: must be "{BLAME_SCHEMA}"')
            return cls.from_dict(body, "blame")

    @property
    def title(self) -> str:
        """The verdict in words."""
        return {BUG: "a bug", NOT_PRECISION: "not precision"}.get(self.verdict, self.verdict)

    @property
    def ran(self) -> str:
        """What the passes ran, in words."""
        count = f"{self.microbatches} of {self.step_microbatches} microbatches a rank of step {self.step}"
        weights = self.weights
        return count if weights is None else f"{count}, weights after step {weights.step} ({weights.digest})"

    def text(self) -> str:
        """Return the verdict as a page of text."""
        lines = [f"step {self.step}: {self.title}", f"  {self.reason}"]
        if self.microbatches:
            lines.append(f"  {self.ran}")
        for name in PASSES:
            if name in self.passes:
                figures = self.passes[name]
                loss = "not finite" if figures.loss is None else f"{figures.loss:.6f}"
                lines.append(f"  loss, {name:9s} {loss}{'' if figures.finite else ', gradients not finite'}")
        if self.bug is not None:
            lines += _lines_of_fault(self.bug)
        for culprit in self.culprits[:3]:
            share = "" if culprit.share is None else f", {culprit.share:.0%} of the harm"
            expert = "" if culprit.expert is None else f", expert {culprit.expert}"
            expert += "" if culprit.shard is None else f", tensor parallel rank {culprit.shard}"
            lines.append(f"  {'culprit' if culprit.confirmed else 'suspect'}: {culprit.linear}:{culprit.gemm}{expert}"
                         f" in {culprit.format}{share}")  # fmt: skip
        if self.remedy is not None:
            lines += [f"  remedy, {whom}: {way}" for whom, way in self.remedy.lines()]
            if self.remedy.slowdown is not None:
                lines.append(f"  a step then takes {self.remedy.slowdown:.3f} x as long, as predicted")
            lines += [f"  {note}" for note in self.remedy.notes]
        return "\n".join(lines)


def _lines_of_fault(fault: Fault) -> list[str]:
    gemm = "" if fault.gemm is None else f":{fault.gemm}"
    expert = "" if fault.expert is None else f", expert {fault.expert}"
    shape = " x ".join(map(str, fault.shape))
    lines = [
        f"  {fault.kind}: {fault.linear}{gemm}{expert}",
        f"  rank {fault.rank} on {fault.host}, {fault.library}{f', {shape}' if shape else ''}: {fault.where}",
        f"  signal to noise {fault.sqnr:.1f} dB, a correct result has {fault.bound:.0f} dB or more",
    ]
    return lines if fault.inputs is None else [*lines, f"  inputs: {fault.inputs}"]


def smallest_set[T](ranked: Sequence[T], explained: Callable[[Sequence[T]], float]) -> list[T]:
    """Return the smallest set of suspects that explains EXPLAINED of the harm, by halves.

    First the shortest head of the ranking is sought that explains enough, then halves, quarters, ... of it are left
    out where the rest still does.

    Args:
        ranked: The suspects, the worst first.
        explained: Share of the harm that disappears without these suspects.
    """
    low, high = 0, 1  # no head of `low` explains enough
    while high < len(ranked) and explained(ranked[:high]) < EXPLAINED:
        low, high = high, min(4 * high, len(ranked))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if explained(ranked[:middle]) >= EXPLAINED else (middle, high)
    chosen, size = list(ranked[:high]), high // 2
    while size:
        start = len(chosen) - size
        while start >= 0 and len(chosen) > 1:  # the worst suspects last
            remaining = chosen[:start] + chosen[start + size :]
            if remaining and explained(remaining) >= EXPLAINED:
                chosen = remaining
            start = min(start, len(chosen)) - size
        size //= 2
    return chosen


# -- GEMMs that formats harm more than their peers ---------------------------------------------------------------------
# The error of a GEMM is that of its result on the inputs of a bf16 pass: of an 8-bit format .01 to .04, of a 4-bit one
# .03 to .2. It is compared with what the errors of its peers' operands give, and with a limit. Peers are GEMMs of the
# same kind in as many bits. A GEMM in a rare format is compared with those in other formats: in a run in eight bits, a
# single linear in four bits is to blame.
LIMIT = {4: 0.5, 8: 0.15}  # Bits → relative error of a GEMM's result above which it is harmed, whatever its peers have

RATIO = 2.0
"""A GEMM is harmed if its error is this many times what independent errors of its peers' operands give: .075 in E4M3,
.12 with gradients in E5M2. Where products add up, a healthy result has less (.006). Where they cancel, or where many
rows are alike, it has more: .074 in 42 steps of delayed scaling, and .067 in the last weight gradients of a 1.1B model.
The ratio was 1.42 at most in 71 healthy steps of small models, and 1.53 in 22 of a 1.1B model."""

SQUARED_RATIO = 2.5
"""A squared error is an outlier's if it is this many times that of the others: of a GEMM's operands beside the median
of its peers in 8 bits, or of one expert or rank beside the next. Operands have 1.07 at most in 10 healthy steps in 8
bits, 3.4 if one of both loses a bit of its mantissa, and about 15 in 4 bits. A scale that huge numbers decide harms all
others and hardly changes this ratio. The result is then above LIMIT."""

RARE = 1 / 8  # share of the GEMMs of a kind below which those with as many bits are no peers of each other


def outliers(harms: Sequence[Harm]) -> dict[Harm, float]:
    """Return the GEMMs that are harmed more than is healthy → their squared error over the largest healthy one."""
    quantised, harmed = [harm for harm in harms if harm.bits < 16], {}
    for harm in quantised:
        peers = _peers(harm, quantised)
        usual = statistics.median_high(peer.operand_mse for peer in peers) if len(peers) >= 3 else math.inf
        limit = min(LIMIT[harm.bits], RATIO * math.sqrt(usual or math.inf))  # 0: no operand was compared
        if harm.error > limit:
            harmed[harm] = (harm.error / limit) ** 2
        elif harm.operand_mse > SQUARED_RATIO * usual and peers[0].bits == 8:
            harmed[harm] = harm.operand_mse / (SQUARED_RATIO * usual)
    return harmed


def _peers(harm: Harm, quantised: Sequence[Harm]) -> list[Harm]:
    """Return the GEMMs of the same kind with as many bits, or those with other bits if the GEMM's format is rare."""
    same_kind = [other for other in quantised if other.gemm == harm.gemm and other is not harm]
    peers = [other for other in same_kind if other.bits == harm.bits]
    is_rare = len(peers) + 1 <= RARE * (len(same_kind) + 1)
    return [other for other in same_kind if other.bits != harm.bits] if is_rare else peers


def worst_part(errors: Mapping[tuple[int | None, int | None], float]) -> tuple[int | None, int | None]:
    """Return the expert and the tensor parallel rank that alone have the error of a GEMM. None if others have it too.

    Args:
        errors: (expert, rank) → relative squared error of that part.
    """
    experts = {expert: max(e for (other, _), e in errors.items() if other == expert) for expert, _ in errors}
    expert = _alone(experts)
    shards = {rank: e for (other, rank), e in errors.items() if other == expert} if expert is not None else {}
    shards = shards or {rank: max(e for (_, other), e in errors.items() if other == rank) for _, rank in errors}
    return expert, _alone(shards)


def _alone(errors: Mapping[int | None, float]) -> int | None:
    """Return the one whose error is above that of every other as an outlier's is. None if there is none."""
    ranked = sorted(errors, key=lambda part: -errors[part] if errors[part] == errors[part] else -math.inf)
    if len(ranked) < 2 or not errors[ranked[1]] * SQUARED_RATIO < errors[ranked[0]]:
        return None
    return ranked[0]
