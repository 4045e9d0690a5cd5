"""Sharded linears on two gloo ranks beside the whole one: module of warm ranks, with ``OUT=<folder>``.

Each rank writes ``rank<k>.pt``: case -> (Y, ∂L/∂X, ∇W) as it holds them, and ``recorded<k>.pt``: case -> what a probe
records of its quantisation errors; rank 0 also ``whole.pt`` and ``recorded.pt`` of the same linears without any
parallelism. ``saved<k>.pt``: bytes that autograd saves of X, by case, for sequence parallel cases.
"""

import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dense_names import dense_names

from snip_megatron.megatron.startup import prepare
from snip_megatron.precision import Format, Formats, LinearId, LinearRow

BF16, FP8, FP4 = Format.BF16, Format.FP8, Format.FP4
TENSOR, NVFP4, HADAMARD = Format.FP8_TENSOR, Format.NVFP4, Format.NVFP4_HADAMARD
SEQUENCE, BATCH = 128, 2
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A linear and its setting. [n, k] is global; shards, gated halves and local tokens are multiples of 128."""

    kind: str
    n: int
    k: int
    formats: Formats
    sequence_parallel: bool
    dtype: torch.dtype = torch.float32

    @property
    def row(self) -> bool:
        return self.kind.endswith(("linear_proj", "linear_fc2"))

    @property
    def gated(self) -> bool:
        return self.kind == "mlp.linear_fc1"

    def __str__(self) -> str:
        formats = "-".join(f.value for f in self.formats)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind.split('.')[1]}_{formats}_{'sp' if self.sequence_parallel else 'tp'}_{dtype}"


_SHAPES = {
    "self_attention.linear_qkv": (512, 256),
    "self_attention.linear_proj": (256, 512),
    "mlp.linear_fc1": (512, 256),
    "mlp.linear_fc2": (384, 256),
}
_FORMATS = ((BF16, BF16, BF16), (FP8, FP8, FP8), (FP4, FP4, FP4), (FP8, FP4, BF16), (BF16, BF16, FP4))
CASES = [
    Case(kind, *shape, formats, sequence_parallel)
    for (kind, shape), formats, sequence_parallel in product(_SHAPES.items(), _FORMATS, (False, True))
] + [
    Case(kind, *_SHAPES[kind], (FP4, FP4, FP4), sequence_parallel, torch.bfloat16)
    for kind, sequence_parallel in product(("mlp.linear_fc1", "mlp.linear_fc2"), (False, True))
]
# One scale a tensor: the largest numbers of X, W and G lie in the shard of one rank (see tensors).
CASES += [
    Case(kind, *_SHAPES[kind], formats, sequence_parallel)
    for kind, formats, sequence_parallel in product(
        ("mlp.linear_fc1", "mlp.linear_fc2"),
        ((TENSOR,) * 3, (TENSOR, NVFP4, TENSOR), (TENSOR, NVFP4, HADAMARD)),
        (False, True),
    )
]
CASES += [
    Case(kind, *_SHAPES[kind], (first, second, first), True, torch.bfloat16)
    for kind in ("self_attention.linear_qkv", "self_attention.linear_proj")
    for first, second in ((Format.MXFP4, NVFP4), (NVFP4, Format.MXFP4), (Format.MXFP8, FP4), (FP4, FP8))
]


def tensors(case: Case) -> Tensors:
    """X [s, b, k], W [n, k], G [s, b, n] of the whole linear."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(SEQUENCE, BATCH, case.k, generator=generator)
    w = torch.randn(case.n, case.k, generator=generator) * case.k**-0.5
    g = torch.randn(SEQUENCE, BATCH, case.n, generator=generator) * 1e-3
    if TENSOR in case.formats:
        for t, largest in ((x, 6.0), (w, 0.5), (g, 7e-3)):
            t.view(-1)[0] = largest
    return x.to(case.dtype), w.to(case.dtype), g.to(case.dtype)


def shard(t: torch.Tensor, dim: int, rank: int, size: int, *, halves: int = 1) -> torch.Tensor:
    """Share ``rank`` of ``size`` along ``dim``, of each of ``halves`` stacked parts."""
    return torch.cat([half.chunk(size, dim)[rank] for half in t.chunk(halves, dim)], dim)


