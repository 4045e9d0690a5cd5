"""The training entry on a CPU as if it were a Hopper GPU: ``python -m fused_pretrain``.

Products and quantisers are plain torch, and SwiGLU is computed as torch compiles it for a GPU: rounded once, in both
Megatron's functions and the fused ones. At the end each rank prints which fused functions ran.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments

CALLS: Counter[str] = Counter()


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which counts its calls."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        CALLS[function.__name__] += 1
        return function(*arguments, **named)

    return call


def install() -> None:
    """Give the run a Hopper backend in plain torch."""
    sys.path.extend(str(Path(__file__).parents[1] / "unit" / room) for room in ("gemm", "megatron"))
    from emulated_scaled_mm import scaled_mm
    from megatron.core.fusions import fused_bias_swiglu

    from snip_megatron.gemm import hopper, selection
    from snip_megatron.gemm.scaled import ScaledProducts
    from snip_megatron.layers.swiglu import SwiGLU
    from snip_megatron.megatron import conversion, fused_mlp
    from snip_megatron.quantization import packed, swiglu

    names = ("quantize_swiglu", "quantize_swiglu_gradient", "swiglu_with_amax", "swiglu_gradient_with_amax")
    functions = {name: noted(getattr(swiglu, name)) for name in names}
    activations = SimpleNamespace(fits=swiglu.fits, **functions)
    backend = hopper.HopperBackend(packed, ScaledProducts(scaled_mm), activations=activations)
    selection.why_not_hopper = lambda: None
    selection._hopper = lambda library, **_: (backend, "emulated products")
    stock = SwiGLU(swiglu.swiglu, swiglu.swiglu_gradient)
    fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back = stock.forward, stock.backward
    conversion.fuse_swiglu = functools.partial(fused_mlp.fuse_swiglu, stock=stock)


def main() -> None:
    config = parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], config.no_compat)
    install()
    from snip_megatron.megatron.entry import run

    run(startup)
    print(f"fused calls: {sorted(CALLS)}", flush=True)


if __name__ == "__main__":
    main()
