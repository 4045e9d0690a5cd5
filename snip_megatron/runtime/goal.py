"""What a run asks of its maps, which a resumed run may change: the budget and the schedule."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError, cut


@dataclass(frozen=True)
class Goal:
    """What a run asks of its maps.

    Attributes:
        budget: kind and value of ``--snip-budget``.
        schedule: the text of the phases; ``static`` without phases.
    """

    budget: str
    schedule: str

    @classmethod
    def of(cls, config: SnipConfig) -> Goal:
        """Return the goal of a configuration. It does not depend on how the arguments are spelled."""
        phases = config.phases
        return cls(str(config.wanted), "static" if phases is None else phases.to_json())

    def as_dict(self) -> dict[str, str]:
        """Return the goal as JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, body: Any, where: str) -> Goal:
        """Parse the output of :meth:`as_dict`. Raises SnipError naming ``where`` if it is invalid."""
        budget, schedule = (body.get("budget"), body.get("schedule")) if isinstance(body, dict) else (None, None)
        if not isinstance(budget, str) or not isinstance(schedule, str):
            raise SnipError(f"{where}: goal: must hold the texts budget and schedule")
        return cls(budget, schedule)

    def difference(self, before: Goal) -> str:
        """Return the arguments of ``before`` that are others here; an empty text without any."""
        budget = f"--snip-budget {cut(before.budget)}" if before.budget != self.budget else ""
        schedule = "another --snip-schedule" if before.schedule != self.schedule else ""
        return " and ".join(filter(None, (budget, schedule)))