def local_tensors(case: Case, rank: int, size: int) -> Tensors:
    """Return the parts of X, W and G that a rank has."""
    x, w, g = tensors(case)
    if case.row:
        x, w = shard(x, -1, rank, size), shard(w, 1, rank, size)
        return x, w, shard(g, 0, rank, size) if case.sequence_parallel else g
    halves = 2 if case.gated else 1
    w, g = shard(w, 0, rank, size, halves=halves), shard(g, -1, rank, size, halves=halves)
    return (shard(x, 0, rank, size) if case.sequence_parallel else x), w, g


WHOLE_TENSOR_CASES = [case for case in CASES if TENSOR in case.formats]
CANDIDATES = ("fp8_tensor", "nvfp4", "fp8", "nvfp4_46", "nvfp4_hadamard", "mxfp4_hadamard_fixed")


def run(
    case: Case, group: dist.ProcessGroup, *, probing: bool = False
) -> tuple[Tensors, dict[str, torch.Tensor], list[int]]:
    """Build Megatron's linear over ``group``, convert it, and run it forward and backward once, as in a probe or not.

    Returns the tensors, what a probe records by candidate (float64, this rank's share of the sums of squared errors),
    and the bytes of each tensor that the forward saves for the backward, the weight aside.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from snip_megatron.layers.context import StepContext
    from snip_megatron.layers.registry import LinearRegistry
    from snip_megatron.megatron.conversion import _convert_linear
    from snip_megatron.megatron.model_linears import BuiltLinear
    from snip_megatron.sensitivity.recorder import LinearRecorder

    size = group.size()
    x, w, g = local_tensors(case, group.rank(), size)
    config = TransformerConfig(
        num_layers=4, hidden_size=256, num_attention_heads=4, tensor_model_parallel_size=size, params_dtype=case.dtype,
        sequence_parallel=case.sequence_parallel and size > 1, gated_linear_unit=case.gated,
        use_cpu_initialization=True, perform_initialization=False,
    )  # fmt: skip
    shared: dict[str, Any] = {"config": config, "init_method": None, "bias": False, "tp_group": group}
    if case.row:
        module = RowParallelLinear(case.k, case.n, input_is_parallel=True, skip_bias_add=True, **shared)
    else:
        stride = 2 if case.gated else 1  # as Megatron's MLP says it
        module = ColumnParallelLinear(case.k, case.n, gather_output=False, stride=stride, **shared)
    assert module.weight.shape == w.shape
    module.weight.data.copy_(w)

    linear = LinearId("decoder", 3, case.kind)
    registry = LinearRegistry([LinearRow(name, 0, 1, 1) for name in dense_names(4)], StepContext(step=6, seed=5))
    row = LinearRow(str(linear), 0, case.n, case.k)
    _convert_linear(BuiltLinear(linear, module, None, module, module, None, row), registry)
    registry[str(linear)].state.formats = case.formats
    registry.start_step(6)
    recorder = LinearRecorder(registry[str(linear)], CANDIDATES, sample_tokens=16)
    if probing:
        registry.context.probing, registry[str(linear)].state.recorder = True, recorder
    main_grad = module.weight.main_grad = torch.zeros_like(w, dtype=torch.float32)
    module.weight.grad_added_to_main_grad = False
    x.requires_grad_()
    saved: list[int] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() != module.weight.data_ptr():
            saved.append(t.numel() * t.element_size())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y, _ = module(x)
    y.backward(g)
    if not module.weight.grad_added_to_main_grad:  # all bf16: Megatron's own path, finished by DDP's hook
        main_grad += module.weight.grad
    assert x.grad is not None
    sums = {name: value for name, value in recorder.sums.items() if value.dim()}
    return (y.detach(), x.grad, main_grad), sums, saved


def main() -> None:
    prepare([], [])
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank, folder = dist.get_rank(), Path(os.environ["OUT"])
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    both = parallel_state.get_tensor_model_parallel_group()
    for name, ending, group in (("rank", rank, both), *([("whole", "", alone)] if rank == 0 else [])):
        results = {str(case): run(case, group) for case in CASES}
        recorded = {str(case): run(case, group, probing=True)[1] for case in WHOLE_TENSOR_CASES}
        torch.save({case: tensors for case, (tensors, _, _) in results.items()}, folder / f"{name}{ending}.pt")
        torch.save({case: saved for case, (_, _, saved) in results.items()}, folder / f"saved{ending}.pt")
        torch.save(recorded, folder / f"recorded{ending}.pt")
    dist.barrier()
    dist.destroy_process_group()
