"""One check of ``snip doctor``."""

import enum
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from snip_megatron.precision.errors import first_line


class Status(enum.Enum):
    """Result of a check. Only ``FAIL`` means that training under SNIP cannot run here."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the report: what was checked under which heading, what was found, and what to do about it."""

    room: str
    name: str
    status: Status
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can represent."""
        return asdict(self) | {"status": self.status.value}


def attempt(room: str, name: str, check: Callable[[], Check], advice: str) -> Check:
    """Return the result of ``check``, which fails with ``advice`` if it raises an error."""
    try:
        return check()
    except Exception as error:  # a package that is broken, or not supported, can raise anything
        return fail(room, name, first_line(error), advice)


def ok(room: str, name: str, found: str) -> Check:
    return Check(room, name, Status.OK, found)


def note(room: str, name: str, found: str, advice: str = "") -> Check:
    """Return a check of something optional that is missing, or that is slower than it could be."""
    return Check(room, name, Status.NOTE, found, advice)


def fail(room: str, name: str, found: str, advice: str) -> Check:
    """Return a check of something that training needs and that is missing or wrong."""
    return Check(room, name, Status.FAIL, found, advice)
