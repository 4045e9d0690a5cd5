"""GEMMs that formats harm more than their peers, from the relative errors of all GEMMs of a model. Without torch.

The error of a GEMM is that of its result on the inputs of a bf16 pass: of an 8-bit format .01 to .04, of a 4-bit one
.03 to .2. It is compared with that of GEMMs of the same kind and as many bits, and with a limit. A format that few
GEMMs have is compared with those of the others: one linear in four bits of a run in eight is to blame.
"""

import math
from collections.abc import Mapping

LIMIT = {4: 0.5, 8: 0.15}
"""Bits → relative error of a GEMM's result above which it is harmed, whatever its peers have."""

RATIO = 1.6
"""A GEMM is harmed if its error is this many times that of the worst fifth of its peers. In 19 healthy steps of a small
Llama, in uniform and mixed maps, the largest ratio was 1.3 (two formats of unequal bits apart), and in 20 steps with
one harmed GEMM the least was 2.2."""

RARE = 1 / 8
"""Share of the GEMMs of a kind below which those with as many bits are no peers of each other."""

Key = tuple[str, str]


def outliers(errors: Mapping[Key, float], bits: Mapping[Key, int]) -> dict[Key, float]:
    """Return the GEMMs that are harmed more than is healthy → their squared error over the largest healthy one.

    Args:
        errors: (linear, GEMM) → relative error, of quantised GEMMs. It may be infinite.
        bits: (linear, GEMM) → bits of its format, 4 or 8.
    """
    found = {}
    for key, error in errors.items():
        limit = min(LIMIT[bits[key]], _limit(errors, bits, key))
        if not error <= limit:
            found[key] = min((error / limit) ** 2, 1e6) if error == error else 1e6
    return found


def _limit(errors: Mapping[Key, float], bits: Mapping[Key, int], key: Key) -> float:
    """Return the largest error that is healthy beside those of the peers."""
    kind = [other for other in errors if other[1] == key[1]]
    peers = [other for other in kind if bits[other] == bits[key]]
    if len(peers) <= RARE * len(kind):
        peers = [other for other in kind if bits[other] != bits[key]]
    known = sorted(errors[other] for other in peers if errors[other] < math.inf and other != key)
    return RATIO * known[int(0.8 * len(known))] if len(known) >= 3 else math.inf
