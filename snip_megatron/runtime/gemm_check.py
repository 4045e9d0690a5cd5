"""Compares the products of a pass with the reference's of the same inputs, and notes what rounding does to each.

Errors do not propagate between GEMMs here: every one is compared on the inputs that the job's own pass gave it. So the
first GEMM that differs is where a bug is, not where its effect first shows.
"""

import dataclasses
import math
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from snip_megatron.layers.context import LinearHandle
from snip_megatron.numerics.quantize.formats import STOCHASTIC
from snip_megatron.precision import ALL_BF16, Format, Gemm
from snip_megatron.runtime.exact_products import ExactBackend
from snip_megatron.runtime.exchange import objects_of_ranks, rank
from snip_megatron.runtime.watched import FormatsOf, Product, Watcher, of_ranks
from snip_megatron.sensitivity.blame import Fault

BOUND = {4: 29.0, 8: 32.0, 16: 40.0}
"""Bits of a GEMM's format → least signal to noise ratio in dB of any row or column of a correct result, against the
reference of the same inputs."""

ACCUMULATED = 2048
"""Number of products up to which BOUND holds in fprop and dgrad with one scale a tensor. Libraries add all of them in
the accumulator of the tensor cores, which has few bits on Hopper and rounds at every step, so that the noise grows with
their number: at 1.1B on an H200, healthy GEMMs have 35.0 dB over 2048 products and 30.4 dB over 5632."""

REDRAWN = 3.0
"""The same for gradients in four bits whose kernel may round by other random numbers than the reference."""

GATHERED = 100.0
"""Least signal to noise ratio in dB of gathered tokens, which are copies."""

SUM = 30.0
"""Least signal to noise ratio in dB of a sum over ranks in bf16."""

Key = tuple[str, str]
"""A linear and its GEMM."""

FLOOR = 1e-2
"""Rows and columns whose mean square is below this share of the matrix's are judged as if they had this share."""


@dataclass(frozen=True)
class Difference:
    """The worst signal to noise ratio of rows and columns in dB, and which ones are below the bound."""

    sqnr: float
    bound: float
    where: str

    @property
    def is_fault(self) -> bool:
        return self.sqnr < self.bound


def difference(reference: Tensor, result: Tensor, bound: float, noise: float = 0.0) -> Difference | None:
    """Compare a result with its reference, both [rows, columns]. Returns None if the reference is not finite.

    ``noise`` is the mean square of an error of each element that is no fault of the GEMM.
    """
    reference, result = reference.float(), result.float()
    signal = reference.square()
    if not torch.isfinite(signal.sum()) or not reference.numel():
        return None
    error = torch.where(torch.isfinite(result), (result - reference).square(), torch.inf)
    worst, bad = 200.0, []
    for axis in (1, 0):
        signals, errors = signal.mean(axis), (error.mean(axis) - noise).clamp_min(0.0)
        signals = signals + FLOOR * signals.mean()
        ratios = torch.where(errors > 0, 10.0 * torch.log10(signals / errors), 200.0).clamp(-200.0, 200.0)
        worst = min(worst, float(ratios.min()))
        bad.append(torch.nonzero(ratios < bound).flatten().tolist())
    rows, columns = (_ranges(each, size) for each, size in zip(bad, reference.shape, strict=True))
    where = [text for text in (f"rows {rows}" if rows else "", f"columns {columns}" if columns else "") if text]
    return Difference(worst, bound, ", ".join(where) if where else "everywhere" if worst < bound else "")


def _noise_of_sum(parts: Sequence[Tensor], dtype: torch.dtype) -> float:
    """Return the mean square error of a sum whose parts the ranks round to ``dtype``."""
    return float(sum(part.square().mean() for part in parts)) * torch.finfo(dtype).eps ** 2


def _lost_part(total: Tensor, parts: Sequence[Tensor], result: Tensor, bound: float, noise: float) -> int | None:
    """Return the index of the part that the result lacks, which is the sum of all others. None if there is none."""
    for index, part in enumerate(parts):
        without = difference(total - part, result, bound, noise)
        if without is not None and not without.is_fault:
            return index
    return None


def _ranges(indices: list[int], size: int) -> str:
    """Return the indices as ranges, the first three of them. Empty if there are none, or nearly all."""
    if not indices or len(indices) > 0.9 * size:
        return ""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def bound_of(fmt: Format, gemm: Gemm, depth: int, bound: Mapping[int, float] = BOUND) -> float:
    """Return the least ratio in dB of a correct GEMM that reduces over ``depth`` numbers."""
    if fmt is Format.FP8_TENSOR and gemm is not Gemm.WGRAD:
        return bound[fmt.bits] - 10.0 * math.log10(max(1.0, depth / ACCUMULATED))
    return bound[fmt.bits]


