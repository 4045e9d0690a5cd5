"""What a map, or a run's maps on average, must reach: a share of FP4, a speedup or a loss. Written ``KIND=VALUE``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from snip_megatron.precision.errors import SnipError, cut, located, quoted

MAX_SPEEDUP = 1e6
MAX_LOSS = 1e100
_SYNTAX = "expected fp4=SHARE, speedup=FACTOR or loss=NATS, for example fp4=0.75"
_RANGES = {
    "fp4": (0.0, 1.0, "the share must be a number between 0 and 1"),
    "speedup": (1.0, MAX_SPEEDUP, f"must be a factor from 1 to {MAX_SPEEDUP:g}"),
    "loss": (-MAX_LOSS, MAX_LOSS, f"must be a number of nats of at most {MAX_LOSS:g}"),
}


@dataclass(frozen=True)
class Budget:
    """A budget. Raises SnipError if the kind is unknown or the value out of its range.

    Attributes:
        kind: ``fp4``, ``speedup`` or ``loss``.
        value: the share of FP4 in [0, 1]; the predicted speedup over bf16, 1 or more; or the rise of the loss in nats,
            negative only where a problem's losses are.
    """

    kind: str
    value: float

    def __post_init__(self) -> None:
        if self.kind not in _RANGES:
            raise SnipError(_SYNTAX)
        least, most, fault = _RANGES[self.kind]
        if not least <= self.value <= most:
            raise SnipError(fault)

    @classmethod
    def parse(cls, text: object, where: str) -> Budget:
        """Parse ``KIND=VALUE``, the one place where this is done.

        Raises SnipError for anything else, naming ``where``, the argument or the JSON path of the text.
        """
        if not isinstance(text, str):
            raise SnipError(f"{where} {quoted(text)}: {_SYNTAX}")
        kind, _, figure = text.partition("=")
        try:
            value = float(figure)
        except ValueError:
            value = math.nan  # out of every range
        with located(f"{where} {cut(text)}"):
            return cls(kind, value)

    @property
    def timed(self) -> bool:
        """Whether the budget is one of predicted time or loss, rather than a share of FLOPs."""
        return self.kind != "fp4"

    def __str__(self) -> str:
        return f"{self.kind}={repr(float(self.value)).removesuffix('.0')}"
