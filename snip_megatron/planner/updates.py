"""What an update of SNIP costs: its passes, and from shapes alone the collectives and files beside them.

A test counts the collectives of real ranks and compares, so that a change of an update that is not made here fails. The
passes run the collectives of a training step's microbatches, which are not listed.
"""

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import probe_microbatches
from snip_megatron.planner.models import Model
from snip_megatron.planner.step_time import Links, StepTime
from snip_megatron.precision import PrecisionMap, Role
from snip_megatron.precision.errors import cut
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.sensitivity.policies import UNSOLVED, needs_forward_noise
from snip_megatron.sensitivity.probe_memory import OUTPUT_TOKENS
from snip_megatron.sensitivity.table import SinkRow, array_shapes
from snip_megatron.timing.cost_model import LinearShape

_FLOAT32, _FLOAT64 = 4, 8
_DECISION = 24  # bytes of a length and of two bounds of a hash
_VOTE, _VOTES, _NOISE_VOTES = 16, 8, 8  # bytes of a vote, votes of an update, and of noise and weight divergence
_FILES = 4  # that rank 0 writes for an update: statistics, problem, scores, map; with phases a plan too
_MOST_RANKS = 16_384  # for which an update is planned, unless the layout has more


def probe_passes(layout: Layout, config: SnipConfig) -> dict[str, int]:
    """Return kind of ``probe`` event → microbatches that a rank runs for it, each in one call of the schedule."""
    if not config.updates:
        return {}
    kinds = ["statistics", *(["forward_noise"] if needs_forward_noise(config.request()) else [])]
    return dict.fromkeys(kinds, probe_microbatches(layout, config))


def update_cost(layout: Layout, config: SnipConfig, links: Links, steps: Mapping[str, StepTime]) -> dict[str, Any]:
    """Predict the time of an update.

    ``passes`` are the calls of the pipeline schedule, ``microbatches`` those that a rank runs in them, ``by_kind`` of
    ``probe`` event. The duration is given in bf16 ``steps`` and in ``seconds``, of which the reduction of the probe's
    gradients over data parallel ranks takes ``reducing_seconds``. ``share`` is the share of training time. ``fixed``
    says why there are no updates.
    """
    by_kind, bubble = probe_passes(layout, config), (layout.pp - 1) / layout.vpp
    passing = sum(count + bubble for count in by_kind.values()) / layout.microbatches * steps["bf16"].slowest
    parameters = max(layout.probed_parameters(stage) for stage in range(layout.pp))
    reduced = _FLOAT32 * parameters if layout.dp > 1 and "forward_noise" in by_kind else 0
    reducing = 2.0 * (layout.dp - 1) / layout.dp * reduced / links.of(layout.tp * layout.dp)
    seconds = passing + reducing
    return {
        "passes": len(by_kind),
        "microbatches": sum(by_kind.values()),
        "by_kind": by_kind,
        "steps": seconds / steps["bf16"].total,
        "seconds": seconds,
        "reducing_seconds": reducing,
        "share": seconds / (seconds + config.update_interval * steps["map"].total) if by_kind else 0.0,
        "fixed": _fixed_map(config),
    }


def _fixed_map(config: SnipConfig) -> str:
    """Return the map of a training that solves for none; an empty text if it solves."""
    if config.updates:
        return ""
    sources = {"map": config.map, "replay": config.replay}
    sources["policy"] = config.policy if config.policy in UNSOLVED else None
    source = next((f"{name} {cut(value)}" for name, value in sources.items() if value is not None), None)
    return "no updates: SNIP quantises no linear" if source is None else f"{source}: its map is fixed"


def update_scale(layout: Layout, config: SnipConfig, precision_map: PrecisionMap) -> dict[str, Any]:
    """Return what an update exchanges, of the rank that exchanges most, and what rank 0 keeps.

    ``collectives`` are those of this layout, in its order. ``ranks`` has the number of collectives and bytes in each
    group for this number of ranks, and twice, four times, … as many data parallel ones, up to 16,384. ``table_bytes``
    are those of the statistics table, and ``decision_bytes`` those of the pickled maps, such as ``precision_map``, of
    which one is adopted. ``forwards`` is the largest number of forwards that measure them. ``files`` is the number of
    whole files that rank 0 writes for an update, where it also appends to two.
    """
    if not config.updates:
        return {"collectives": [], "ranks": []}
    decision = _candidates(config) * len(pickle.dumps(precision_map))

    def collectives(dp: int) -> list[Collectives]:
        of_stages = (update_collectives(layout, stage, config, decision, dp) for stage in range(layout.pp))
        return max(of_stages, key=lambda calls: sum(call.bytes for call in calls))

    rows: list[dict[str, Any]] = []
    dp, copy = layout.dp, layout.ranks // layout.dp
    while not rows or copy * dp <= _MOST_RANKS:
        groups: dict[str, list[int]] = {}
        for call in collectives(dp):
            count, size = groups.get(call.group, (0, 0))
            groups[call.group] = [count + call.count, size + call.bytes]
        rows.append({"ranks": copy * dp, "dp": dp, "groups": groups})
        dp *= 2
    return {
        "table_bytes": _table_bytes(layout.model, config),
        "decision_bytes": decision,
        "files": _FILES + (config.phases is not None),
        "forwards": 1 + _candidates(config),
        "collectives": [asdict(call) for call in collectives(layout.dp)],
        "ranks": rows,
    }


