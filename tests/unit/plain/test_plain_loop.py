"""SNIP in a plain torch loop: what it measures, what it leaves alone, what it chooses and what it refuses."""

import contextlib
import copy
import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from snip_megatron.plain import PlainSnip, convert
from snip_megatron.precision import Format, Gemm, PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.reporting.summary import summarise
from snip_megatron.runtime.run_data import load_run
from snip_megatron.runtime.state import ControllerState

ROOT = Path(__file__).resolve().parents[3]


def load(name: str) -> Any:
    """Return a script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_example", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load("plain_loop")


class Training:
    """The example's model, trained step by step. ``block`` is the class of its blocks."""

    def __init__(self, block: Any = None, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = example.Model()
        if block is not None:
            self.model.blocks = nn.ModuleList(block() for _ in range(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.snip = convert(self.model, self.optimizer, **options) if options else None
        self.batches = example.batches(40)

    def resumed(self, **options: Any) -> "Training":
        """Another training from a checkpoint of this one."""
        again = Training(**options)
        for name in ("model", "optimizer", "snip"):
            getattr(again, name).load_state_dict(copy.deepcopy(getattr(self, name).state_dict()))
        return again

    def loss(self, step: int) -> torch.Tensor:
        batch = self.batches[step]
        logits = self.model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def run(self, steps: range, *, records: bool = False) -> list[float]:
        losses = []
        for step in steps:
            if self.snip is not None:
                self.snip.step(lambda step=step: self.loss(step))
            self.optimizer.zero_grad()
            value = self.loss(step)
            value.backward()
            self.optimizer.step()
            losses.append(value.item())
            if self.snip is not None and records:
                self.snip.record(value)
        return losses


@pytest.fixture(scope="module")
def trained() -> tuple[Training, list[float]]:
    adopted: list[tuple[int, int]] = []

    def on_adopt(step: int, precision_map: PrecisionMap) -> None:
        adopted.append((step, precision_map.version))
        raise ValueError("the user's own fault")

    training = Training(budget="fp4=0.75", first_update=6, update_interval=9, on_adopt=on_adopt)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        losses = training.run(range(18))
    assert adopted == [(6, 1), (15, 2)]
    assert printed.getvalue().count("the user's own fault; training goes on") == 1
    return training, losses


def test_maps_meet_the_budget_and_the_model_learns(trained: tuple[Training, list[float]]) -> None:
    training, losses = trained
    snip = training.snip
    assert isinstance(snip, PlainSnip)
    assert snip.map.version == 2
    assert snip.map.status == "optimal"
    flops = {h.name: h.n * h.k for h in snip.registry}
    low = sum(flops[name] for name in flops for gemm in Gemm if snip.map.format_of(name, gemm) is Format.FP4)
    assert low / (3 * sum(flops.values())) >= 0.75
    for handle in snip.registry:
        assert handle.formats == tuple(snip.map.format_of(handle.name, gemm) for gemm in Gemm)
    assert losses[-1] < losses[0] - 1.0


def test_before_the_first_update_everything_is_bitwise_as_without(trained: tuple[Training, list[float]]) -> None:
    _, losses = trained
    plain = Training().run(range(10))
    assert losses[:6] == plain[:6]
    assert losses[6:10] != plain[6:]  # the map of step 6 is in force


def test_an_update_leaves_weights_gradients_buffers_and_random_states_alone() -> None:
    training = Training(first_update=3, update_interval=100)
    training.run(range(3))
    model = training.model
    model.register_buffer("counter", torch.zeros(1))
    head = training.snip, list(model.parameters())
    for p in head[1]:
        p.grad = torch.full_like(p, 0.5)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    grads = [p.grad for p in head[1]]

    def loss() -> torch.Tensor:
        model.get_buffer("counter").add_(1)
        return training.loss(3) + 0 * torch.rand(())

    assert training.snip.step(loss)
    assert torch.equal(torch.get_rng_state(), before[1])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name]), name
    assert all(p.grad is g for p, g in zip(head[1], grads, strict=True))
    assert all(bool((g == 0.5).all()) for g in grads if g is not None)


@pytest.mark.parametrize(("factor", "why"), [(float("nan"), "not finite"), (0.0, "no gradient")])
def test_an_update_without_finite_gradients_is_dropped(
    factor: float, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss mask may leave out all tokens of a batch: every option would score zero."""
    training = Training(budget="fp4=0.75", first_update=1, update_interval=2)
    training.run(range(3))
    assert not training.snip.step(lambda: training.loss(3) * factor)
    assert training.snip.map.version == 1
    assert f"the update of step 3 is dropped: {why}" in capsys.readouterr().out
    training.run(range(4, 5))
    assert training.snip.map.version == 2


def test_the_table_holds_the_norms_that_autograd_gives() -> None:
    """X, W, G, ∇W and the residual stream of every linear, by hooks of torch alone."""
    training = Training(first_update=4, update_interval=100, estimator="noise")
    training.run(range(4))
    model, norms, stream = training.model, {}, []
    linears = [m for block in model.blocks for m in (block.qkv, block.proj, block.up, block.down)]
    hooks = []
    for i, module in enumerate(linears):

        def note(m: nn.Module, args: Any, output: torch.Tensor, i: int = i) -> None:
            norms["x", i] = float(args[0].double().square().sum())
            output.register_hook(lambda g: norms.__setitem__(("g", i), float(g.double().square().sum())))

        hooks.append(module.register_forward_hook(note))
    hooks += [b.register_forward_pre_hook(lambda m, a: stream.append(float(a[0].square().sum()))) for b in model.blocks]
    training.optimizer.zero_grad()
    training.loss(4).backward()
    for hook in hooks:
        hook.remove()
    gradients = [float(m.weight.grad.double().square().sum()) for m in linears]
    training.snip.step(lambda: training.loss(4))
    table = training.snip.table
    count = len(linears)
    assert [row.id.path for row in table.linears] == ["qkv", "proj", "up", "down"] * 3
    assert [row.role for row in table.linears] == ["reads", "writes"] * 6
    assert [row.sub_block for row in table.linears] == [b for b in range(6) for _ in range(2)]
    np.testing.assert_allclose(table.linear["x2"], [norms["x", i] for i in range(count)], rtol=1e-4)
    np.testing.assert_allclose(table.linear["g2"], [norms["g", i] for i in range(count)], rtol=1e-4)
    np.testing.assert_allclose(table.linear["gw2"], gradients, rtol=1e-4)
    np.testing.assert_allclose(
        table.linear["w2"], [float(m.weight.double().square().sum()) for m in linears], rtol=1e-4
    )
    np.testing.assert_allclose(table.boundary["h2"][0:6:2], stream, rtol=1e-4)
    assert table.tokens == 8 * example.LENGTH
    assert (table.linear["fg2"] > 0).all()  # the noise pass moved every gradient
    assert (table.arrays["drift2"] > 0).all()
    assert (table.arrays["sink_drift2"][:, -1] > 0).all()
    assert {row.name for row in table.sinks} >= {"embedding.tokens", "decoder.norm", "decoder.norm_5.0"}


def test_a_resumed_loop_is_bitwise_the_uninterrupted_one() -> None:
    options = {"first_update": 3, "update_interval": 5}
    whole = Training(**options)
    losses = whole.run(range(12))
    first = Training(**options)
    first.run(range(6))
    assert first.resumed(**options).run(range(6, 12)) == losses[6:]


def test_the_run_directory_has_losses_and_times_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They go on over a checkpoint, and the summary reads them."""
    options = {"first_update": 8, "update_interval": 100, "dir": str(tmp_path / "run"), "steps": 20}
    first = Training(**options)
    losses = first.run(range(12), records=True)
    saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), first.snip.state_dict()))
    first.snip.close()
    second = Training(**options)
    for target, state in zip((second.model, second.optimizer, second.snip), saved, strict=True):
        target.load_state_dict(state)
    losses += second.run(range(12, 20), records=True)
    second.snip.close()
    run = load_run(tmp_path / "run")
    assert [row["loss"] for row in run.metrics] == losses
    assert [row["step"] for row in run.metrics] == list(range(20))
    assert all(0 < row["step_s"] < 100 for row in run.metrics)
    summary = summarise(run)
    assert summary.total_steps == summary.steps == 20
    assert sum(stretch.timed for stretch in summary.maps) > 10
    assert (tmp_path / "run" / "report.html").exists()
    said = capsys.readouterr().out
    assert f"snip: report: {tmp_path / 'run' / 'report.html'}" in said
    with pytest.raises(SnipError, match=r"record\(\) ends a step"):
        second.snip.record(1.0)
    state = second.snip.state_dict()  # that of the end, which a checkpoint may hold
    assert ControllerState.from_bytes(state["state"].encode()).precision_map == second.snip.map
    second.run(range(20, 22), records=True)
    second.snip.close()
    assert [row["step"] for row in load_run(tmp_path / "run").metrics] == list(range(22))


