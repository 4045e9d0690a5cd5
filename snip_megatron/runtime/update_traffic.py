"""The collectives of one update on one rank, from shapes alone. Plain Python, no torch.

``snip plan`` shows them. A test counts the collectives of real ranks and compares, so that a change of an update that
is not made here fails. The passes of an update run the collectives of a training step's microbatches, which are not
listed here.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from snip_megatron.precision import LinearRow
from snip_megatron.sensitivity.probe_memory import OUTPUT_TOKENS, LinearRows
from snip_megatron.sensitivity.table import SinkRow, array_shapes

_FLOAT32, _FLOAT64 = 4, 8
_DECISION = 24  # bytes of a length and of two bounds of a hash
_VOTE, _VOTES, _NOISE_VOTES = 16, 8, 8  # bytes of a vote, votes of an update, and of noise and weight divergence


@dataclass(frozen=True)
class Collectives:
    """Collectives of one part of an update.

    Attributes:
        part: What they exchange.
        group: ``world``, ``tensor``, ``data``, ``expert tensor``, ``expert data`` or ``embedding``, the pipeline stages
            that share a word embedding. Data parallel ranks include context parallel ones.
        count: Number of calls.
        bytes: Bytes that this rank contributes to them in all. An all-reduce sends about twice as many.
    """

    part: str
    group: str
    count: int
    bytes: int


@dataclass(frozen=True)
class RankShapes:
    """What one rank holds.

    Attributes:
        linears: The linears that all data parallel ranks share.
        experts: The linears of experts, one for each expert.
        sinks: Numbers of elements of the local shards of word embedding and norms.
        token_shards: Numbers of elements of those among the sinks whose gradients tensor parallel ranks add up, because
            each of them sees a part of the tokens.
        shared_embedding: Number of elements of a word embedding that other stages share. 0 if there is none.
    """

    linears: Sequence[LinearRows]
    experts: Sequence[LinearRows] = ()
    sinks: Sequence[int] = ()
    token_shards: Sequence[int] = ()
    shared_embedding: int = 0


def table_bytes(linears: Sequence[LinearRow], formats: Sequence[str], sinks: Sequence[SinkRow]) -> int:
    """Return the bytes of the statistics table of a model, which is equal on all ranks."""
    return _FLOAT64 * sum(math.prod(shape) for shape in array_shapes(linears, formats, sinks).values())


def update_collectives(
    shapes: RankShapes,
    ranks: Mapping[str, int],
    *,
    formats: int,
    table: int,
    decision: int,
    microbatches: int,
    weighs_updates: bool,
    candidates: int = 1,
    per_token_loss: bool = False,
    on_gpu: bool = True,
) -> list[Collectives]:
    """Return the collectives of an update outside of its passes, from its begin to the adoption of its map.

    Args:
        shapes: What the rank holds.
        ranks: Group → its size. Groups that are not there have one rank.
        formats: Number of measured formats.
        table: Bytes of the statistics table.
        decision: Bytes of rank 0's message: the pickled maps or plan.
        microbatches: Microbatches of a pass on this rank.
        weighs_updates: Whether the update runs the pass of forward noise and measures weight divergence.
        candidates: Number of maps that are measured, each in a forward of its own.
        per_token_loss: Whether the ranks count the tokens of the loss (``--calculate-per-token-loss``).
        on_gpu: Whether the memory of the ranks is compared first.
    """
    world, calls = ranks["world"], []
    if on_gpu:
        calls.append(Collectives("memory of all ranks", "world", 1, 5 * _FLOAT64 * world))
    if per_token_loss:
        calls.append(Collectives("tokens of the loss", "world", 1, _FLOAT64))
    for prefix, linears in (("", shapes.linears), ("expert ", shapes.experts)):
        if linears:
            calls += _of_linears(prefix, linears, formats, microbatches, weighs_updates=weighs_updates)
    if weighs_updates:
        calls.append(Collectives("gradients", "data", len(shapes.sinks), _FLOAT32 * sum(shapes.sinks)))
        shards = shapes.token_shards
        calls.append(Collectives("gradients", "tensor", len(shards), _FLOAT32 * sum(shards)))
        if shapes.shared_embedding:
            calls.append(Collectives("gradients", "embedding", 1, _FLOAT32 * shapes.shared_embedding))
    votes = _VOTES + (_NOISE_VOTES if weighs_updates else 0)
    calls.append(Collectives("votes", "world", votes, votes * _VOTE))
    tables = 3 if weighs_updates else 1
    calls.append(Collectives("statistics", "world", tables, tables * table))
    calls.append(Collectives("decision", "world", 3, decision + _DECISION))
    forwards = 1 + candidates
    calls.append(Collectives("votes about forwards", "world", forwards + 1, (forwards + 1) * _VOTE))
    calls.append(Collectives("measured rises", "world", 1, (1 + 2 * candidates) * _FLOAT64))
    return [call for call in calls if call.count and (call.group == "world" or ranks.get(call.group, 1) > 1)]


def _of_linears(
    prefix: str, linears: Sequence[LinearRows], formats: int, microbatches: int, *, weighs_updates: bool
) -> Iterator[Collectives]:
    dots = sum(_dots(linear.rows, formats) for linear in linears)
    yield Collectives("output errors", f"{prefix}tensor", 1, _FLOAT64 * microbatches * dots)
    if not weighs_updates:
        return
    if prefix:  # four sums for each expert
        for group in ("expert tensor", "expert data"):
            yield Collectives("sums of experts", group, 1, 4 * _FLOAT64 * len(linears))
    columns = sum(linear.n + linear.k for linear in linears)
    yield Collectives("column norms", f"{prefix}data", 1, _FLOAT64 * (1 + formats) * columns)
    elements = sum(linear.elements for linear in linears)
    yield Collectives("gradients", f"{prefix}data", len(linears), _FLOAT32 * elements)


def _dots(rows: int, formats: int) -> int:
    """Return the numbers that a linear records of a microbatch of ``rows`` tokens, for ``c2`` of the table."""
    of_every_token = rows if rows <= OUTPUT_TOKENS else (2 + formats) * rows
    return formats * min(rows, OUTPUT_TOKENS) + of_every_token
