"""The residual stream of a real GPT model as a probe sees it, and what a call of the schedule leaves behind."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_names import dense_names
from handles import handle_of
from llama_arguments import arguments
from megatron.core.models.gpt.gpt_model import GPTModel
from small_decoder import dense
from torch_attention import TorchAttention

from snip_megatron.layers.context import StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron.host import MegatronStep, StepCall, _note_losses, input_hook, segments_of
from snip_megatron.megatron.model_linears import ModelLinears, built_linears
from snip_megatron.megatron.setup import SnipRun
from snip_megatron.precision import LinearRow
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.host import Host
from snip_megatron.runtime.residual_stream import ResidualStream
from snip_megatron.sensitivity.recorder import Pass, TokenShard
from snip_megatron.sensitivity.reduction import ProbeGroups
from snip_megatron.sensitivity.sums import sample_rows

pytestmark = pytest.mark.usefixtures("model_parallel_of_one")

LAYERS, SEQUENCE, BATCH, HIDDEN = 2, 24, 2, 64
WHOLE = TokenShard(rank=0, size=1, reports=True)


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return dense(TorchAttention, "learned_absolute", hidden_dropout=0.0, bias_dropout_fusion=False)


@dataclass
class Truth:
    """The stream as a plain run of the model's own parts has it: h_0 … h_2L with their gradients."""

    h: list[torch.Tensor] = field(default_factory=list)

    @property
    def r(self) -> list[torch.Tensor]:
        result = [h.grad for h in self.h]
        assert all(r is not None for r in result)
        return [r for r in result if r is not None]


