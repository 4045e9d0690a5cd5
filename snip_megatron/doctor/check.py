"""One check of ``snip doctor``."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class Status(enum.Enum):
    """Result of a check. Only ``FAIL`` means that training under SNIP cannot run here."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        room: Heading under which the line is printed.
        name: What was checked.
        status: Result of the check.
        found: What was found.
        advice: What to do about it, or an empty string.
    """

    room: str
    name: str
    status: Status
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can represent."""
        return asdict(self) | {"status": self.status.value}


def ok(room: str, name: str, found: str) -> Check:
    """Return a check that passed."""
    return Check(room, name, Status.OK, found)


def note(room: str, name: str, found: str, advice: str = "") -> Check:
    """Return a check of something optional that is missing, or that is slower than it could be."""
    return Check(room, name, Status.NOTE, found, advice)


def fail(room: str, name: str, found: str, advice: str) -> Check:
    """Return a check of something that training needs and that is missing or wrong."""
    return Check(room, name, Status.FAIL, found, advice)
