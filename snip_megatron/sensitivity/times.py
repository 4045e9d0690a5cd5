"""Predicted seconds of every GEMM of a run: what a choice costs under ``speedup=`` and ``loss=`` budgets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, Gemm, LinearId
from snip_megatron.solver.costs import CostModel, LinearShape

Seconds = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class OptionTimes:
    """Plain figures, so that they cross to the sidecar and stay in a run's record: no table is needed to solve again.

    Attributes:
        model: name of the cost model: ``flops``, or the device that was measured.
        seconds: linear's name or kind → GEMM → format → seconds a training step takes of one rank, quantisation
            included. A name goes before a kind.
        rest: pipeline stage → seconds a step that no choice changes; empty: not known.
    """

    model: str
    seconds: Seconds
    rest: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def predict(cls, model: CostModel, shapes: Mapping[str, LinearShape], formats: Iterable[Format]) -> OptionTimes:
        """All GEMMs of ``shapes`` (by linear name or kind) in bf16 and ``formats``.

        Raises SnipError on a format that the model has no figures for.
        """
        wanted = sorted({Format.BF16, *formats}, key=lambda f: f.code)
        return cls(
            model.name,
            {
                name: {
                    gemm.value: {fmt.value: float(model.seconds(shape, gemm, fmt)) for fmt in wanted} for gemm in Gemm
                }
                for name, shape in shapes.items()
            },
        )

    def of(self, linear: str, gemm: Gemm | None, fmt: str) -> float:
        """Seconds of one GEMM, or of all three (``gemm`` None). Raises SnipError where they are not known."""
        known = self.seconds.get(linear) or self.seconds.get(LinearId.parse(linear).kind)
        if known is None:
            raise SnipError(f"{linear}: its predicted time is not known")
        try:
            return math.fsum(known[g.value][fmt] for g in ((gemm,) if gemm is not None else Gemm))
        except KeyError:
            raise SnipError(f"{linear}: the times of {self.model} hold none in {fmt}") from None

    def step_speedup(self, stages: Mapping[str, int], saved: Mapping[int, float]) -> float | None:
        """Predicted speedup of the whole step; None where the rest of it is not known.

        Args:
            stages: linear's name → pipeline stage. saved: stage → share of its linears' bf16 seconds that a map saves.
        """
        linears = dict.fromkeys(stages.values(), 0.0)
        for name, stage in stages.items():
            linears[stage] += self.of(name, None, Format.BF16.value)
        if not linears or not set(linears) <= set(self.rest):
            return None
        before = max(self.rest[k] + seconds for k, seconds in linears.items())
        return before / max(self.rest[k] + seconds * (1.0 - saved.get(k, 0.0)) for k, seconds in linears.items())

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"model": self.model, "seconds": self.seconds, "rest": {str(k): v for k, v in self.rest.items()}}

    @classmethod
    def from_dict(cls, body: Any, where: str) -> OptionTimes:
        """Inverse of :meth:`as_dict`. Raises SnipError naming ``where`` on anything else."""
        try:
            seconds = {
                str(name): {
                    Gemm(gemm).value: {Format(fmt).value: _positive(value) for fmt, value in by_format.items()}
                    for gemm, by_format in by_gemm.items()
                }
                for name, by_gemm in body["seconds"].items()
            }
            rest = {int(stage): _positive(value) for stage, value in body.get("rest", {}).items()}
            return cls(str(body["model"]), seconds, rest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SnipError(f"{where}: not predicted times ({error!r:.80})") from None


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{value!r:.40} is no time")
    return float(value)
