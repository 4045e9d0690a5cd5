"""One line of the doctor's report."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class Status(enum.Enum):
    """How a check ended. Only ``FAIL`` means that training under SNIP will not run here."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """What was looked at, how it is, and what to do about it.

    ``room`` groups the lines of the report; ``advice`` is empty where nothing needs doing.
    """

    room: str
    name: str
    status: Status
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return asdict(self) | {"status": self.status.value}


def ok(room: str, name: str, found: str) -> Check:
    """A check that passed."""
    return Check(room, name, Status.OK, found)


def note(room: str, name: str, found: str, advice: str = "") -> Check:
    """Something optional that is missing, or slower than it could be."""
    return Check(room, name, Status.NOTE, found, advice)


def fail(room: str, name: str, found: str, advice: str) -> Check:
    """Something that training needs."""
    return Check(room, name, Status.FAIL, found, advice)
