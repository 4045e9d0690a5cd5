"""The cost of a probe relative to training: the passes of one update on four blocks shaped like Llama-8B.

    python -m benchmarks.layers.probe --out results/layers/F.json [--commit SHA]

SNIP's layers and probes run under Megatron's forward and backward, DDP and AdamW, with sequence 8192, one sequence per
microbatch and one microbatch per probe. Embedding and output layer have a small vocabulary, so that the blocks take
nearly all of a pass. Passes take turns with the plain bf16 pass with which they are compared. Each is timed from an
idle device to an idle device. Parts of the statistics pass are timed by events in separate rounds. ``--profile N`` adds
the N longest kernels. On a machine without a GPU it runs on the CPU (local layers, unfused), which shows the output but
gives no meaningful figures.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common import header, write
from snip_megatron.megatron import startup

STARTUP = startup.prepare([], [])  # before Megatron, which binds names of torch.cuda while it is imported

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.extensions.transformer_engine import HAVE_TE  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, initialize_rerun_state_machine  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from benchmarks.layers.layer import transformer_config  # noqa: E402
from snip_megatron.megatron import convert_model  # noqa: E402
from snip_megatron.megatron.host import MegatronStep, StepCall, make_host  # noqa: E402
from snip_megatron.precision import Format, PrecisionMap  # noqa: E402
from snip_megatron.runtime.config import SnipConfig  # noqa: E402
from snip_megatron.runtime.probe import Passes, ProbeRunner  # noqa: E402
from snip_megatron.sensitivity import recorder  # noqa: E402
from snip_megatron.sensitivity.recorder import LinearRecorder, Pass  # noqa: E402

ON_CPU = STARTUP.on_cpu
SHAPE = {"blocks": 4, "seq": 8192, "hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "vocab": 512}
WARM_STEPS = 2


class Training:
    """A model in training, and the passes over one of its microbatches."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.snip = SnipConfig(enabled=True, gemm=arguments.gemm, formats=tuple(arguments.formats.split(",")))
        self.config = transformer_config(arguments, fused_accumulation=False)
        model = GPTModel(
            self.config,
            self._spec(),
            vocab_size=arguments.vocab,
            max_sequence_length=arguments.seq,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=500000,
        ).to("cuda")
        self.registry = convert_model([model], self.snip)
        self.registry.adopt(PrecisionMap.uniform(self.registry.names, Format.BF16))
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = [DistributedDataParallel(self.config, ddp, model.bfloat16())]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0),
            self.model,
        )
        tokens = torch.randint(arguments.vocab, (1, arguments.seq + 1), device="cuda")
        self.batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        self.positions = torch.arange(arguments.seq, device="cuda")[None]
        self.data = RerunDataIterator(itertools.repeat(self.batch))
        self.loop = argparse.Namespace(
            seq_length=arguments.seq,
            micro_batch_size=1,
            padded_vocab_size=arguments.vocab,
            context_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
            use_distributed_optimizer=False,
            optimizer="adam",
        )
        self.host = make_host(self.loop, self.model, self.registry)
        self.runner = ProbeRunner(self.host, self.registry, self.snip, weighs_updates=True)
        self.step = 0

    def _spec(self) -> Any:
        if HAVE_TE:
            return get_gpt_layer_with_transformer_engine_spec()
        return get_gpt_layer_local_spec(normalization="RMSNorm")

    def forward_step(self, data: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(data)
        losses = model(batch["tokens"], self.positions, None, labels=batch["labels"])

        def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses.float().mean()
            return loss, {"lm loss": loss.detach()}

        return losses, mean

    def bf16_pass(self) -> None:
        """Run forward and backward of one microbatch as training does under an all-bf16 map."""
        self.registry.start_step(self.step)
        self.model[0].zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=self.data,
            model=self.model,
            num_microbatches=1,
            seq_length=self.batch["tokens"].shape[1],
            micro_batch_size=1,
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.bf16_pass()
            self.optimizer.step()
            self.step += 1

    def probe(self) -> Any:
        call = StepCall(
            step=self.step,
            forward_step_func=self.forward_step,
            data_iterator=self.data,
            model=self.model,
            optimizer=self.optimizer,
            config=self.config,
            forward_backward_func=get_forward_backward_func(),
            num_microbatches=4,
        )
        return self.runner.run(MegatronStep(call, self.loop, self.host.groups), 1.0, sequences=1)


# -- clocks ----------------------------------------------------------------------------------------------------
def synchronize() -> None:
    if not ON_CPU:
        torch.cuda.synchronize()


class Stopwatch:
    """Milliseconds of named stretches, from idle to idle device, or by events (``idle`` False)."""

    def __init__(self) -> None:
        self.idle = True
        self.times: dict[str, list[float]] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        if not self.idle:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
            return
        synchronize()
        started = time.perf_counter()
        yield
        synchronize()
        self.times.setdefault(name, []).append((time.perf_counter() - started) * 1e3)

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self.of(name):
                return function(*arguments, **options)

        return call

    def collect(self) -> None:
        """Add up the events of a round by name."""
        synchronize()
        sums: dict[str, float] = {}
        for name, start, end in self._events:
            sums[name] = sums.get(name, 0.0) + start.elapsed_time(end)
        self._events.clear()
        for name, total in sums.items():
            self.times.setdefault(name, []).append(total)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.times.items()}


