"""Four blocks shaped like Llama-8B through Megatron's forward and backward: tokens per second, memory of saved inputs.

    python -m benchmarks.layers.layer --out results/layers/F.json [--commit SHA] [--kernels]

A sequence has 8192 tokens, a microbatch one sequence, a step four microbatches (weights are quantised once a step).
Gradients go into Megatron's FP32 DDP buffer. Contenders take turns: Megatron's own Transformer Engine layers with fused
accumulation (bf16), and the same layers converted, under an all-bf16 map and under fp8, fp8_tensor and fp4 maps.
``speedup`` is relative to the first. ``fused`` layers quantise SwiGLU where it is computed (``--snip-fusions auto``);
``speedup_fused`` is theirs. The model has no embedding, output layer or
optimizer. Without Transformer Engine the layers are Megatron's local ones, whose attention is not fused; the result
says so. ``--kernels`` records where a step of each contender spends the GPU's time.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.common import header, host_milliseconds, interleaved, refuse_without_cuda, write
from benchmarks.jobs.kernels import recorded, summarised
from snip_megatron.layers import LinearRegistry
from snip_megatron.megatron import convert_model
from snip_megatron.precision import DENSE_LAYER, Format, PrecisionMap
from snip_megatron.runtime.config import SnipConfig

MICROBATCHES = 4
STOCK = "megatron bf16"
FORMATS = (Format.FP8, Format.FP8_TENSOR, Format.FP4)
FUSED = (Format.FP8, Format.FP4, Format.FP8_TENSOR)


def transformer_config(arguments: argparse.Namespace, *, fused_accumulation: bool) -> TransformerConfig:
    """Return the configuration of the blocks, with wgrad accumulated in the GEMM or by a kernel of its own."""
    return TransformerConfig(
        num_layers=arguments.blocks,
        hidden_size=arguments.hidden,
        ffn_hidden_size=arguments.ffn,
        num_attention_heads=arguments.heads,
        num_query_groups=arguments.groups,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bias_activation_fusion=HAVE_TE,
        apply_rope_fusion=HAVE_TE,
        gradient_accumulation_fusion=fused_accumulation and HAVE_TE,
    )


class Stack:
    """The blocks under Megatron's DDP, and a step of them."""

    def __init__(self, arguments: argparse.Namespace, *, convert: bool = False, fusions: str = "none") -> None:
        config = transformer_config(arguments, fused_accumulation=HAVE_TE)
        model = GPTModel(
            config,
            get_gpt_layer_with_transformer_engine_spec()
            if HAVE_TE
            else get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=128,
            max_sequence_length=arguments.seq,
            post_process=False,
            position_embedding_type="rope",
            rotary_base=500000,
        ).to("cuda")
        self.registry: LinearRegistry | None = None
        if convert:
            self.registry = convert_model([model], SnipConfig(enabled=True, gemm=arguments.gemm, fusions=fusions))
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, ddp, model.bfloat16())
        self.x = torch.randn(arguments.seq, 1, arguments.hidden, device="cuda").bfloat16().requires_grad_()
        self.g = torch.randn_like(self.x) / self.x.numel()
        self.steps = 0

    def adopt(self, fmt: Format) -> None:
        assert self.registry is not None
        self.registry.adopt(PrecisionMap.uniform(self.registry.names, fmt))

    def step(self, microbatches: int = MICROBATCHES) -> None:
        if self.registry is not None:
            self.registry.start_step(self.steps)
        self.steps += 1
        self.model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=None,
            model=[self.model],
            num_microbatches=microbatches,
            seq_length=self.x.shape[0],
            micro_batch_size=1,
        )

    def _forward_step(self, _: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        self.x.grad = None
        return model(None, None, None, decoder_input=self.x), self._loss

    def _loss(self, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (output * self.g).sum(dtype=torch.float32)
        return loss, {"loss": loss.detach()}


# -- memory --------------------------------------------------------------------------------------------------------
def saved_by_linears(stack: Stack) -> int:
    """Return the bytes that the decoder's linears keep for their backward in one microbatch, without weights."""
    parameters = {p.untyped_storage().data_ptr() for p in stack.model.parameters()}
    inside, bytes_at = [False], dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside[0] and storage.data_ptr() not in parameters:
            bytes_at[storage.data_ptr()] = storage.nbytes()
        return tensor

    with marking_linears(stack, inside), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stack._forward_step(None, stack.model)[0]
    del output
    return sum(bytes_at.values())


@contextmanager
def marking_linears(stack: Stack, inside: list[bool]) -> Iterator[None]:
    handles = []
    for name, module in stack.model.named_modules():
        if name.endswith(DENSE_LAYER):
            handles.append(module.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True)))
            handles.append(module.register_forward_hook(lambda *_: inside.__setitem__(0, False)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def peak_memory(step: Callable[[], object]) -> int:
    """Return the bytes that a step allocates in addition to what is allocated before it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# -- measurement ---------------------------------------------------------------------------------------------------
def contenders(arguments: argparse.Namespace) -> dict[str, tuple[Stack, Format | None]]:
    snip = Stack(arguments, convert=True)
    contenders_by_name: dict[str, tuple[Stack, Format | None]] = {
        STOCK: (Stack(arguments), None),
        "snip bf16": (snip, Format.BF16),
    }
    fused = Stack(arguments, convert=True, fusions="auto")
    contenders_by_name |= {f"snip {fmt.value}": (snip, fmt) for fmt in FORMATS}
    return contenders_by_name | {f"snip {fmt.value} fused": (fused, fmt) for fmt in FUSED}


def run_step(stack: Stack, fmt: Format | None, microbatches: int = MICROBATCHES) -> None:
    if fmt is not None:
        stack.adopt(fmt)
    stack.step(microbatches)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    stacks = contenders(arguments)
    rows: dict[str, Any] = {}
    for name, (stack, fmt) in stacks.items():
        microbatch = functools.partial(run_step, stack, fmt, 1)
        microbatch()  # compiles, and lets libraries allocate
        rows[name] = {"peak_bytes_above_start": peak_memory(microbatch), "linears_saved_bytes": saved_by_linears(stack)}
    calls = {name: functools.partial(run_step, stack, fmt) for name, (stack, fmt) in stacks.items()}
    times = interleaved(calls, arguments.rounds)
    for name, ms in times.items():
        rows[name] |= {"ms_a_step": ms, "tokens_a_second": MICROBATCHES * arguments.seq / ms * 1e3}
        rows[name]["host_ms_a_step"] = host_milliseconds(calls[name], 3)
        if arguments.kernels:
            rows[name]["kernels"] = summarised(*recorded(calls[name])[1:])
    formats = [fmt.value for fmt in FORMATS]
    saved = rows[STOCK]["linears_saved_bytes"]
    return {
        "rows": rows,
        "speedup": {fmt: times[STOCK] / times[f"snip {fmt}"] for fmt in formats},
        "speedup_fused": {fmt.value: times[STOCK] / times[f"snip {fmt.value} fused"] for fmt in FUSED},
        "saved_inputs": {fmt: rows[f"snip {fmt}"]["linears_saved_bytes"] / saved for fmt in formats},
        "all_bf16_map_over_unconverted": all_bf16_map_over_unconverted(stacks, 2 * arguments.rounds),
    }


def all_bf16_map_over_unconverted(stacks: dict[str, tuple[Stack, Format | None]], rounds: int) -> float:
    """Return the time under an all-bf16 map relative to unconverted layers, measured with these two contenders alone.

    The map is adopted once, as in training. A difference of one percent must be visible.
    """
    names = ("snip bf16", STOCK)
    (snip, fmt), (plain, _) = (stacks[name] for name in names)
    assert fmt is not None
    snip.adopt(fmt)
    times = interleaved(dict(zip(names, (snip.step, plain.step), strict=True)), rounds)
    return times[names[0]] / times[names[1]]


@contextmanager
def one_rank() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed and memory of blocks under SNIP")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--kernels", action="store_true", help="record the kernels of a step of each contender")
    parser.add_argument("--gemm", default="auto", help="GEMM backend")
    for name, default in (("blocks", 4), ("seq", 8192), ("hidden", 4096), ("ffn", 14336), ("heads", 32), ("groups", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    refuse_without_cuda()
    shape = {name: getattr(arguments, name) for name in ("blocks", "seq", "hidden", "ffn", "heads", "groups")}
    result = header(arguments.commit) | {"shape": shape, "microbatches": MICROBATCHES, "transformer_engine": HAVE_TE}
    if not HAVE_TE:
        print("transformer_engine cannot be imported: local layers, attention not fused")
    with one_rank():
        result |= measure(arguments)
    write(arguments.out, result)
    for name, row in result["rows"].items():
        saved, peak = row["linears_saved_bytes"] / 2**20, row["peak_bytes_above_start"] / 2**30
        speed = f"{row['ms_a_step']:9.2f} ms a step {row['tokens_a_second']:10.0f} tokens/s"
        print(f"{name:30s} {speed}  saved by linears {saved:8.1f} MiB  peak above start {peak:6.2f} GiB")
    print({key: result[key] for key in ("speedup", "speedup_fused", "saved_inputs", "all_bf16_map_over_unconverted")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
