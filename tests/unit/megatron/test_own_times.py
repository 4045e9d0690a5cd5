"""A run without a table of times: rank 0 times its own GEMMs once, and every later start has the same times."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llama_arguments import WANTED, linears, run_arguments

from snip_megatron.layers.context import LinearState
from snip_megatron.layers.spans import Spans
from snip_megatron.megatron.times import OwnTimes, check_measurable
from snip_megatron.numerics.products.backend import REFERENCE, GemmBackend
from snip_megatron.numerics.products.hopper import HopperBackend
from snip_megatron.numerics.products.scaled import ScaledProducts
from snip_megatron.numerics.quantize import operands
from snip_megatron.precision import Format, Gemm
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.run_data import TIMINGS
from snip_megatron.runtime.run_timings import cache_folder
from snip_megatron.timing.calibration.clock import Call
from snip_megatron.timing.table import STOCK, TimingTable

SMALL = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "kv_channels": 32,
         "seq_length": 64, "micro_batch_size": 1, "global_batch_size": 4}  # fmt: skip
CONFIG = SnipConfig(**WANTED, pin=("*.0.*=nvfp4_46",))
CPU = torch.device("cpu")
LACKING = "('input', <Format.FP8: 'fp8'>, 2)"


class FakeClock:
    """Another time at each measurement, so that times that were not measured again can be told."""

    device = CPU

    def __init__(self, first: float = 1e-3, lacking: str = "") -> None:
        self.next, self.lacking, self.calls = first, lacking, 0

    def seconds[Key: Hashable](self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        self.calls += 1
        if self.lacking in map(str, calls):
            raise torch.OutOfMemoryError("CUDA out of memory")
        found = {}
        for key in calls:
            self.next *= 1.001
            found[key] = float(f"{self.next:.5g}")
        return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "snip_megatron" / "timings"


def own(
    run: Path | None,
    clock: FakeClock | None = None,
    config: SnipConfig = CONFIG,
    backend: GemmBackend = REFERENCE,
    **given: Any,
) -> OwnTimes:
    args = run_arguments(**{**SMALL, **given})
    return OwnTimes(config, args, linears(args).covered, backend, run, CPU, clock)


def test_the_first_start_measures_and_later_ones_find_the_same(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert own(run).known() is None
    measured = own(run, FakeClock()).measure()
    said = capsys.readouterr().out
    assert "snip: timed the GEMMs of this model (4 shapes, bf16, fp8, fp8_tensor, nvfp4) on cpu in" in said
    assert str(run / TIMINGS) in said
    (cached,) = cache.iterdir()
    assert cached.read_bytes() == (run / TIMINGS).read_bytes()
    assert own(run).known() == measured
    assert measured.rest  # of attention and copies, which are timed too
    assert measured.of("decoder.layers.1.mlp.linear_fc1", Gemm.WGRAD, "nvfp4_46") > 0  # a variant: its base is timed
    other = tmp_path / "other"
    assert own(other).known() == measured  # another run of this model, from the cache
    assert (other / TIMINGS).read_bytes() == cached.read_bytes()
    assert own(None).known() == measured


def test_times_of_another_library_are_not_taken() -> None:
    """DeepGEMM that is installed may be loaded by one start and not by the next, which finds no CUDA toolkit."""
    without, having = GemmBackend(), GemmBackend()
    without.products, having.products = (
        HopperBackend(operands, ScaledProducts(None), groups=groups).products for groups in (None, object())
    )
    measured = own(None, FakeClock(), backend=without).measure()
    assert own(None, backend=without).known() == measured
    assert own(None, backend=having).known() is None


def test_a_resume_keeps_the_run_s_own_times(tmp_path: Path, cache: Path) -> None:
    """Whatever stands in the cache by now: maps repeat."""
    run = tmp_path / "run"
    measured = own(run, FakeClock()).measure()
    own(None, FakeClock(first=5e-3)).measure()
    assert own(run).known() == measured
    assert own(None).known() != measured
    for path in cache.iterdir():
        path.unlink()
    assert own(run).known() == measured
    assert not list(cache.iterdir()), "the times of an earlier release are none of this one"


@pytest.mark.parametrize(
    "given",
    [
        {"config": SnipConfig(**WANTED, pin=("*=mxfp8",))},
        {"tensor_model_parallel_size": 1},
        {"micro_batch_size": 2},
    ],
    ids=["format", "shard", "tokens"],
)
def test_other_gemms_are_measured_anew(tmp_path: Path, given: dict[str, Any]) -> None:
    run = tmp_path / "run"
    own(run, FakeClock()).measure()
    assert own(run, **given).known() is None
    again = own(run, FakeClock(first=2e-3), **given).measure()
    assert own(run, **given).known() == again


def test_megatron_s_own_experts_take_what_they_took_in_the_training(tmp_path: Path) -> None:
    """The median of the layers. A later start takes its own, if it has steps of them."""
    experts = {"num_experts": 8, "moe_layer_freq": 1, "moe_router_topk": 2, "moe_ffn_hidden_size": 128,
               "moe_shared_expert_intermediate_size": None, "moe_grouped_gemm": True, "expert_model_parallel_size": 1,
               "transformer_impl": "transformer_engine", "num_layers": 3}  # fmt: skip

    def start(*layers: float, linears: Sequence[str] = ("fc1", "fc2")) -> OwnTimes:
        times = own(tmp_path, FakeClock(), **experts)
        for linear in linears:
            for layer, seconds in enumerate(layers):
                name = f"decoder.layers.{layer}.mlp.experts.linear_{linear}"
                times.spans[name] = span = Spans()
                span.seconds = lambda seconds=seconds: seconds  # type: ignore[method-assign, misc]
        return times

    assert start(7.0, 3.0, 5.0, linears=["fc1"]).measure().stock == {}  # a table has them of all sizes or none
    first, again, resumed = start(7.0, 3.0, 5.0).measure(), start(6.0).renew(), start().renew()
    rows = TimingTable.load(tmp_path / TIMINGS).grouped
    assert [row[STOCK][Format.BF16] for row in rows.values() if STOCK in row] == [5.0, 5.0]
    assert again == replace(first, stock=again.stock)  # those of an earlier start are none of these steps
    assert [again.stock[kind] - longer for kind, longer in first.stock.items()] == pytest.approx([2, 2])  # microbatches
    assert resumed == first  # under a map from its first step on


def test_megatron_s_own_experts_are_timed_until_the_times_are_known(tmp_path: Path) -> None:
    def watched(first_update: FakeClock) -> tuple[OwnTimes, list[LinearState]]:
        times, states = own(tmp_path, first_update), [LinearState(), LinearState()]
        named = zip(("weight0", "weight"), states, strict=True)  # of TEGroupedMLP, and of a shared expert
        handles = [SimpleNamespace(expert=0, parameter=each, name=each, state=state) for each, state in named]
        times.watch(handles)  # type: ignore[arg-type]
        return times, states

    times, (grouped, other) = watched(FakeClock(lacking=LACKING))
    assert isinstance(grouped.spans, Spans)
    assert other.spans is None
    with pytest.raises(SnipError):
        times.measure()
    assert grouped.spans is not None  # the next update tries again
    times.clock = FakeClock()
    times.measure()
    assert grouped.spans is None
    again, (grouped, _) = watched(FakeClock())
    again.renew()
    assert grouped.spans is None


def test_the_times_of_another_card_or_backend_are_not_taken(tmp_path: Path, cache: Path) -> None:
    run = tmp_path / "run"
    own(run, FakeClock()).measure()
    table = TimingTable.load(run / TIMINGS)
    for other in (replace(table, device="NVIDIA H200"), replace(table, backend="hopper")):
        for path in (run / TIMINGS, *cache.iterdir()):
            path.write_text(other.to_json())
        assert own(run).known() is None


def test_a_damaged_file_is_named_and_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    measured = own(run, FakeClock()).measure()
    (run / TIMINGS).write_text('{"schema"')
    assert own(run).known() == measured  # from the cache
    assert f"snip: {run / TIMINGS}: not JSON" in capsys.readouterr().out
    assert TimingTable.load(run / TIMINGS)


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert own(None, FakeClock()).measure().seconds
    said = capsys.readouterr().out
    assert "the times of GEMMs cannot be kept there" in said
    assert "kept in nowhere" in said


def test_a_size_that_cannot_be_timed_is_an_error(tmp_path: Path) -> None:
    clock = FakeClock(lacking=LACKING)
    with pytest.raises(SnipError, match=r"be (timed|measured): .*out of memory"):
        own(tmp_path, clock).measure()
    assert not (tmp_path / TIMINGS).exists()


def test_the_cache_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says that such a path is ignored
    assert cache_folder() == Path("/home/user/.cache/snip_megatron/timings")


@pytest.mark.parametrize("backend", [None, "reference", "emulated"])
def test_emulation_is_not_timed(backend: str | None) -> None:
    with pytest.raises(SnipError, match=r"--snip-budget speedup=1.2 weighs .*, which saves none: give --snip-timings"):
        check_measurable(SnipConfig(**WANTED), backend)
    for config in (
        SnipConfig(**WANTED, timings="h200"),
        SnipConfig(**WANTED, timings="flops"),
        SnipConfig(enabled=True),
    ):
        check_measurable(config, backend)
    check_measurable(SnipConfig(**WANTED), "hopper")