@contextmanager
def timed_passes(training: Training, watch: Stopwatch) -> Iterator[None]:
    """Time the passes of an update by name, the reduction and the update errors inside this context."""
    run_pass = Passes.run_pass

    def one_pass(passes: Passes, phase: Pass, *arguments: Any) -> float:
        with watch.of(f"{phase.value} pass"):
            return run_pass(passes, phase, *arguments)

    with (
        mock.patch.object(Passes, "run_pass", one_pass),
        mock.patch.object(Passes, "reduced", watch.wrapped("reduction", Passes.reduced)),
        mock.patch.object(Passes, "add_update_errors", watch.wrapped("drift", Passes.add_update_errors)),
    ):
        yield


@contextmanager
def timed_parts(watch: Stopwatch) -> Iterator[None]:
    """Time the recorder's work in the backwards of the statistics pass inside this context."""
    with (
        mock.patch.object(LinearRecorder, "_record", watch.wrapped("recorder", LinearRecorder._record)),
        mock.patch.object(
            LinearRecorder,
            "_record_outputs",
            watch.wrapped("recorder: Y and E of a sample", LinearRecorder._record_outputs),
        ),
        mock.patch.object(recorder, "tensor_sums", watch.wrapped("recorder: sums of X and G", recorder.tensor_sums)),
        mock.patch.object(recorder, "weight_sums", watch.wrapped("recorder: sums of W", recorder.weight_sums)),
    ):
        yield


# -- measurement ---------------------------------------------------------------------------------------------------
def measure(training: Training, rounds: int) -> dict[str, Any]:
    watch, parts = Stopwatch(), Stopwatch()
    for _ in range(2):
        training.bf16_pass()
        training.probe()
    with timed_passes(training, watch):
        for _ in range(rounds):
            with watch.of("bf16 pass"):
                training.bf16_pass()
            with watch.of("update"):
                training.probe()
    parts.idle = False
    with timed_parts(parts):
        for _ in range(rounds):
            training.probe()
            parts.collect()
    times = watch.medians()
    plain = times["bf16 pass"]
    return {
        "ms": times,
        "over_bf16_pass": {name: value / plain for name, value in times.items() if name != "bf16 pass"},
        "statistics_with_reduction_and_drift_over_bf16_pass": sum(
            times[name] for name in ("statistics pass", "reduction", "drift")
        )
        / plain,
        "parts_ms": parts.medians(),
        "output_tokens": recorder.OUTPUT_TOKENS,
    }


def longest_kernels(training: Training, count: int) -> list[dict[str, Any]]:
    """Return the kernels of one update without its noise passes, by total time."""
    from torch.profiler import profile

    with mock.patch.object(training.runner, "_noise_passes", list), profile() as record:
        training.probe()
        synchronize()
    events = sorted(record.key_averages(), key=lambda event: -event.self_device_time_total)
    rows = [(e.key, e.self_device_time_total / 1e3, e.count) for e in events if e.self_device_time_total > 0]
    return [{"kernel": name[:160], "ms": ms, "calls": calls} for name, ms, calls in rows[:count]]


@contextmanager
def one_rank() -> Iterator[None]:
    if not ON_CPU:
        torch.cuda.set_device(0)
    dist.init_process_group("gloo" if ON_CPU else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    torch.manual_seed(1234)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of probes beside a bf16 pass")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--gemm", default="auto", help="GEMM backend")
    parser.add_argument("--formats", default="fp8,fp4", help="candidate formats")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="list the N longest kernels of an update")
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    result = header(arguments.commit) | {
        "shape": {name: getattr(arguments, name) for name in SHAPE},
        "formats": arguments.formats.split(","),
        "transformer_engine": HAVE_TE,
    }
    with one_rank():
        training = Training(arguments)
        training.train(WARM_STEPS)
        result |= measure(training, arguments.rounds)
        if arguments.profile:
            result["kernels"] = longest_kernels(training, arguments.profile)
    write(arguments.out, result)
    for name, ms in result["ms"].items():
        print(f"{name:24s} {ms:10.2f} ms {ms / result['ms']['bf16 pass']:7.3f} of a bf16 pass")
    for name, ms in result["parts_ms"].items():
        print(f"  {name:32s} {ms:10.2f} ms")
    for row in result.get("kernels", []):
        print(f"  {row['ms']:9.3f} ms {row['calls']:6d} × {row['kernel'][:100]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