def _candidates(config: SnipConfig) -> int:
    """Return the number of maps that an update measures, each in a forward of its own."""
    return 2 if needs_forward_noise(config.request()) and config.q == "split" and config.phases is None else 1


def _table_bytes(model: Model, config: SnipConfig) -> int:
    """Return the bytes of the statistics table of a model, which is equal on all ranks."""
    shapes = array_shapes(model.rows, config.measured_formats, sinks_of(model))
    return _FLOAT64 * sum(math.prod(shape) for shape in shapes.values())


def sinks_of(model: Model) -> list[SinkRow]:
    """Return the word embedding and the norms of a model, as a training names them."""
    norms = {row.sub_block for row in model.rows if row.role is Role.READS}
    return [SinkRow("", 0, model.hidden)] * (len(norms) + 2)


# -- the collectives of a rank -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Collectives:
    """Collectives of one part of an update."""

    part: str  # what they exchange
    # ``world``, ``tensor``, ``data``, ``expert tensor``, ``expert data`` or ``embedding``, the pipeline stages that
    # share a word embedding. Data parallel ranks include context parallel ones
    group: str
    count: int  # number of calls
    bytes: int  # bytes that a rank contributes to them in all. An all-reduce sends about twice as many


def update_collectives(
    layout: Layout, stage: int, config: SnipConfig, decision: int, dp: int | None = None
) -> list[Collectives]:
    """Return the collectives of a rank of ``stage`` outside of passes, from an update's begin to its map's adoption.

    ``decision`` are the bytes of rank 0's message, the pickled maps or plan. ``dp`` replaces the layout's number of
    data parallel ranks.
    """
    ranks, hidden, noise = _groups(layout, dp or layout.dp), layout.model.hidden, needs_forward_noise(config.request())
    rows = [row for layer in layout.stages[stage] for row in layer]
    calls = [Collectives("memory of all ranks", "world", 1, 5 * _FLOAT64 * ranks["world"])]
    for prefix in ("", "expert "):
        of_prefix = [row for row in rows if (row.experts > 1) == bool(prefix)]
        linears = [(layout.shapes[row.name], layout.matrices(row)) for row in of_prefix]
        calls += _of_linears(prefix, linears, len(config.measured_formats), probe_microbatches(layout, config), noise)
    if noise:  # the gradients of norms and word embedding
        norms = len({row.sub_block for row in rows if row.role is Role.READS}) + (stage == layout.pp - 1)
        embedding = layout.vocabulary * hidden // layout.tp
        calls += [
            Collectives(
                "gradients", "data", norms + (stage == 0), _FLOAT32 * (norms * hidden + (stage == 0) * embedding)
            ),
            Collectives("gradients", "tensor", norms * layout.sequence_parallel, _FLOAT32 * norms * hidden),
            Collectives("gradients", "embedding", int(stage in (0, layout.pp - 1)), _FLOAT32 * embedding),
        ]
    votes, tables, maps = _VOTES + _NOISE_VOTES * noise, 3 if noise else 1, _candidates(config)
    calls += [
        Collectives("votes", "world", votes, votes * _VOTE),
        Collectives("statistics", "world", tables, tables * _table_bytes(layout.model, config)),
        Collectives("decision", "world", 3, decision + _DECISION),
        Collectives("votes about forwards", "world", maps + 2, (maps + 2) * _VOTE),
        Collectives("measured rises", "world", 1, (1 + 2 * maps) * _FLOAT64),
    ]
    return [call for call in calls if call.count and (call.group == "world" or ranks[call.group] > 1)]


def _groups(layout: Layout, dp: int) -> dict[str, int]:
    """Return group → its number of ranks."""
    etp = layout.etp or layout.tp
    return {
        "world": layout.tp * layout.cp * layout.pp * dp,
        "tensor": layout.tp,
        "data": layout.cp * dp,
        "expert tensor": etp,
        "expert data": layout.tp * layout.cp * dp // (etp * layout.ep),
        "embedding": 2 if layout.model.tied and layout.pp > 1 else 1,
    }


def _of_linears(
    prefix: str, linears: Sequence[tuple[LinearShape, int]], formats: int, microbatches: int, noise: bool
) -> Iterator[Collectives]:
    """Yield the collectives of ``linears``, a shape and its number of matrices each."""
    matrices = sum(count for _, count in linears)
    dots = sum(count * _dots(shape.tokens, formats) for shape, count in linears)
    yield Collectives("output errors", f"{prefix}tensor", min(1, matrices), _FLOAT64 * microbatches * dots)
    if not noise or not matrices:
        return
    if prefix:  # four sums for each expert
        for group in ("expert tensor", "expert data"):
            yield Collectives("sums of experts", group, 1, 4 * _FLOAT64 * matrices)
    columns = sum(count * (shape.n + shape.k) for shape, count in linears)
    yield Collectives("column norms", f"{prefix}data", 1, _FLOAT64 * (1 + formats) * columns)
    elements = sum(count * shape.n * shape.k for shape, count in linears)
    yield Collectives("gradients", f"{prefix}data", matrices, _FLOAT32 * elements)


def _dots(rows: int, formats: int) -> int:
    """Return the numbers that a linear records of a microbatch of ``rows`` tokens, for ``c2`` of the table."""
    of_every_token = rows if rows <= OUTPUT_TOKENS else (2 + formats) * rows
    return formats * min(rows, OUTPUT_TOKENS) + of_every_token
