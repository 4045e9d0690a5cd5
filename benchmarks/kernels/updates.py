"""What an optimizer's step does to the parameters of four layers like Qwen3-30B-A3B's, pass by pass and in one launch.

    python -m benchmarks.kernels.updates --out results/kernels/F.json [--commit SHA]

``ms`` are GPU times, without the time of launches; ``TB/s`` counts the bytes that a pass must read and write. Needs
Transformer Engine and 48 GiB of GPU memory.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import header, refuse_without_cuda, write

SIZES = [1536 * 2048, 2048 * 768] * 512 + [32000 * 2048] * 2 + [5120 * 2048, 4096 * 2048, 128 * 2048] * 4 + [2048] * 9
"""Numbers of elements: experts, embedding and output layer, attention and router, norms."""
LR, BETAS, EPS, STEP, DECAY = 1e-4, (0.9, 0.95), 1e-8, 10, 0.1
MOST = 1024
"""Tensors that Transformer Engine's FusedAdam passes in one call."""


def passes() -> dict[str, tuple[Callable[[], object], int]]:
    """Return the name of a pass → its call, and the bytes that it moves for every parameter."""
    from transformer_engine.pytorch.optimizers import (
        multi_tensor_applier,
        multi_tensor_l2norm,
        multi_tensor_scale_tensor,
    )

    from snip_megatron.numerics.adamw import AdamW

    kernels = importlib.import_module("transformer_engine_torch")
    flat, mean = (torch.empty(sum(SIZES), device="cuda").normal_(std=1e-3) for _ in range(2))
    grads, means = (list(torch.split(each, SIZES)) for each in (flat, mean))
    squares = list(torch.split(torch.full_like(flat, 1e-6), SIZES))
    parameters = [torch.randn(size, device="cuda") for size in SIZES]
    models = list(torch.split(torch.empty_like(flat, dtype=torch.bfloat16), SIZES))
    one, overflow = torch.ones(1, device="cuda"), torch.zeros(1, dtype=torch.int, device="cuda")
    update = AdamW(grads, parameters, means, squares, models)

    def adam(*columns: list[torch.Tensor]) -> None:
        for first in range(0, len(SIZES), MOST):
            lists = [column[first : first + MOST] for column in columns]
            multi_tensor_applier(kernels.multi_tensor_adam, overflow, lists, LR, *BETAS, EPS, STEP, 1, 1, DECAY)

    return {
        "norm": (lambda: multi_tensor_applier(multi_tensor_l2norm, overflow, [grads], False), 4),
        "norm of one tensor": (lambda: torch.linalg.vector_norm(flat), 4),
        "clip": (lambda: multi_tensor_applier(multi_tensor_scale_tensor, overflow, [grads, grads], one), 8),
        "adam": (lambda: adam(grads, parameters, means, squares), 28),
        "copy": (lambda: torch._foreach_copy_(models, parameters), 6),
        "adam with copy, TE's kernel with master weights": (
            lambda: adam(grads, models, means, squares, parameters),
            30,
        ),
        "one launch": (lambda: update.step(one, STEP, LR, BETAS, EPS, DECAY, corrects=True), 30),
        "copy of one tensor (8 B a number)": (lambda: mean.copy_(flat), 8),
        "zero": (lambda: flat.zero_(), 4),
    }


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median GPU time of seven calls, whose launches queue behind a kernel that waits."""
    call()
    times: list[float] = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Passes of an optimizer's step")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    arguments = parser.parse_args()
    refuse_without_cuda()
    result = header(arguments.commit) | {"parameters": sum(SIZES), "ms": {}, "TB/s": {}}
    for name, (call, size) in passes().items():
        result["ms"][name] = round(ms := milliseconds(call), 3)
        result["TB/s"][name] = round(size * sum(SIZES) / ms / 1e9, 3)
        print(f"{name:50s} {ms:7.2f} ms {result['TB/s'][name]:6.3f} TB/s", flush=True)
    write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
