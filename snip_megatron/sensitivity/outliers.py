"""GEMMs that formats harm more than their peers, from the relative errors of all GEMMs of a model. Without torch.

The error of a GEMM is that of its result on the inputs of a bf16 pass: of an 8-bit format .01 to .04, of a 4-bit one
.03 to .2. It is compared with that of GEMMs of the same kind and as many bits, and with a limit. A format that few
GEMMs have is compared with those of the others: one linear in four bits of a run in eight is to blame.
"""

import math
from collections.abc import Mapping, Sequence

from snip_megatron.precision import LinearId

LIMIT = {4: 0.5, 8: 0.15}  # Bits → relative error of a GEMM's result above which it is harmed, whatever its peers have

RATIO = 1.6
"""A GEMM is harmed if its error is this many times that of the worst fifth of its peers. In 19 healthy steps of a small
Llama, in uniform and mixed maps, the largest ratio was 1.3 (two formats of unequal bits apart), and in 20 steps with
one harmed GEMM the least was 2.2. The same linear in the other layers is compared with as well: where products cancel,
all its weight gradients have larger errors (at 1.1B, .019 in the first layer and .057 in the last, all healthy)."""

RARE = 1 / 8  # share of the GEMMs of a kind below which those with as many bits are no peers of each other

HEALTHY = {4: 0.2, 8: 0.045}
"""Bits → relative error of a GEMM's result that is healthy whatever its peers have. Two independent operands in E4M3
give .037; in 31 healthy steps of small models no error was above .036 in 8 bits."""

INDEPENDENT = 1.3
"""An error is healthy up to this many times what independent errors of its peers' operands give. With gradients in E5M2
that is .059, and .074 the largest in 42 healthy steps of delayed scaling. Peers whose products add up have less: .014.
Where products cancel, the result is smaller than its errors: they are as many times larger as the result is smaller."""

OPERAND_RATIO = 2.5
"""A GEMM is harmed if its operands' squared errors are this many times the median of its peers in 8 bits. They are 1.07
at most in 10 healthy steps in 8 bits, 3.4 if one of both operands loses a bit of its mantissa, and about 15 in 4 bits.
Errors of results show less: where many products add up, a GEMM in 4 bits has no more than others in 8."""

Key = tuple[str, str]


def outliers(
    errors: Mapping[Key, float],
    bits: Mapping[Key, int],
    operands: Mapping[Key, float] | None = None,
    cancellation: Mapping[Key, float] | None = None,
) -> dict[Key, float]:
    """Return the GEMMs that are harmed more than is healthy → their squared error over the largest healthy one.

    Args:
        errors: (linear, GEMM) → relative error, of quantised GEMMs. It may be infinite.
        bits: (linear, GEMM) → bits of its format, 4 or 8.
        operands: (linear, GEMM) → relative squared error of its operands. None if it is not known.
        cancellation: (linear, GEMM) → squared norm that its result would have if its products were independent, over
            that of the result. None if it is not known.
    """
    harmed, paths = {}, {key: LinearId.parse(key[0]).path for key in errors}
    for key, error in errors.items():
        peers = _peers(errors, bits, key)
        of_peers = sorted(operands[other] for other in peers if bits[other] == 8) if operands is not None else []
        usual = of_peers[len(of_peers) // 2] if len(of_peers) >= 3 else None
        limit = _limit(errors, bits, peers)
        layers = [other for other in peers if paths[other] == paths[key] and errors[other] < math.inf]
        if len(layers) >= 3:
            limit = max(limit, _limit(errors, bits, layers))
        independent = (usual or 0.0) * max(1.0, cancellation[key] if cancellation is not None else 1.0)
        limit = min(LIMIT[bits[key]], max(limit, INDEPENDENT * math.sqrt(independent)))
        if not error <= limit:
            harmed[key] = min((error / limit) ** 2, 1e6) if error == error else 1e6
        elif operands is not None and usual is not None and operands[key] > OPERAND_RATIO * usual:
            harmed[key] = operands[key] / (OPERAND_RATIO * usual)
    return harmed


def worst_part(errors: Mapping[tuple[int | None, int | None], float]) -> tuple[int | None, int | None]:
    """Return the expert and the tensor parallel rank that alone have the error of a GEMM. None if others have it too.

    Args:
        errors: (expert, rank) → relative squared error of that part.
    """
    experts = {expert: max(e for (other, _), e in errors.items() if other == expert) for expert, _ in errors}
    expert = _alone(experts)
    shards = {rank: e for (other, rank), e in errors.items() if other == expert} if expert is not None else {}
    shards = shards or {rank: max(e for (_, other), e in errors.items() if other == rank) for _, rank in errors}
    return expert, _alone(shards)


def _alone(errors: Mapping[int | None, float]) -> int | None:
    """Return the one whose error is above that of every other as an outlier's is. None if there is none."""
    ranked = sorted(errors, key=lambda part: -errors[part] if errors[part] == errors[part] else -math.inf)
    if len(ranked) < 2 or not errors[ranked[1]] * RATIO**2 < errors[ranked[0]]:
        return None
    return ranked[0]


def _peers(errors: Mapping[Key, float], bits: Mapping[Key, int], key: Key) -> list[Key]:
    """Return the GEMMs of the same kind with as many bits. Those with other bits if the format of ``key`` is rare."""
    same_kind = [other for other in errors if other[1] == key[1] and other != key]
    peers = [other for other in same_kind if bits[other] == bits[key]]
    return peers if len(peers) + 1 > RARE * (len(same_kind) + 1) else [o for o in same_kind if bits[o] != bits[key]]


def _limit(errors: Mapping[Key, float], bits: Mapping[Key, int], peers: Sequence[Key]) -> float:
    """Return the largest error that is healthy beside those of the peers."""
    finite = sorted(errors[peer] for peer in peers if errors[peer] < math.inf)
    if len(finite) < 3:
        return math.inf
    return max(RATIO * finite[int(0.8 * len(finite))], HEALTHY[max(bits[peer] for peer in peers)])
