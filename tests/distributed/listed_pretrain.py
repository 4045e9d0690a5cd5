"""The training entry on a CPU as if it had Triton's kernels: module of warm ranks, with ``LISTED=FILE``.

Each kernel is listed instead of launched, and plain torch does its work. The file holds which variants the warm-up
rehearses and which ones training launches afterwards, of this rank.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snip_megatron import pretrain_gpt

LISTS: dict[str, dict[str, None]] = {"warmed up": {}, "launched": {}}
phase, kernels = "launched", False


@contextmanager
def listing() -> Iterator[None]:
    """Pretend that kernels can be launched, and list their launches."""
    global kernels
    from snip_megatron.numerics.quantize.kernels.launch import list_launches

    with list_launches() as launches:
        before, kernels = kernels, True
        try:
            yield
        finally:
            kernels = before
    LISTS[phase] |= dict.fromkeys(map(str, launches.kernels))


def both(function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """List what ``function`` launches, and return what ``plain`` makes of the same arguments."""

    def call(*arguments: Any, **named: Any) -> Any:
        global kernels
        with listing():
            function(*arguments, **named)
        before, kernels = kernels, False
        try:
            return plain(*arguments, **named)
        finally:
            kernels = before

    return call


def install() -> None:
    """Put :func:`both` wherever kernels would run."""
    sys.path.extend(str(Path(__file__).parents[1] / "unit" / room) for room in ("numerics/products", "megatron"))
    from emulated_cublaslt import EmulatedCublasLt
    from triton.backends.compiler import GPUTarget

    from snip_megatron.layers.swiglu import SwiGLU
    from snip_megatron.megatron import conversion, linears
    from snip_megatron.numerics.products import hopper, selection
    from snip_megatron.numerics.quantize import operands, swiglu
    from snip_megatron.numerics.quantize.kernels import quantize
    from snip_megatron.numerics.quantize.kernels import swiglu as kernel_swiglu
    from snip_megatron.numerics.quantize.kernels.compiler import compile_for
    from snip_megatron.runtime.warmup import WarmUp
    from snip_megatron.sensitivity import recorder, sums

    compile_for(GPUTarget("cuda", 90, 32))
    quantisers = {"quantize_operands": both(quantize.quantize_operands, operands.quantize_operands)}
    names = ("quantize_swiglu", "quantize_swiglu_gradient", "swiglu_with_amax")
    activations = {name: both(getattr(kernel_swiglu, name), getattr(swiglu, name)) for name in names}
    activations["fits"] = kernel_swiglu.fits
    stock = SwiGLU(swiglu.swiglu, swiglu.swiglu_gradient)
    conversion.fuse_swiglu = functools.partial(linears.fuse_swiglu, stock=stock)
    activations_of = SimpleNamespace(**activations)
    backend = hopper.HopperBackend(SimpleNamespace(**quantisers), EmulatedCublasLt(), activations=activations_of)
    selection.why_not_hopper = lambda: None
    selection._hopper = lambda library, **_: (backend, "emulated products")
    sums.has_kernels = lambda x: kernels
    for name in ("tensor_sums", "weight_sums"):
        setattr(recorder, name, both(getattr(sums, name), getattr(sums, name)))

    def run(warm_up: WarmUp) -> bool:
        global phase
        phase = "warmed up"
        warm_up.run_once()
        phase = "launched"
        return True

    WarmUp.begin = run


def main() -> int:
    install()
    code = pretrain_gpt.main()
    Path(f"{os.environ['LISTED']}.{os.environ['RANK']}").write_text(json.dumps({k: list(v) for k, v in LISTS.items()}))
    return code
