"""How long and how a search may run, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from snip_megatron.solver.table import Ints


@dataclass(frozen=True)
class Limits:
    """How long and how CP-SAT may search. Equal limits without ``seconds`` running out give equal results.

    Attributes:
        seconds: wall time. deterministic: CP-SAT's deterministic time; both may be inf.
        seed: of the search. workers: subsolvers, interleaved on one schedule when more than one.
    """

    seconds: float
    deterministic: float
    seed: int
    workers: int = 1


@dataclass(frozen=True)
class Outcome:
    """Picks [n] that meet every need, a lower bound of Σ loss (as given), whether CP-SAT proved the picks optimal, and
    the deterministic seconds it took."""

    pick: Ints
    bound: float
    optimal: bool
    deterministic: float