def test_the_guard_takes_a_map_back_under_which_recorded_losses_spike(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(first_update=12, update_interval=100)
    training.run(range(15), records=True)
    assert training.snip.map.version == 1
    for _ in range(5):
        training.snip.step(lambda: training.loss(15))
        training.snip.record(float("nan"))
    assert training.snip.map.version == 0
    assert "the guard has taken back map 1" in capsys.readouterr().out


def test_the_first_update_and_the_optimizer_are_checked() -> None:
    model = example.Model()
    adam = torch.optim.AdamW(model.parameters())
    for options in ({"first_update": 60}, {"steps": 3}):
        with pytest.raises(SnipError, match=r"first_update=\d+: a training of steps=\d+ ends before its first update"):
            convert(model, adam, **{"steps": 50, **options})
    other = torch.optim.AdamW([*model.blocks[0].parameters(), *example.Model().parameters()])
    with pytest.raises(SnipError, match=r"does not hold 8 of the 12 weights .* first decoder.layers.1.qkv"):
        convert(model, other)
    assert type(model.blocks[0].qkv) is nn.Linear
    for block in model.blocks[1:]:
        block.requires_grad_(False)
    assert convert(model, other, steps=50)._config.first_update == 5


def test_autocast_quantises_in_its_dtype() -> None:
    training = Training(policy="uniform-fp8")
    with torch.autocast("cpu", torch.bfloat16):
        result = training.model.blocks[0](torch.randn(2, 8, example.HIDDEN))
        quantised = training.loss(0)
    assert result.dtype is torch.float32  # the residual stream, as without SNIP
    quantised.backward()
    grad = training.model.blocks[0].qkv.weight.grad
    assert grad.dtype is torch.float32
    plain = Training()
    with torch.autocast("cpu", torch.bfloat16):
        value = plain.loss(0)
    value.backward()
    other = plain.model.blocks[0].qkv.weight.grad
    assert value.item() != quantised.item()
    assert torch.nn.functional.cosine_similarity(grad.flatten(), other.flatten(), dim=0) > 0.98


# -- refusals ------------------------------------------------------------------------------------------------------
def _wrapped() -> nn.Module:
    """A model inside a wrapper that convert() does not know."""
    wrapper = type("FullyShardedDataParallel", (nn.Module,), {})()
    wrapper.module = example.Model()
    return wrapper


def _shared() -> nn.Module:
    """A model with one block twice."""
    model = example.Model()
    model.blocks[2] = model.blocks[0]
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (_wrapped(), {}, "the model is wrapped by FSDP1; use fully_shard"),
        (_shared(), {}, r"decoder.layers.2.qkv is also decoder.layers.0.qkv"),
        (nn.Linear(4, 4), {}, "no blocks found in Linear"),
        (example.Model(), {"budget": "speedup=1.2"}, "takes budget=.fp4=SHARE"),
        (example.Model(), {"budget": "fp4=0.9", "pin": ("*=fp8",)}, "budget='fp4=0.9' is unreachable with formats="),
        (example.Model(), {"colour": "blue"}, "unknown option colour="),
        (example.Model(), {"probe_microbatches": 5}, "probe_microbatches= has no effect in a plain loop"),
        (example.Model(), {"stage_tolerance": "none"}, "stage_tolerance= has no effect in a plain loop"),
        (example.Model(), {"schedule": "auto"}, "schedule='auto' is not supported in a plain loop"),
        (example.Model(), {"policy": "late-all"}, "policy='late-all' is not supported in a plain loop"),
    ],
)
def test_what_cannot_work_is_one_line(model: nn.Module, options: dict[str, Any], message: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(SnipError, match=message) as caught:
        convert(model, optimizer, **options)
    assert "\n" not in str(caught.value)


class PostNorm(example.Block):
    """A block whose norms follow attention and MLP."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.proj(self.qkv(x)[..., : example.HIDDEN]))
        return self.norm2(x + self.down(self.up(x)))


class Parallel(example.Block):
    """A block whose attention and MLP read the same stream, each through its norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.qkv(self.norm1(x))[..., : example.HIDDEN]) + self.down(self.up(self.norm2(x)))


