"""What a run asks of its maps, which a resumed run may change: the budget and the schedule."""

from __future__ import annotations

from dataclasses import dataclass

from snip_megatron.config import SnipConfig
from snip_megatron.errors import cut


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

    def difference(self, before: Goal) -> str:
        """Return the arguments of ``before`` that are others here; an empty text without any."""
        budget = f"--snip-budget {cut(before.budget)}" if before.budget != self.budget else ""
        schedule = "another --snip-schedule" if before.schedule != self.schedule else ""
        return " and ".join(filter(None, (budget, schedule)))
