"""Measures how long the host takes to launch a training step of Megatron's own decoder layers under SNIP.

The layers are so small that a GPU waits for its host. The time from the first to the last launch is then host time.
"""

from __future__ import annotations

import functools
import itertools
import logging
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from snip_megatron.config import SnipConfig
from snip_megatron.layers import convert_model
from snip_megatron.megatron.compat import torch_norm
from snip_megatron.megatron.layer_spec import transformer_engine_layer_spec
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.timing.calibration.ranks import Rank
from snip_megatron.timing.table import Launching

_VOCABULARY, _HEADS = 256, 4  # at least so many heads, and one for each rank
_HEAD_SIZE = {"cuda": 64, "cpu": 16}  # a CPU computes all of it within the time
_TOKENS = {"cuda": 128, "cpu": 32}
_LAYERS, _MICROBATCHES = (1, 3), (1, 4)
_WARM, _ROUNDS = {"cuda": 2, "cpu": 1}, {"cuda": 9, "cpu": 2}
_LEAST = 1e-9  # seconds: noise must not make a part of a step negative


def measure_launching(device: torch.device, gemm: str, formats: Sequence[Format]) -> Launching:
    """Measure the host seconds of a decoder layer in every format, of a microbatch and of a step.

    Models of one and of three layers train on one and on four microbatches a step, in every format, in turns. The
    differences of the median times are the parts. On a CPU they include the computation.

    Args:
        device: the device of the models.
        gemm: the GEMM backend, as ``--snip-gemm``.
        formats: the quantised formats, without bf16.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return _measured(device, gemm, formats)


def measure_launching_of(rank: Rank, gemm: str, formats: Sequence[Format]) -> Launching:
    """Measure the same of layers that tensor and sequence parallel ranks share, as one of these ranks.

    Ranks wait for each other in every collective. A call therefore begins on all ranks together, and its time is that
    of the rank whose GPU is the last to end. All ranks return the same.

    Args:
        rank: this rank, which has not joined the others yet. Its process does nothing else.
        gemm, formats: as for :func:`measure_launching`.
    """
    if not HAVE_TE:
        torch_norm.install()
    rank.join()
    return _measured(rank.device, gemm, formats)


def _measured(device: torch.device, gemm: str, formats: Sequence[Format]) -> Launching:
    """Measure over the ranks of the default process group, which is destroyed."""
    (few, many), (one, several), every = _LAYERS, _MICROBATCHES, (Format.BF16, *formats)
    with _model_parallel(), torch.autograd.set_multithreading_enabled(False):
        models = {layers: _Model(layers, device, candidates(gemm, formats)) for layers in _LAYERS}
        calls: dict[Hashable, Callable[[], object]] = {
            (fmt, layers, count): functools.partial(models[layers].step, fmt, count)
            for fmt, layers, count in itertools.product(every, _LAYERS, _MICROBATCHES)
        }
        taken = _medians(calls | {"optimizer": models[few].optimize}, device)
    layer = {
        fmt: max(_LEAST, (taken[fmt, many, several] - taken[fmt, few, several]) / ((many - few) * several))
        for fmt in every
    }
    bf16 = Format.BF16
    each = (taken[bf16, few, several] - taken[bf16, few, one]) / (several - one)
    step = taken[bf16, few, one] - each + taken["optimizer"]
    return Launching(
        layers="transformer_engine" if HAVE_TE else "local",
        layer=layer,
        microbatch=max(_LEAST, each - few * layer[bf16]),
        step=max(_LEAST, step),
    )


def candidates(gemm: str, formats: Sequence[Format]) -> SnipConfig:
    """Return a configuration whose backend is chosen for ``formats``; for the default ones if there are none."""
    names = tuple(fmt.value for fmt in formats) or SnipConfig.formats
    return SnipConfig(enabled=True, gemm=gemm, budget="fp4=0", formats=names)


def lost_in_noise(found: Launching) -> str | None:
    """Return which seconds of a layer could not be told from the noise of the steps, and what to do; None if all could.

    Steps and budgets that are predicted with such seconds have no host in these formats.
    """
    lost = ", ".join(fmt.value for fmt, seconds in found.layer.items() if seconds <= _LEAST)
    if not lost:
        return None
    return (
        f"the time of launching a layer in {lost} is lost in noise: measure it again while nothing else runs (--add-to)"
    )


class _Model:
    """A small Llama under Megatron's DDP, and its steps."""

    def __init__(self, layers: int, device: torch.device, snip: SnipConfig) -> None:
        ranks = dist.get_world_size()
        tokens, heads = _TOKENS[device.type], max(_HEADS, ranks)
        features = heads * _HEAD_SIZE[device.type]
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=features,
            ffn_hidden_size=2 * features,
            num_attention_heads=heads,
            tensor_model_parallel_size=ranks,
            sequence_parallel=ranks > 1,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            normalization="RMSNorm",
            attention_dropout=0.0,
            hidden_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            bias_activation_fusion=HAVE_TE,
            apply_rope_fusion=HAVE_TE,
            gradient_accumulation_fusion=False,
        )
        local = get_gpt_layer_local_spec(normalization="RMSNorm")
        spec = transformer_engine_layer_spec(Namespace(transformer=config)) if HAVE_TE else local
        model = GPTModel(
            config,
            spec,
            vocab_size=_VOCABULARY,
            max_sequence_length=tokens,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        ).to(device)
        self._registry = convert_model([model], snip)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self._model = DistributedDataParallel(config, ddp, model.bfloat16())
        adam = OptimizerConfig(optimizer="adam", lr=1e-6, bf16=True, params_dtype=torch.bfloat16)
        self._optimizer = get_megatron_optimizer(adam, [self._model])
        self._tokens = torch.zeros(1, tokens, dtype=torch.long, device=device)
        self._positions = torch.arange(tokens, device=device)[None]
        self._maps: dict[Format, PrecisionMap] = {}

    def step(self, fmt: Format, microbatches: int) -> None:
        """Run the forwards and backwards of a step in which all GEMMs have one format."""
        found = self._maps.setdefault(fmt, PrecisionMap.uniform(self._registry.names, fmt))
        self._registry.adopt(found)
        self._registry.start_step(0)
        self._model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=None,
            model=[self._model],
            num_microbatches=microbatches,
            seq_length=self._tokens.shape[1],
            micro_batch_size=1,
        )

    def optimize(self) -> None:
        """Run the optimizer."""
        self._optimizer.zero_grad()
        self._optimizer.step()

    def _forward(self, _: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        return model(self._tokens, self._positions, None, labels=self._tokens), _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return output.float().mean(), {}


def _medians(calls: Mapping[Hashable, Callable[[], object]], device: torch.device) -> dict[Any, float]:
    """Return the median seconds of each call, in turns: of this thread, or of several ranks and their GPUs.

    The GPU is idle when a call begins. Several ranks return the seconds of the slowest.
    """
    taken: dict[Hashable, list[float]] = {key: [] for key in calls}
    together = dist.get_world_size() > 1
    for _, (key, call) in itertools.product(range(_WARM[device.type] + _ROUNDS[device.type]), calls.items()):
        if together:
            dist.barrier()
        _synchronise(device)
        started = time.perf_counter()
        call()
        if together:
            _synchronise(device)
        taken[key].append(time.perf_counter() - started)
    medians = [statistics.median(each[_WARM[device.type] :]) for each in taken.values()]
    if together:
        slowest = torch.tensor(medians, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        medians = slowest.tolist()
    return dict(zip(taken, medians, strict=True))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _model_parallel() -> Iterator[None]:
    """Make Megatron's groups, in which all ranks are tensor parallel, and destroy them and the default group."""
    try:
        parallel_state.initialize_model_parallel(dist.get_world_size())
        model_parallel_cuda_manual_seed(1234)
        megatron = logging.getLogger("megatron")
        level = megatron.level
        megatron.setLevel(logging.ERROR)  # its warnings are about models that train
        try:
            yield
        finally:
            megatron.setLevel(level)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
