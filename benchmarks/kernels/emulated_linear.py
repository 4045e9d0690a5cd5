"""Speed of an emulated linear as a share of bf16's: fprop, dgrad and wgrad of 4096 tokens, with quantisation.

    python -m benchmarks.kernels.emulated_linear --out results/kernels/F.json

X and G are quantised in every microbatch. W is quantised once in many microbatches (``w_cached``) or in each
(``w_each``). The operands are not in the cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import cold_milliseconds, header, refuse_without_cuda, write
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import Format, Gemm

SIZE = 4096
FORMATS = ("fp8", "fp4", "nvfp4", "nvfp4_hadamard", "nvfp4_46", "mxfp4", "mxfp4_hadamard", "mxfp8")


def microbatch(backend: GemmBackend, fmt: Format, *, cached: bool) -> Callable[[], None]:
    """Return a function that runs the three GEMMs of one microbatch with all operands in ``fmt``."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, w, g = (torch.randn(SIZE, SIZE, device="cuda", generator=generator).bfloat16() for _ in range(3))
    main_grad = torch.zeros(SIZE, SIZE, device="cuda")
    columns = torch.arange(SIZE, device="cuda")
    seeds = (None, None) if fmt is Format.BF16 else (2**63 + 5, 6)
    of_weight, of_input = OperandSpec(fmt, fmt, weight=True), OperandSpec(fmt, fmt)
    of_gradient = OperandSpec(fmt, fmt, keys=GradientKeys(*seeds, columns, paired=True))
    cached_weight = backend.quantize(w, of_weight)

    def run() -> None:
        weight = cached_weight if cached else backend.quantize(w, of_weight)
        rowwise, columnwise = backend.quantize(x, of_input)
        backend.multiply(Gemm.FPROP, rowwise, weight[0], torch.bfloat16)
        gradient = backend.quantize(g, of_gradient)
        backend.multiply(Gemm.DGRAD, gradient[0], weight[1], torch.bfloat16)
        backend.multiply(Gemm.WGRAD, gradient[1], columnwise, torch.float32, main_grad)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    refuse_without_cuda()
    backend = select_backend("emulated").backend
    bf16 = cold_milliseconds(microbatch(backend, Format.BF16, cached=True))
    shares: dict[str, dict[str, float]] = {}
    for fmt in FORMATS:
        times = {
            name: cold_milliseconds(microbatch(backend, Format(fmt), cached=name == "w_cached"))
            for name in ("w_cached", "w_each")
        }
        shares[fmt] = {name: bf16 / each for name, each in times.items()}
        print(f"{fmt:16} {shares[fmt]['w_cached']:.3f} with W cached, {shares[fmt]['w_each']:.3f} without", flush=True)
    result: dict[str, Any] = header(args.commit) | {"size": SIZE, "bf16_ms": bf16, "share_of_bf16": shares}
    write(args.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
