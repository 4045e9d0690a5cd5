"""Arguments of Megatron that cannot be combined with SNIP, and why. One entry refuses one argument."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Conflict:
    """One argument of Megatron that SNIP refuses.

    Attributes:
        why: The reason and what to do, printed after "cannot be combined with --snip: ".
        present: Returns whether a value of the attribute conflicts with SNIP.
        dest: Name in Megatron's parsed arguments, where it is not that of the argument.
        derived: Whether Megatron computes the attribute from the argument. Its value is then not printed.
    """

    argument: str
    why: str
    present: Callable[[Any], bool] = bool
    dest: str = ""
    derived: bool = False

    @property
    def attribute(self) -> str:
        """Name in Megatron's parsed arguments."""
        return self.dest or self.argument.removeprefix("--").replace("-", "_")


def _more_than_one(value: Any) -> bool:
    return value is not None and int(value) > 1


_OWN_PRECISION = "SNIP chooses the precision of the linears itself; leave it out"

CONFLICTS: tuple[Conflict, ...] = (
    Conflict("--te-precision-config-file", _OWN_PRECISION),
    Conflict("--kitchen-config-file", _OWN_PRECISION),
    Conflict("--use-kitchen", _OWN_PRECISION),
    Conflict(
        "--optimizer-cuda-graph",
        "a captured optimizer step would not see the gradient buffers as probes leave them; leave it out",
    ),
    Conflict(
        "--tensor-parallel-num-weight-shards",
        "quantised linears hold their whole shard of the weight; leave it out",
        _more_than_one,
        dest="gtp_weight_remat_size",
        derived=True,
    ),
    Conflict("--mlp-chunks-for-training", "statistics would count each chunk as a microbatch; use 1", _more_than_one),
    Conflict(
        "--overlap-dispatch-backward-with-experts-wgrad",
        "quantised wgrad of experts runs in the backward of its linear; leave it out",
    ),
    Conflict("--moe-single-grouped-weight", "quantised experts have one weight each; leave it out"),
    Conflict(
        "--non-persistent-ckpt-type",
        "SNIP cannot tell whether such a checkpoint holds its state; use global",
        lambda value: bool(value == "local"),
    ),
)
