"""What a kind of fault is: how it is drawn, injected, and what has to come of it.

A kind of group ``update`` hits one update (or one step near it) of a training that goes on; one of group ``restart``
ends the job, which is started again on its checkpoint; one of group ``launcher`` is a job's under torchrun itself.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from faults.injection import Rank


class Lost(AssertionError):
    """The fault cost the training something."""


class Kind:
    """One kind. Subclasses say what differs.

    Attributes:
        weight: its share of a campaign. spread: how many steps after an update it may hit; 0: the update itself.
        reasons: of ``solve_failed`` events that may follow; "solved": the map may also arrive all the same.
    """

    name: ClassVar[str]
    group: ClassVar[str] = "update"
    weight: ClassVar[float] = 9
    spread: ClassVar[int] = 0
    needs_wandb: ClassVar[bool] = False
    reasons: ClassVar[tuple[str, ...]] = ("solved",)

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        """The figures of one fault, JSON-ready."""
        return {}

    def install(self, rank: Rank, fault: Any) -> None:
        """Before the training starts, on every rank."""

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        """Before each step of the fault's window, on every rank."""

    def outcome(self, events: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
        """What came of it, by the events of its window. Raises Lost."""
        failed = [event for event in events if event["event"] == "solve_failed"]
        adopted = [event for event in events if event["event"] == "adopt"]
        if failed:
            reason = failed[0]["reason"]
            if reason not in self.reasons or adopted:
                raise Lost(f"unexpected: {reason}: {failed[0]['message']}")
            return f"update dropped ({reason}), map kept"
        if "solved" not in self.reasons or not adopted:
            raise Lost(f"events {[event['event'] for event in events]}")
        return "update adopted in time"
