"""Whether the rises of the loss by single fprops add up, and whether a term for pairs in a block improves the choice.

    python -m benchmarks.quality.additivity --data data/probed --out F.json [--model 26m] [--steps 600] [--updates 3]

Trains the model on that text. At each update, *sets* of fprops are forced into fp4 while all other GEMMs run in bf16:
single ones, pairs in a block and in two blocks, whole blocks, all linears of a kind, random halves, and all. The rise
of a set is the change of the mean loss less its first-order part, whose mean over batches is zero, on two disjoint
halves of a batch. The first half is fitted:

- *additive*: a · Σ p, where p is what SNIP predicts of a single fprop;
- *pairs*: a · Σ p + b · Σ √(p p') over the pairs in a block.

Each of the two then chooses the fprops of half the FLOPs that harm least by it. These two sets are forced on both
halves. The term is worth having if its set rises less on the second half.

The result is written after every update. On a machine without a GPU ``--model nano --steps 40`` shows the output.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.common import header, write
from benchmarks.quality.probe_sequences import arguments_of, megatron_arguments, prepared
from snip_megatron.precision import Format, Gemm, LinearId

Names = tuple[str, ...]
FITTED = ("block", "kind", "random", "all")
"""Kinds of sets that decide about the terms: whole maps and parts of them."""


@dataclass
class Set:
    """A set of linears whose fprops are forced; ``rise`` on each part of the batch in nats."""

    kind: str
    names: Names
    rise: tuple[float, ...] = ()


def sets_of(names: Sequence[str], seed: int) -> list[Set]:
    """Return the sets to force."""
    draw = random.Random(seed)
    inner, outer = [], []
    for pair in itertools.combinations(names, 2):
        (inner if _block(pair[0]) == _block(pair[1]) else outer).append(pair)
    sets = [Set("single", (name,)) for name in names]
    sets += [Set("pair in a block", pair) for pair in inner]
    sets += [Set("pair of two blocks", pair) for pair in draw.sample(outer, min(len(inner), len(outer)))]
    sets += [Set("block", tuple(members)) for members in _groups(names, _block)]
    sets += [Set("kind", tuple(members)) for members in _groups(names, lambda name: LinearId.parse(name).path)]
    sets += [Set("random", tuple(draw.sample(names, len(names) // 2))) for _ in range(12)]
    return [*sets, Set("all", tuple(names))]


def _block(name: str) -> int:
    return LinearId.parse(name).layer


def _groups(names: Sequence[str], key: Callable[[str], Any]) -> list[list[str]]:
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return list(groups.values())


class Model:
    """A rise of the loss by terms: ``factors`` of the sum and of the pairs in a block."""

    def __init__(self, predicted: Mapping[str, float], factors: Sequence[float] = (1.0, 0.0)) -> None:
        self.predicted, self.factors = predicted, factors

    def terms(self, names: Iterable[str]) -> tuple[float, float]:
        """Return Σ p, and Σ √(p p') over the pairs in a block."""
        total = pairs = 0.0
        for members in _groups(list(names), _block):
            rises = [self.predicted[name] for name in members]
            total += sum(rises)
            pairs += sum((a * b) ** 0.5 for a, b in itertools.combinations(rises, 2))
        return total, pairs

    def rise(self, names: Iterable[str]) -> float:
        """Return the predicted rise of a set in nats."""
        return float(np.dot(self.terms(names), self.factors))

    def fitted(self, sets: Sequence[Set], terms: int) -> Model:
        """Return the model of the first so many terms that fits the rises on the first half best, each set relative."""
        rows = np.array([self.terms(each.names)[:terms] for each in sets])
        rises = np.array([each.rise[0] for each in sets])
        factors = np.linalg.lstsq(rows / rows[:, :1], rises / rows[:, 0], rcond=None)[0]
        return Model(self.predicted, (*map(float, factors), 0.0)[:2])

    def chosen(self, flops: Mapping[str, float], share: float) -> Names:
        """Return the set of at least ``share`` of the FLOPs with the least rise, up to exchanges of two linears."""
        order = sorted(flops, key=lambda name: self.predicted[name] / flops[name])
        need, best = share * sum(flops.values()), list[str]()
        for name in order:
            if sum(flops[each] for each in best) < need:
                best.append(name)
        while True:
            moves = [[n for n in best if n != out] + extra for out in best for extra in self._others(flops, best)]
            allowed = [move for move in moves if sum(flops[each] for each in move) >= need]
            move = min(allowed, key=self.rise, default=best)
            if self.rise(move) >= self.rise(best) * (1 - 1e-9):
                return tuple(sorted(best))
            best = move

    @staticmethod
    def _others(flops: Mapping[str, float], best: Sequence[str]) -> list[list[str]]:
        single_names = [name for name in flops if name not in best]
        return [[], *([name] for name in single_names), *map(list, itertools.combinations(single_names, 2))]


def measured(oracle: Any, step: Any, result: Any, sets: Sequence[Set], parts: Sequence[range]) -> None:
    """Force the sets on each of the parts of the batch, and note their rises."""
    from benchmarks.quality import oracle as room
    from benchmarks.quality.truth import Trial

    trials = tuple(Trial(Gemm.FPROP, each.names, Format.FP4) for each in sets)
    rises_of_parts: list[list[float]] = []

    def keep(trials: Any, drift2: Any, loss: Any, *arguments: Any) -> Any:
        rises_of_parts.append([float(value) for value in loss])

    with (
        mock.patch.object(room, "plan_trials", return_value=trials),
        mock.patch.object(room, "truth_of", keep),
        mock.patch.object(room.Oracle, "_owners", return_value=[]),
    ):
        for part in parts:
            oracle.measure(step, result.table, part, result.scale)
    for each, *rises in zip(sets, *rises_of_parts, strict=True):
        each.rise = tuple(rises)


def predicted_rises(table: Any) -> dict[str, float]:
    """Return ΔL₂ of each linear's fprop in fp4, in nats."""
    from snip_megatron.sensitivity.divergence import FPROP, second_order

    rises = second_order(table, ("fp4",))[:, FPROP, 0]
    return dict(zip((row.name for row in table.linears), map(float, rises), strict=True))


def update(oracle: Any, step: Any, result: Any, seed: int) -> dict[str, Any]:
    """Measure at one update, and return its figures."""
    table = result.table
    flops = {row.name: float(row.n * row.k) for row in table.linears}
    predicted = Model(predicted_rises(table))
    sets, used = sets_of(list(flops), seed), result.microbatches
    halves = (range(used), range(used, 2 * used))
    measured(oracle, step, result, sets, halves)
    singles = Model({each.names[0]: statistics.fmean(each.rise) for each in sets if each.kind == "single"})
    fitted = [each for each in sets if each.kind in FITTED]
    models = {"additive": predicted.fitted(fitted, 1), "pairs": predicted.fitted(fitted, 2)}
    choices = [Set(name, model.chosen(flops, 0.5)) for name, model in models.items()]
    measured(oracle, step, result, choices, halves)
    return {
        "step": table.step,
        "tokens": table.tokens,
        "kinds": {kind: _ratios(sets, kind, predicted, singles) for kind in dict.fromkeys(each.kind for each in sets)},
        "models": {name: {"factors": m.factors, "error": _error(m, fitted)} for name, m in models.items()},
        "choices": {each.kind: {"rise": each.rise, "linears": each.names} for each in choices},
        "different": len(set(choices[0].names) ^ set(choices[1].names)) / 2,
        "sets": [{"kind": each.kind, "linears": each.names, "rise": each.rise} for each in sets],
    }


def _ratios(sets: Sequence[Set], kind: str, predicted: Model, singles: Model) -> dict[str, float]:
    """Return what is measured of the sets of a kind over what SNIP predicts, and over the sum of measured singles."""
    members = [each for each in sets if each.kind == kind]
    rise = sum(statistics.fmean(each.rise) for each in members)
    sums = [sum(model.terms(each.names)[0] for each in members) for model in (predicted, singles)]
    halves = [sum(each.rise[half] for each in members) for half in (0, 1)]
    return {
        "sets": len(members),
        "measured_over_predicted": rise / sums[0],
        "measured_over_singles": rise / sums[1],
        "second_half_over_first": halves[1] / halves[0],
    }


def _error(model: Model, sets: Sequence[Set]) -> float:
    """Return the relative error of a model on the second half: root mean square over the sets."""
    return float(np.sqrt(np.mean([(model.rise(each.names) / each.rise[1] - 1) ** 2 for each in sets])))


def train(options: argparse.Namespace, report: Callable[[list[dict[str, Any]]], None]) -> None:
    """Train. ``report`` is called after each update with the figures of all updates."""
    arguments = megatron_arguments(options, 2 * options.half)
    arguments += ["--snip-probe-microbatches", str(options.half)]
    begun = prepared(arguments)
    from benchmarks.quality.oracle import after_each_probe
    from snip_megatron.megatron import entry

    updates: list[dict[str, Any]] = []

    def measure(oracle: Any, config: Any, step: Any, result: Any) -> None:
        updates.append(update(oracle, step, result, len(updates)))
        report(updates)

    with after_each_probe(measure):
        entry.run(begun)


def main() -> int:
    """Run the benchmark. Returns the exit code."""
    parser = arguments_of(__doc__)
    parser.add_argument("--half", type=int, default=4, help="microbatches of each half of the batch")
    options = parser.parse_args()
    about = header(options.commit) | {"arguments": {k: str(v) for k, v in vars(options).items()}}

    def report(updates: list[dict[str, Any]]) -> None:
        show(updates[-1])
        write(options.out, {**about, "updates": updates})

    train(options, report)
    return 0


def show(figures: dict[str, Any]) -> None:
    """Print the figures of an update."""
    print(f"step {figures['step']}, fp4, {figures['tokens']:,} tokens a half")
    for kind, ratios in figures["kinds"].items():
        print(f"  {kind:>20} " + ", ".join(f"{name} {value:.3g}" for name, value in ratios.items()))
    for name, model in figures["models"].items():
        rise = ", ".join(f"{1e3 * value:.3f}" for value in figures["choices"][name]["rise"])
        print(f"  {name:>20} factors {model['factors']}, error {model['error']:.3f}; its choice rises {rise} mnat")


if __name__ == "__main__":
    sys.exit(main())
