"""Where a fault of :mod:`benchmarks.quality.blame` is planted, what runs there, and when it is planted.

A fault is planted from outside, in the process of a rank before its training entry runs: functions of the package, of
Megatron and of torch are replaced, weights of the loaded checkpoint are changed, or the map gives a GEMM a narrower
format. The package itself has no hook for any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Plant = Callable[["Site"], None]
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}
ROWWISE = {("fprop", "x"): True, ("fprop", "w"): True, ("dgrad", "g"): True}
"""Operands that the quantiser makes rowwise; the others are columnwise."""


@dataclass(frozen=True)
class Site:
    """Where a fault is planted.

    Attributes:
        linear: Name of the linear.
        gemm: The GEMM. None stands for all three.
        expert: Index of the expert.
        rank: The rank with the fault. None stands for all.
        seed: Seed of what is drawn.
    """

    linear: str
    gemm: str | None = None
    expert: int | None = None
    rank: int | None = None
    seed: int = 0

    @property
    def is_here(self) -> bool:
        """Whether this rank has the fault."""
        return self.rank in (None, dist.get_rank() if dist.is_initialized() else 0)

    def hits(self, gemm: str) -> bool:
        return self.gemm in (None, gemm)


# -- what runs at present ----------------------------------------------------------------------------------------------
class Running(NamedTuple):
    """A linear, and the pass of it, that runs."""

    linear: str
    expert: int | None
    is_forward: bool


running: list[Running] = []
"""The linears that run at present, the innermost last."""
job_backends: list[Any] = []
"""The backends that the job has selected."""
backend_changes: list[Callable[[Any], None]] = []
"""Called with each backend that the job selects."""


def install() -> None:
    """Note which linear runs. Give a job on the CPU another backend than the reference: bf16 operands, in torch.

    C++, which repeats calls of a backend, would repeat a fault in every linear, so that Python launches the kernels.
    """
    from snip_megatron.megatron import conversion
    from snip_megatron.runtime import warmup

    warmup.launch_from_cpp = lambda *_: "Python launches kernels"  # type: ignore[assignment]
    note_linears()
    select = conversion.select_backend

    def select_and_note(*arguments: Any, **options: Any) -> Any:
        selection = select(*arguments, **options)
        if not torch.cuda.is_available():
            from snip_megatron.numerics.products.emulated import EmulatedBackend
            from snip_megatron.numerics.quantize.operands import quantize_exact

            selection = replace(selection, backend=EmulatedBackend(quantize_exact))
        job_backends.append(selection.backend)
        for change in backend_changes:
            change(selection.backend)
        return selection

    conversion.select_backend = select_and_note


def note_linears() -> None:
    """Note which linear runs."""
    from snip_megatron.layers.autograd import QuantizedLinear
    from snip_megatron.layers.grouped import GroupedLinear

    for function in (QuantizedLinear, GroupedLinear):
        for name in ("forward", "backward"):
            setattr(function, name, staticmethod(_noting(getattr(function, name), name == "forward")))


def _noting(function: Callable[..., Any], is_forward: bool) -> Callable[..., Any]:
    def run(ctx: Any, *arguments: Any) -> Any:
        calls = (each for each in arguments if hasattr(each, "has_backward") or hasattr(each, "linear"))
        call = next(calls) if is_forward else ctx.call
        handle = getattr(call, "handle", None) or call.linear.handle
        running.append(Running(handle.name, handle.expert, is_forward))
        try:
            return function(ctx, *arguments)
        finally:
            running.pop()

    return run


def runs_at(site: Site) -> bool:
    """Return whether a linear of the site runs, on a rank with the fault."""
    if not running or not site.is_here or not running[-1].linear.startswith(site.linear):
        return False
    return site.expert is None or running[-1].expert in (None, site.expert)


# -- the loaded model --------------------------------------------------------------------------------------------------
class Loaded(NamedTuple):
    """Parameters and modules of the loaded model by name."""

    parameters: Mapping[str, torch.nn.Parameter]
    modules: Mapping[str, torch.nn.Module]


def on_load(change: Callable[[Loaded], None], *, main: bool = True) -> None:
    """Call ``change`` when the checkpoint has been loaded.

    With ``main`` the optimizer's parameters are set to the changed ones.
    """
    from megatron.training import training

    load = training.load_checkpoint

    def by_name[T](pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
        return {name.removeprefix("module.").removeprefix("module."): each for name, each in pairs}

    def load_and_change(model: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        result = load(model, optimizer, *arguments, **options)
        parameters = by_name(pair for chunk in model for pair in chunk.named_parameters())
        modules = by_name(pair for chunk in model for pair in chunk.named_modules())
        with torch.no_grad():
            change(Loaded(parameters, modules))
        if main:
            optimizer.reload_model_params()
        return result

    training.load_checkpoint = load_and_change


def norm_of(linear: str) -> str:
    """Return the name of the weight of the norm before a linear."""
    layer, _, path = linear.removeprefix("decoder.layers.").partition(".")
    norm = "input_layernorm" if path.startswith("self_attention") else "pre_mlp_layernorm"
    return f"decoder.layers.{layer}.{norm}.weight"