def test_attention_beside_the_mlp_is_one_branch() -> None:
    training = Training(Parallel, first_update=0)
    training.run(range(1))
    places = {row.id.path: (row.sub_block, row.role) for row in training.snip.registry.rows if row.id.layer == 1}
    assert places == {"qkv": (1, "reads"), "proj": (1, "between"), "up": (1, "reads"), "down": (1, "writes")}
    assert training.snip.table.boundary["branch_h2"][:2].all()
    assert training.snip.map.version == 1


def test_blocks_that_cannot_be_measured_are_refused_at_the_first_step() -> None:
    training = Training(PostNorm, first_update=5)
    with pytest.raises(SnipError, match="qkv runs before any norm"):
        training.run(range(1))
    training.snip = convert(copy.deepcopy(training.model), training.optimizer, policy="uniform-fp8")
    training.run(range(1))  # a fixed map needs no measurement


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "AdamW with amsgrad="),
        (torch.optim.AdamW, {"maximize": True}, "AdamW with maximize="),
        (torch.optim.Adam, {"weight_decay": 0.1}, "Adam with weight_decay="),
        (torch.optim.RMSprop, {}, "RMSprop"),
    ],
)
def test_an_optimizer_whose_update_is_another_one_is_refused(kind: Any, options: Any, message: str) -> None:
    model = example.Model()
    optimizer = kind([{"params": model.blocks.parameters()}, {"params": model.norm.parameters(), **options}])
    with pytest.raises(SnipError, match=f"optimizer {message}"):
        convert(model, optimizer, estimator="noise")
    convert(model, optimizer)


def test_a_block_that_runs_twice_is_refused_and_the_model_stays_whole() -> None:
    training = Training(first_update=1, update_interval=10)
    training.run(range(1))
    with pytest.raises(SnipError, match="sub-block 0 ran 2 times forward"):
        training.snip.step(lambda: training.loss(1) + training.loss(2))
    assert not training.snip.registry.context.probing
    assert all(handle.state.recorder is None for handle in training.snip.registry)
    training.run(range(2, 4))
