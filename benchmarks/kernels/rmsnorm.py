"""RMSNorm fused with quantisation, against the norm of torch or of Transformer Engine and a quantisation after it.

    python -m benchmarks.kernels.rmsnorm --out results/kernels/F.json [--sweep] [--commit SHA]

A row is a library, a format of both operands and a shape [tokens, features]. ``unfused_ms`` and ``fused_ms`` are GPU
times with a cold L2 cache, without the time of launches; ``*_host_us`` is how long a call occupies the launching
thread; ``reciprocal_ms`` is the time of the first of the two fused kernels alone. ``differences`` names for each
library and number of features what differs in a bit from the norm; each row says whether its operands are ``equal``.
The exit code is 1 if something differs. Without Transformer Engine, only torch's norm is measured. ``--sweep`` also
tries other launch options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import cold_milliseconds, header, host_milliseconds, refuse_without_cuda, write
from snip_megatron.gemm.backend import GemmBackend, Sides
from snip_megatron.gemm.selection import select_backend
from snip_megatron.layers.rmsnorm import StockNorm
from snip_megatron.layers.rmsnorm_check import difference, same
from snip_megatron.megatron.compat.norms import stock_norm
from snip_megatron.precision import Format
from snip_megatron.quantization.kernels.rmsnorm import LAUNCH

SHAPES = ((16384, 2048), (8192, 4096), (8192, 8192))  # of Llamas of 1 B, 8 B and 70 B
FORMATS = (Format.FP8, Format.FP4)
SWEEP = [
    {"num_warps": warps, "maxnreg": registers}
    for warps in (4, 8, 16)
    for registers in (64, 80, 96, 128, 168)
    if 32 * warps * registers <= 65536  # of a multiprocessor
]


def norms(features: int) -> dict[str, Any]:
    """Return library → its norm, with a weight that is not constant."""
    options: dict[str, Any] = {"eps": 1e-5, "device": "cuda", "dtype": torch.bfloat16}
    found: dict[str, Any] = {"torch": torch.nn.RMSNorm(features, **options)}
    try:
        import transformer_engine.pytorch as library

        found["transformer_engine"] = library.RMSNorm(features, **options)
    except ImportError:
        print("no Transformer Engine here", flush=True)
    for module in found.values():
        module.weight.data += torch.randn(features, device="cuda").bfloat16() * 0.3
    return found


@torch.no_grad()
def measure(backend: GemmBackend, module: Any, stock: StockNorm, tokens: int, *, sweep: bool) -> list[dict[str, Any]]:
    """Return the rows of a norm."""
    gamma, rule, rows = module.weight.detach(), stock.norm, []
    x = torch.randn(tokens, len(gamma), device="cuda").bfloat16()
    for fmt in FORMATS:

        def unfused(fmt: Format = fmt) -> Sides:
            return backend.quantize_input(module(x), fmt, fmt)

        def fused(fmt: Format = fmt) -> Sides:
            return backend.quantize_rmsnorm(x, gamma, backend.reciprocal_rms(x, rule), rule, fmt, fmt)

        row: dict[str, Any] = {"format": fmt.value, "shape": [tokens, len(gamma)], "equal": same(fused(), unfused())}
        for which, call in (("unfused", unfused), ("fused", fused)):
            row[f"{which}_ms"] = cold_milliseconds(call)
            row[f"{which}_host_us"] = 1e3 * host_milliseconds(call)
        row["reciprocal_ms"] = cold_milliseconds(lambda: backend.reciprocal_rms(x, rule))
        if sweep:
            row["sweep"] = swept(fused)
        rows.append(row)
    return rows


def swept(call: Callable[[], Sides]) -> dict[str, float]:
    """Return launch options of the second kernel → GPU milliseconds of both."""
    usual, found = LAUNCH["rmsnorm"], {}
    for options in SWEEP:
        LAUNCH["rmsnorm"] = options
        found[f"{options['num_warps']} warps, {options['maxnreg']} registers"] = cold_milliseconds(call)
    LAUNCH["rmsnorm"] = usual
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="RMSNorm fused with quantisation: bits and speed")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--sweep", action="store_true", help="try other launch options")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    arguments = parser.parse_args()
    refuse_without_cuda()
    backend = select_backend("hopper", replays=not arguments.sweep).backend
    device = torch.device("cuda", torch.cuda.current_device())
    differences: dict[str, str | None] = {}
    rows: list[dict[str, Any]] = []
    for tokens, features in SHAPES:
        for library, module in norms(features).items():
            stock = stock_norm(module)
            differs = difference(backend, module, stock, device, torch.bfloat16)
            differences[f"{library}, {features} features"] = differs
            print(f"{library}, {features} features: difference: {differs}", flush=True)
            for row in measure(backend, module, stock, tokens, sweep=arguments.sweep):
                rows.append({"library": library} | row)
                print(rows[-1], flush=True)
    write(arguments.out, header(arguments.commit) | {"differences": differences, "rows": rows})
    return 1 if any(differences.values()) or not all(row["equal"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
