"""Predicted seconds of every GEMM of a run: the costs of options under budgets of time and loss."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap
from snip_megatron.precision.errors import SnipError, quoted
from snip_megatron.precision.strict_json import JsonFields, is_finite
from snip_megatron.timing.cost_model import CostModel, LinearShape

Seconds = Mapping[str, Mapping[str, Mapping[str, float]]]
SHARING = (Gemm.FPROP, Gemm.DGRAD)  # the GEMMs that share an operand with wgrad


@dataclass(frozen=True)
class OptionTimes(JsonFields):
    """Predicted times as plain figures.

    They are sent to the sidecar and stored with a run, which can then be solved again without the cost model.
    """

    model: str  # name of the cost model: ``flops``, or the device that was measured
    # name of a linear, or path in its layer → GEMM → format → seconds per training step on one rank. They include the
    # quantisation for this GEMM alone. A name takes precedence over a path
    seconds: Seconds
    # pipeline stage → seconds per step that do not depend on the map. Empty if they are not known
    rest: Mapping[int, float] = field(default_factory=dict)
    # as ``seconds``, for fprop and dgrad: what a step saves if wgrad is in the same format, because one call quantises
    # the operand of both. Empty if not known
    joint: Seconds = field(default_factory=dict)
    # name of a linear or path → seconds that it adds to a step in which all its GEMMs are bf16, because Megatron's own
    # code runs it there. Only :meth:`step_seconds` counts them
    stock: Mapping[str, float] = field(default_factory=dict)
    bubble: float = 1.0  # seconds of a step divided by those in which its slowest stage works

    def __post_init__(self) -> None:
        for name, table in (("seconds", self.seconds), ("joint", self.joint)):
            for gemm, times in ((gemm, times) for by_gemm in table.values() for gemm, times in by_gemm.items()):
                Gemm(gemm)
                for fmt, value in times.items():
                    Format(fmt)
                    if not (is_finite(value) and (value > 0 or (value == 0 and name != "seconds"))):
                        raise ValueError(f"{name}: {quoted(value)} is no time")

    @classmethod
    def predict(cls, model: CostModel, shapes: Mapping[str, LinearShape], formats: Iterable[Format]) -> OptionTimes:
        """Predict all GEMMs of ``shapes`` in bf16 and in ``formats``.

        ``shapes`` are by the linear's name or its path in the layer. Raises SnipError if the model has no figures for a
        format.
        """
        ordered = sorted({Format.BF16, *formats}, key=lambda fmt: fmt.code)

        def table(of: Callable[[LinearShape, Gemm, Format], float]) -> Seconds:
            return {
                name: {gemm.value: {fmt.value: float(of(shape, gemm, fmt)) for fmt in ordered} for gemm in Gemm}
                for name, shape in shapes.items()
            }

        stock = {name: seconds for name, shape in shapes.items() if (seconds := model.stock(shape))}
        return cls(model.name, table(model.seconds), joint=table(model.joint), stock=stock)

    def of(self, linear: str, gemm: Gemm | None, fmt: str) -> float:
        """Return the seconds of one GEMM, or of all three if ``gemm`` is None. Raises SnipError if they are missing."""
        if gemm is None:
            return self._of_gemms(linear, dict.fromkeys(Gemm, fmt))
        by_gemm = _of_linear(self.seconds, linear)
        if by_gemm is None:
            raise SnipError(f"{linear}: its predicted time is not known")
        if (seconds := by_gemm.get(gemm.value, {}).get(fmt)) is None:
            raise SnipError(f"{linear}: the times of {self.model} hold none in {fmt}")
        return seconds

    def _of_gemms(self, linear: str, formats: Mapping[Gemm, str]) -> float:
        return seconds_of(formats, functools.partial(self.of, linear), functools.partial(self.saved, linear))

    def saved(self, linear: str, gemm: Gemm, fmt: str) -> float:
        """Return the seconds that ``gemm``, of :data:`SHARING`, saves together with wgrad if both are in a format."""
        return (_of_linear(self.joint, linear) or {}).get(gemm.value, {}).get(fmt, 0.0)

    def by_stage(self, precision_map: PrecisionMap, stages: Mapping[str, int]) -> dict[int, tuple[float, float]]:
        """Return pipeline stage → seconds of its linears in bf16, and under a map. Raises SnipError as :meth:`of`.

        ``stages``: name of a linear → stage.
        """
        parts: dict[int, list[tuple[float, float]]] = {}
        for name, stage in stages.items():
            formats = {gemm: precision_map.format_of(name, gemm).value for gemm in Gemm}
            both = self.of(name, None, Format.BF16.value), self._of_gemms(name, formats)
            parts.setdefault(stage, []).append(both)
        return {k: (math.fsum(b for b, _ in pairs), math.fsum(a for _, a in pairs)) for k, pairs in parts.items()}

    def step_speedup(
        self,
        precision_map: PrecisionMap,
        stages: Mapping[str, int],
        bf16_s: float | None = None,
        ran: tuple[PrecisionMap, float] | None = None,
    ) -> float | None:
        """Return the predicted speedup of the whole step, or None if the rest of the step is not known."""
        seconds = self.step_seconds(precision_map, stages, bf16_s, ran)
        return None if seconds is None else seconds[0] / seconds[1]

    def step_seconds(
        self,
        precision_map: PrecisionMap,
        stages: Mapping[str, int],
        bf16_s: float | None = None,
        ran: tuple[PrecisionMap, float] | None = None,
    ) -> tuple[float, float] | None:
        """Return the seconds of a step in bf16 and under a map. None if the rest of the step is not known.

        Measured steps in bf16 may take longer than their GEMMs and the rest are predicted to. If Megatron's own code of
        experts runs in them (``stock``), the GPU waits there for its host, as it does not under a map: this excess is
        left out. Otherwise it is taken to be the same under the map.

        Args:
            bf16_s: measured seconds of a step in bf16, which are returned as they are.
            ran: a map that has run, and its measured seconds. The prediction starts from them, because steps under maps
                have the same host time. By default it starts from steps in bf16.
        """
        if not stages or not set(stages.values()) <= set(self.rest):
            return None
        times, stock = self.by_stage(precision_map, stages), dict.fromkeys(stages.values(), 0.0)
        for name, stage in stages.items():
            stock[stage] += self.stock.get(name) or self.stock.get(LinearId.parse(name).path, 0.0)
        before = self.bubble * max(self.rest[k] + stock[k] + bf16 for k, (bf16, _) in times.items())
        measured = before if bf16_s is None else bf16_s
        if {Format.BF16}.issuperset(precision_map.choices.values()):
            return measured, measured

        def under(linears: Mapping[int, tuple[float, float]]) -> float:
            return self.bubble * max(self.rest[k] + seconds for k, (_, seconds) in linears.items())

        after, base, base_s = under(times), before, min(before, measured) if any(stock.values()) else measured
        if ran is not None:
            base, base_s = under(self.by_stage(ran[0], stages)), ran[1]
        # A saving of more than the measured step would be an error of the prediction.
        return measured, base_s - (base - after) if base - after < base_s else after


def seconds_of[F](
    formats: Mapping[Gemm, F], seconds: Callable[[Gemm, F], float], saved: Callable[[Gemm, F], float]
) -> float:
    """Return the seconds of a linear's GEMMs: those of each alone, less what sharing a call with wgrad saves."""
    shared = (saved(gemm, formats[gemm]) for gemm in SHARING if formats[gemm] == formats[Gemm.WGRAD])
    return math.fsum(seconds(gemm, fmt) for gemm, fmt in formats.items()) - math.fsum(shared)


def _of_linear(seconds: Seconds, linear: str) -> Mapping[str, Mapping[str, float]] | None:
    return seconds.get(linear) or seconds.get(LinearId.parse(linear).path)
