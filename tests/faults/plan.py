"""What is injected where: a campaign's faults, drawn from one seed and packed into trainings."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faults.kind import Kind
from faults.kinds import KINDS

FIRST_UPDATE, INTERVAL, LAG = 2, 5, 2
SAVE_INTERVAL = 5
LAYOUTS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ()),
    (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    (2, ("--pipeline-model-parallel-size", "2")),
    (2, ("--use-distributed-optimizer",)),
)
_PER_BATCH = {"update": 9, "restart": 5, "launcher": 1}


@dataclass(frozen=True)
class Fault:
    """One injection: its number in the campaign, its kind, the training step it hits, and the kind's own draw."""

    number: int
    kind: str
    step: int
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Batch:
    """Faults that share a training. ``group`` says how it is run; ``layout`` are Megatron's arguments."""

    index: int
    group: str
    world: int
    layout: tuple[str, ...]
    steps: int
    faults: tuple[Fault, ...]


def window(step: int) -> range:
    """The steps from the update at or before ``step`` to the next one."""
    first = step - (step - FIRST_UPDATE) % INTERVAL
    return range(first, first + INTERVAL)


def make_plan(count: int, seed: int, kinds: Sequence[str] = ()) -> list[Batch]:
    """``count`` faults over ``kinds`` (all), in proportion to their weights; the same for the same arguments."""
    rng = random.Random(f"{seed}/{count}/{','.join(kinds)}")
    chosen = [KINDS[name] for name in kinds] if kinds else list(KINDS.values())
    names = _allot(chosen, count)
    batches: list[Batch] = []
    number = 0
    for group, size in _PER_BATCH.items():
        own = [name for name in names if KINDS[name].group == group]
        rng.shuffle(own)
        own.sort(key=lambda name: KINDS[name].needs_wandb)  # few trainings open a wandb run
        for start in range(0, len(own), size):
            two = group == "launcher" or start // size % 3 == 2  # one rank is cheaper: every third has two
            world, layout = rng.choice(LAYOUTS[1:]) if two else LAYOUTS[0]
            members = own[start : start + size]
            faults = tuple(_draw(rng, KINDS[name], number + i, i, world) for i, name in enumerate(members))
            steps = _steps(group, len(members))
            batches.append(Batch(len(batches), group, world, layout, steps, faults))
            number += len(members)
    return batches


def _allot(kinds: Sequence[Kind], count: int) -> list[str]:
    total = sum(kind.weight for kind in kinds)
    shares = {kind.name: count * kind.weight / total for kind in kinds}
    counts = {name: int(share) for name, share in shares.items()}
    for name in sorted(shares, key=lambda name: counts[name] - shares[name])[: count - sum(counts.values())]:
        counts[name] += 1
    return [name for name, times in counts.items() for _ in range(times)]


def _draw(rng: random.Random, kind: Kind, number: int, place: int, world: int) -> Fault:
    if kind.group == "update":  # one update each, the fault somewhere in its steps
        update = FIRST_UPDATE + place * INTERVAL
        step = update + rng.randrange(kind.spread) if kind.spread else update
    else:  # after two checkpoints, then one interval each
        step = 2 * SAVE_INTERVAL + 2 + place * SAVE_INTERVAL + rng.randrange(SAVE_INTERVAL - 2)
    return Fault(number, kind.name, step, kind.draw(rng, world))


def _steps(group: str, faults: int) -> int:
    """So many that an undisturbed update and checkpoint follow the last fault."""
    if group == "update":
        return FIRST_UPDATE + (faults + 1) * INTERVAL + 1
    return (faults + 4) * SAVE_INTERVAL + 1
