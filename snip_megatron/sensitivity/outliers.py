"""GEMMs that formats harm more than their peers, from the relative errors of all GEMMs of a model. Without torch.

The error of a GEMM is that of its result on the inputs of a bf16 pass: of an 8-bit format .02 to .04, of a 4-bit one
.05 to .2. It is compared with that of GEMMs of the same kind and as many bits, and with a limit. A format that few
GEMMs have is compared with those of the others: one linear in four bits of a run in eight is to blame.
"""

import math
import statistics
from collections.abc import Mapping

LIMIT = {4: 0.5, 8: 0.15}
"""Bits → relative error of a GEMM's result above which it is harmed, whatever its peers have."""

RATIO = 1.7
"""A GEMM is harmed if its error is this many times the median of its peers', or SPREAD deviations (of the logarithm,
by the median deviation) above it if that is more. Uniform and mixed maps of 8 bits have ratios up to 1.5."""

SPREAD = 5.0

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
    known = [math.log(errors[other]) for other in peers if 0.0 < errors[other] < math.inf and other != key]
    if len(known) < 3:
        return math.inf
    middle = statistics.median(known)
    deviation = 1.4826 * statistics.median(abs(each - middle) for each in known)
    return math.exp(middle + max(math.log(RATIO), SPREAD * deviation))