class KernelCheck(Watcher):
    """Compares the products of the job's own kernels with the reference's.

    Attributes:
        first: The first fault of this rank. None if there is none.
        order: Its place in a step, which no fault of another rank has.
        tensors: The inputs and results of its GEMM. Empty for other faults.
        sqnr: (linear, GEMM) → the least signal to noise ratio so far.
    """

    def __init__(self, formats_of: FormatsOf, numerics: ExactBackend, bound: Mapping[int, float] = BOUND) -> None:
        super().__init__(formats_of)
        self._numerics, self._bound = numerics, bound
        self.first: Fault | None = None
        self.order: tuple[int, ...] = ()
        self.tensors: Mapping[str, Any] = {}
        self.sqnr: dict[Key, float] = {}
        self._parts: dict[Key, Tensor] = {}  # of products that the job sums over ranks
        self._calls: dict[Any, int] = defaultdict(int)

    def on_result(self, product: Product, gemm: Gemm, result: Tensor, before: Tensor | None, library: str) -> None:
        """Compare one product."""
        if not self.receives(product):
            return
        handle, noise = product.handle, 0.0
        call = self._calls[handle.name, handle.expert, gemm]
        self._calls[handle.name, handle.expert, gemm] += 1
        if gemm is product.summed:
            self._parts[handle.name, gemm] = result.clone()  # the sum is computed in its memory
        operands = product.operands(gemm)  # a collective: of all ranks, not of one that finds a fault
        reference = product.multiplied(gemm, operands, self._numerics)
        if before is not None:  # what a sum in main_grad's dtype loses is no fault
            eps = torch.finfo(before.dtype).eps
            noise = float((before.float().square().mean() + reference.square().mean()) * eps**2)
            result = result.float() - before.float()
        noise += _noise_of_sum(product.parts, product.weight.dtype)
        fmt = product.formats[list(Gemm).index(gemm)]
        depth = operands[0][0].shape[operands[0][2]]
        bound = bound_of(fmt, gemm, depth, self._bound)
        if product.redraws and gemm is not Gemm.FPROP and fmt in STOCHASTIC:
            bound = REDRAWN
        compared = difference(reference, result, bound, noise)
        if compared is None:
            return
        key = handle.name, gemm
        self.sqnr[key] = min(self.sqnr.get(key, 200.0), compared.sqnr)
        if not compared.is_fault:
            return
        lost = _lost_part(reference, product.parts, result, bound, noise)
        if lost is not None:
            self._note_sum(handle, gemm, call, lost, compared)
            return
        (left, left_spec, _), (right, right_spec, _) = operands
        tensors: dict[str, Any] = {"left": left, "right": right, "result": result, "reference": reference}
        tensors |= {"formats": (str(left_spec.formats), str(right_spec.formats))}
        details = {"library": library, "shape": (*reference.shape, depth)}
        self._note_gemm("gemm", handle, gemm, (call,), compared, tensors=tensors, **details)

    def on_gather(self, product: Product, x: Tensor) -> None:
        """Compare the tokens that a linear has gathered with another gather of them. Collective."""
        if not self.receives(product):
            return
        handle, expected = product.handle, product.x()
        compared = difference(expected, x, GATHERED)
        if compared is None or not compared.is_fault:
            return
        where = f"{compared.where} of the gathered input"
        call = self._calls[handle.name, handle.expert, Gemm.FPROP]
        self._note_gemm("gather", handle, Gemm.FPROP, (call, -1), compared, where=where)

    def on_sum(self, handle: LinearHandle, gemm: Gemm, result: Tensor) -> None:
        """Compare a sum over tensor parallel ranks [rows, columns] with that of their latest products. Collective.

        ``result`` has all rows, or those of this rank after a reduce-scatter.
        """
        part = self._parts.pop((handle.name, gemm), None)
        if part is None:
            return
        parts = [each.float() for each in of_ranks(part, handle.tp_group)]
        if len(result) != len(part):
            parts = [each[handle.tp_rank * len(result) :][: len(result)] for each in parts]
        total, noise = torch.stack(parts).sum(0), _noise_of_sum(parts, result.dtype)
        compared = difference(total, result, SUM, noise)
        if compared is None or not compared.is_fault:
            return
        lost = _lost_part(total, parts, result, SUM, noise)
        call = self._calls[handle.name, handle.expert, gemm] - 1
        self._note_sum(handle, gemm, call, lost, compared)

    def _note_sum(self, handle: LinearHandle, gemm: Gemm, call: int, lost: int | None, compared: Difference) -> None:
        """Note a wrong sum over ranks. ``lost`` is the place in the group of the rank whose part it lacks, if that is
        known.
        """
        culprit, where = rank(), f"{compared.where} of the sum over tensor parallel ranks"
        if lost is not None:
            culprit = lost if handle.tp_group is None else dist.get_global_rank(handle.tp_group, lost)
            where = "the sum over tensor parallel ranks lacks the part of this rank"
        order = call, dist.get_world_size()  # after the products of all ranks
        self._note_gemm("reduction", handle, gemm, order, compared, where=where, rank=culprit)

    def _note_gemm(
        self, kind: str, handle: LinearHandle, gemm: Gemm, order: Sequence[int], compared: Difference, **details: Any
    ) -> None:
        """Note a fault of a linear. ``order`` has its microbatch, and its place beside the products of the linear."""
        position = handle.state.position  # layers of a backward run from the last one
        place = (0, position) if gemm is Gemm.FPROP else (1, -position)
        fields = {"gemm": gemm.value, "expert": handle.expert, **dataclasses.asdict(compared)} | details
        self.note((order[0], *place, *order[1:]), kind, handle.name, **fields)

    def note(self, order: Sequence[int], kind: str, linear: str, **details: Any) -> None:
        """Keep a fault if it is the first of this rank by ``order``, its place in a step.

        ``details`` are further fields of :class:`Fault`, which is by default one of this rank, and ``tensors``.
        """
        order = *order, rank()
        if self.first is None or order < self.order:
            self.order, self.tensors = order, details.pop("tensors", {})
            self.first = Fault(kind, linear, **{"rank": rank(), "host": socket.gethostname(), **details})

    def on_backward(self, product: Product, gradient: Tensor) -> None:
        """Compare the sum of input gradients, if the linear computes one. Collective."""
        if self.receives(product):
            self.on_sum(product.handle, Gemm.DGRAD, gradient)

    def of_all_ranks(self) -> tuple[Fault | None, bool, dict[Key, float]]:
        """Return the first fault of all ranks, whether it is this rank's, and the least ratios. Collective."""
        ranks = objects_of_ranks((self.order, self.first, self.sqnr))
        faults = {order: fault for order, fault, _ in ranks if fault is not None}
        first = min(faults, default=())
        least: dict[Key, float] = {}
        for _, _, sqnr in ranks:
            for key, value in sqnr.items():
                least[key] = min(least.get(key, value), value)
        return faults.get(first), first in faults and first == self.order, least