def tokens(microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randint(0, 64, (BATCH, SEQUENCE + 1), generator=generator)


def loss_of(model: GPTModel, microbatch: int) -> torch.Tensor:
    batch = tokens(microbatch)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    per_token = model(batch[:, :-1], positions, None, labels=batch[:, 1:])
    return per_token.sum()


def truth(model: GPTModel, microbatch: int, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Truth:
    """Record inputs of sub-blocks by hooks of torch. Attention's residual is the layer's input, the MLP's what its norm
    reads, and the last boundary what the final norm reads."""
    record = Truth()

    def keep(stream: torch.Tensor) -> None:
        stream.retain_grad()
        record.h.append(stream)

    handles = []
    if change is not None:
        handles.append(model.embedding.register_forward_hook(lambda module, args, out: change(out)))
    norms = [norm for layer in model.decoder.layers for norm in (layer.input_layernorm, layer.pre_mlp_layernorm)]
    norms.append(model.decoder.final_layernorm)
    handles += [norm.register_forward_pre_hook(lambda module, args: keep(args[0])) for norm in norms]
    loss_of(model, microbatch).backward()
    for handle in handles:
        handle.remove()
    return record


def square(t: torch.Tensor, sample: int = SEQUENCE * BATCH) -> float:
    """The sum of squares, estimated from a sample of the tokens."""
    tokens = t.detach().double().reshape(SEQUENCE * BATCH, -1)
    return float(tokens[sample_rows(len(tokens), sample)].square().sum()) * len(tokens) / sample


def probe(model: GPTModel, stream: ResidualStream, phase: Pass, sigma: float = 0.0) -> None:
    stream.start(phase, sigma)
    with stream.attached():
        for microbatch in range(2):
            loss_of(model, microbatch).backward()
    if phase is Pass.STATISTICS:
        stream.finish_statistics(2)


def rows_of(model: GPTModel) -> tuple[LinearRow, ...]:
    return ModelLinears.split((each.row for each in built_linears([model])), {}).covered


def new_stream(model: GPTModel, sample: int = SEQUENCE * BATCH) -> ResidualStream:
    segments = segments_of(model, rows_of(model))
    host = Host(ProbeGroups(None, None), torch.device("cpu"), segments, HIDDEN, WHOLE, (), (), input_hook(model))
    return ResidualStream(host, StepContext(step=4), sample_tokens=sample, seed=6)


samples = pytest.mark.parametrize("sample", [16, SEQUENCE * BATCH])


@samples
def test_boundaries_are_the_residual_stream(model: GPTModel, sample: int) -> None:
    stream = new_stream(model, sample)
    probe(model, stream, Pass.STATISTICS)
    assert [boundary.index for boundary in stream.reported] == list(range(2 * LAYERS + 1))
    runs = [truth(model, microbatch) for microbatch in range(2)]
    for b, boundary in enumerate(stream.reported):
        expected = {name: sum(square(getattr(run, name[0])[b], sample) for run in runs) for name in ("h2", "r2")}
        if b < 2 * LAYERS:
            expected["branch_h2"] = sum(square(run.h[b + 1] - run.h[b], sample) for run in runs)
            expected["branch_r2"] = sum(square(run.r[b] - run.r[b + 1], sample) for run in runs)
        assert boundary.sums.keys() == expected.keys()
        for name, value in expected.items():
            assert float(boundary.sums[name]) == pytest.approx(value, rel=1e-5), (b, name)


@samples
def test_forward_noise_enters_at_the_embedding_and_is_compared_at_every_boundary(model: GPTModel, sample: int) -> None:
    stream, sigma = new_stream(model, sample), 0.01
    probe(model, stream, Pass.STATISTICS)
    probe(model, stream, Pass.FORWARD_NOISE, sigma)
    # The same noise, added by hand: the stream's own draw of microbatch 0 and 1.
    again = new_stream(model)
    again.start(Pass.FORWARD_NOISE, sigma)
    draws = [again._draw(torch.zeros(SEQUENCE, BATCH, HIDDEN)) for _ in range(2)]
    assert not torch.equal(draws[0], draws[1])
    assert float(torch.cat(draws).std()) == pytest.approx(sigma, rel=0.05)
    plain = [truth(model, m) for m in range(2)]
    noisy = [truth(model, m, lambda out, m=m: out + draws[m]) for m in range(2)]
    for b, boundary in enumerate(stream.reported):
        pairs = list(zip(plain, noisy, strict=True))
        dots = [(p.r[b] * (n.h[b] - p.h[b])).detach().double().sum(-1) for p, n in pairs]
        expected = {"fr2": sum(square(n.r[b] - p.r[b], sample) for p, n in pairs)}
        expected["cn2"] = sum(square(d, sample) for d in dots)
        for name, value in expected.items():
            assert float(boundary.sums[name]) == pytest.approx(value, rel=1e-3), (b, name)


def test_tokens_that_are_embedded_again_get_no_noise(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron embeds them again to predict two further tokens on the same stage."""
    monkeypatch.setattr(model, "mtp_process", True)
    monkeypatch.setattr(model.config, "mtp_num_layers", 2)
    enter = input_hook(model)
    handle = enter(lambda out: out + 1)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    embeddings = [model.embedding(tokens(0)[:, 1:], positions) for _ in range(6)]
    handle.remove()
    plain = model.embedding(tokens(0)[:, 1:], positions)
    assert [torch.equal(out, plain + (call % 3 == 0)) for call, out in enumerate(embeddings)] == [True] * 6


class Attention(torch.nn.Module):
    """Keeps the largest logits until Megatron clips by them after the step, as Transformer Engine's attention does."""

    current_max_attn_logits: torch.Tensor | None = None

    def forward(self, logits: torch.Tensor) -> None:
        maximum = self.current_max_attn_logits
        self.current_max_attn_logits = logits if maximum is None else torch.max(maximum, logits)


class Chunk(torch.nn.Sequential):
    def zero_grad_buffer(self) -> None: ...

    def no_sync(self) -> Any:
        return contextlib.nullcontext()


def test_attention_logits_of_a_probe_do_not_clip_the_step() -> None:
    """Under --qk-clip the larger logits of a noise pass would clip more."""
    fresh, used = Attention(), Attention()
    used(torch.tensor([1.0, 3.0]))

    def schedule(model: list[Chunk], **_: Any) -> None:
        for attention in model[0]:
            attention(torch.tensor([2.0, 2.0]))

    optimizer = SimpleNamespace(zero_grad=lambda: None)
    call = StepCall(3, lambda: None, None, [Chunk(fresh, used)], optimizer, None, schedule, num_microbatches=1)
    args = SimpleNamespace(seq_length=8, micro_batch_size=1)
    MegatronStep(call, args, ProbeGroups(None, None)).schedule([0])  # type: ignore[arg-type]
    assert fresh.current_max_attn_logits is None
    assert used.current_max_attn_logits.tolist() == [1.0, 3.0]


def test_losses_of_tokens_are_noted_with_those_that_count() -> None:
    output, mask = torch.rand(2, 3), torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    result: list[tuple[torch.Tensor, torch.Tensor]] = []
    loss, tokens, _ = _note_losses(result, lambda o: ((o * mask).sum(), mask.sum().int(), {}), output)
    ((losses, counts),) = result
    assert (torch.equal(losses, output), torch.equal(counts, mask.bool())) == (True, True)
    assert (loss.requires_grad, int(tokens)) == (False, 4)


def test_a_step_that_megatron_repeats_rounds_as_before() -> None:
    """The index of a backward in its step enters the keys of stochastic rounding."""
    run = SnipRun(SnipConfig(enabled=True), arguments())
    registry = LinearRegistry([LinearRow(name, 0, 1, 1) for name in dense_names(1)], StepContext())
    handle = handle_of("decoder.layers.0.mlp.linear_fc1", context=registry.context)
    registry.add(handle)
    run._registry = registry
    indices: list[tuple[int, int]] = []

    def two_microbatches(*, losses: str) -> str:
        for _ in range(2):
            indices.append((registry.context.step, handle.state.backwards))
            handle.state.backwards += 1
        return losses

    registry.start_step(3)
    schedule = run.repeatable(two_microbatches, 3)
    assert [schedule(losses=name) for name in ("first", "again")] == ["first", "again"]
    assert indices == [(3, 0), (3, 1)] * 2
