"""The figures of sensitivity/README.md: the estimator against brute force over seeds, depths and sizes of a step.

python -m tests.unit.sensitivity.study --seeds 0 1 2 --steps 120
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from snip_megatron.precision import Gemm
from snip_megatron.sensitivity.divergence import added_variance, second_order, weight_divergence
from snip_megatron.statistics.table import StatisticsTable

from .brute_force import from_norms, spearman, true_drift, true_loss_change
from .reference_recorder import record
from .small_llama import batch, corpus, train
from .test_against_truth import correlation, own_linear_only, relative_errors


def report_drift(table: StatisticsTable, truth: np.ndarray) -> None:
    """Spearman to the truth (all, fprop, dgrad, wgrad), and what the cheapest 75 % of the options cost in truth."""
    recipe = weight_divergence(table, ("fp4",))[:, :, 0]
    chosen = 3 * truth.size // 4
    best = np.sort(truth.ravel())[:chosen].sum()
    for name, scores in (
        ("recipe", recipe),
        ("with backward noise", weight_divergence(table, ("fp4",), backward_noise=True)[:, :, 0]),
        ("own linear only", own_linear_only(table)),
        ("relative error", relative_errors(table)),
    ):
        ranks = " ".join(f"{correlation(scores, truth, gemm):6.3f}" for gemm in (None, *Gemm))
        cost = truth.ravel()[np.argsort(scores.ravel())[:chosen]].sum()
        print(f"  {name:20s} {ranks}   cost/best {cost / best:.3f}  cost/average {cost / truth.sum() / 0.75:.3f}")
    print("  predicted/true, medians:", np.round(np.median(recipe / truth, axis=0), 2))
    whole = truth.sum(axis=1)
    print(f"  linears: recipe {spearman(recipe.sum(axis=1), whole):.3f}, wgrad {spearman(recipe[:, 2], whole):.3f}")
    print("  gradient variance added by a GEMM kind:", np.round(added_variance(table, ("fp4",)).sum(axis=0)[:, 0], 3))


def main() -> None:
    """Parse arguments and print one paragraph a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=1, help="of a training step; the probe sees one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = corpus()
    for seed in args.seeds:
        trained = train(data, args.steps, args.sequences, seed, args.blocks)
        microbatches = [batch(data, args.sequences, 999 + i) for i in range(args.microbatches)]
        table = record(trained, *microbatches[0], steps_share=1 / args.microbatches)
        print(f"seed {seed}: loss {trained.losses[-1]:.3f}")
        report_drift(table, true_drift(trained, microbatches, "fp4"))
        loss = true_loss_change(trained, [batch(data, 64, 5000 + i) for i in range(2)], "fp4")
        exact, norms = (f(table, ("fp4",))[:, 0, 0] for f in (second_order, from_norms))
        ranks = f"{spearman(exact, loss):.3f} (norms only {spearman(norms, loss):.3f})"
        print(f"  loss divergence {ranks}, sum over truth {exact.sum() / loss.sum():.2f}", flush=True)


if __name__ == "__main__":
    main()