class Effect(NamedTuple):
    """What rounding does to one GEMM on the inputs of a bf16 pass, as sums over tokens."""

    loss: float = 0.0  # ⟨G, E⟩ of the error E of fprop, the change of the loss to first order
    fisher: float = 0.0  # Σ over tokens of ⟨G, E⟩², from which the change to second order follows
    error: float = 0.0  # ‖E‖²
    signal: float = 0.0  # ‖Y‖² of the GEMM's exact result Y
    mse: float = 0.0  # sum over both operands of ‖Q(x) − x‖²/‖x‖²
    underflow: float = 0.0  # the larger share of an operand's numbers that are rounded to zero
    products: float = 0.0  # number of products


Part = tuple[int | None, int | None]
"""The expert and the tensor parallel rank of a part of a GEMM. None where there is only one."""


class RoundingEffects(Watcher):
    """Measures what the job's formats do to each GEMM, on the inputs of a bf16 pass.

    ``sums`` has the :class:`Effect` of each part of a GEMM over the tokens of this rank, float64 [7].
    """

    def __init__(self, formats_of: FormatsOf, numerics: ExactBackend) -> None:
        super().__init__(formats_of)
        self._numerics = numerics
        self.sums: dict[tuple[Key, Part], Tensor] = {}

    def on_backward(self, product: Product, gradient: Tensor) -> None:
        """Add the effects of the three GEMMs of one microbatch."""
        if not self.receives(product):
            return
        handle = product.handle
        numerics = self._numerics.of(handle, after_backward=True)
        for gemm, fmt in zip(Gemm, product.formats, strict=True):
            if fmt is Format.BF16:
                continue
            plain = product.exact(gemm, numerics, ALL_BF16)
            error = (product.exact(gemm, numerics) - plain).double()
            loss = fisher = mse = underflow = torch.zeros((), dtype=torch.float64, device=error.device)
            if gemm is Gemm.FPROP:
                assert product.g is not None
                of_tokens = (product.g.double() * error).sum(1)
                loss, fisher = of_tokens.sum(), of_tokens.square().sum()
            for x, spec, axis in product.operands(gemm):
                numbers = numerics.numbers(numerics.quantize(x, spec)[1 - axis])
                if numbers.shape != x.shape:  # a Hadamard transform pads
                    continue
                x = x.float()
                mse = mse + (numbers - x).square().sum() / x.square().sum().clamp_min(1e-38)
                lost = ((numbers == 0) & (x != 0)).sum() / (x != 0).sum().clamp_min(1)
                underflow = torch.maximum(underflow, lost.double())
            if handle.repeats:
                continue
            squares = error.square().sum(), plain.double().square().sum()
            effect = torch.stack([loss, fisher, *squares, mse, underflow, torch.ones_like(loss)])
            part = handle.expert, None if handle.parallel == "whole" or handle.tp_size == 1 else handle.tp_rank
            key = (handle.name, gemm.value), part
            self.sums[key] = self.sums.get(key, 0.0) + effect

    def of_all_ranks(self) -> dict[Key, dict[Part, Effect]]:
        """Return the effect of each part of a quantised GEMM, summed over all ranks. Collective."""
        rows = torch.stack([*self.sums.values()]).tolist() if self.sums else []
        effects: dict[Key, dict[Part, Effect]] = defaultdict(dict)
        for of_rank in objects_of_ranks(dict(zip(self.sums, rows, strict=True))):
            for (key, part), row in of_rank.items():
                effects[key][part] = Effect(*map(sum, zip(effects[key].get(part, Effect()), row, strict=True)))
        return effects
