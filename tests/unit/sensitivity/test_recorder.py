"""What a probe records of linears, against the definitions of the columns in float64; boundaries: megatron/test_host"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from handles import handle_of
from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.numerics.quantize import fake_quantize
from snip_megatron.precision import LinearId, LinearRow
from snip_megatron.sensitivity.quantization_error import squared_errors
from snip_megatron.sensitivity.recorder import LinearRecorder, Pass, TokenShard, directly, local_sample_rows
from snip_megatron.sensitivity.reduction import (
    PartialTable,
    ProbeGroups,
    add_loss_effects,
    reduce_columns,
    reduce_loss_effects,
)
from snip_megatron.sensitivity.sums import sample_rows

pytestmark = pytest.mark.usefixtures("one_rank")
FORMATS = ("fp8", "fp4")
T, N, K = 256, 256, 384
CONTEXT = StepContext(step=3, seed=21, dp_size=2, dp_rank=1)
COLUMN, ROW = LinearId("decoder", 1, "mlp.linear_fc1"), LinearId("decoder", 1, "mlp.linear_fc2")


@dataclass
class Microbatch:
    """X [T, K], W [N, K], G [T, N], whole, bf16."""

    x: torch.Tensor
    w: torch.Tensor
    g: torch.Tensor

    @property
    def d(self) -> torch.Tensor:
        return self.g @ self.w


def microbatches(count: int = 2, tokens: int = T) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(8)
    w = (torch.randn(N, K, generator=generator) / 16).bfloat16()
    scale = torch.rand(K, generator=generator).mul(4).exp()
    return [
        Microbatch(
            (torch.randn(tokens, K, generator=generator) * scale).bfloat16(),
            w,
            (
                torch.randn(tokens, N, generator=generator) * torch.rand(tokens, 1, generator=generator) * 1e-3
            ).bfloat16(),
        )
        for _ in range(count)
    ]


def place(linear: LinearId, rank: int = 0, size: int = 1, **features: torch.Tensor) -> LinearHandle:
    fields: dict[str, Any] = {"parallel": "column" if linear is COLUMN else "row", "tp_rank": rank, "tp_size": size}
    return handle_of(linear, N, K, CONTEXT, **fields, **features)


def record(recorder: LinearRecorder, index: int, *tensors: torch.Tensor) -> None:
    """Record microbatch ``index`` as a backward does, which counts itself first."""
    recorder.handle.state.backwards = index + 1
    recorder.on_backward(*tensors)


def recorded(linear: LinearId, batches: list[Microbatch], samples: int) -> LinearRecorder:
    """Return what a single rank records of a linear."""
    recorder = LinearRecorder(place(linear), FORMATS, samples)
    for i, b in enumerate(batches):
        d = b.g.float() @ b.w.float()
        record(recorder, i, b.x, b.w, b.g, d, d)
    return recorder


def square(t: torch.Tensor) -> float:
    return float(t.double().square().sum())


def errors_of_g(g: torch.Tensor, fmt: str, axis: int) -> torch.Tensor:
    """Expected (Q(G) − G)², as training rounds it."""
    return squared_errors(g, fmt, axis=axis, stochastic=True).double()


def definitions(batches: list[Microbatch], samples: int) -> dict[str, Any]:
    """The columns as docs/how-it-works.md defines them."""
    rows = [sample_rows(len(b.x), samples) for b in batches]
    weight = len(batches[0].x) / len(rows[0])
    w = batches[0].w.double()
    columns: dict[str, Any] = {
        "x2": sum(square(b.x) for b in batches),
        "w2": square(w),
        "g2": sum(square(b.g) for b in batches),
        "d2": sum(square(b.d) for b in batches),
        "s2": sum(float((b.g.double().square().sum(1) * b.x.double().square().sum(1)).sum()) for b in batches),
        "xs2": sum(square(b.x[r]) for b, r in zip(batches, rows, strict=True)) * weight,
        "gs2": sum(square(b.g[r]) for b, r in zip(batches, rows, strict=True)) * weight,
        "y2": sum(square(b.x.double() @ w.t()) for b in batches),
    }
    for column in ("dx_row2", "dx_col2", "dw2", "dg_row2", "dg_col2", "e2", "c2"):
        columns[column] = np.zeros(len(FORMATS))
    for f, fmt in enumerate(FORMATS):
        qw = fake_quantize(batches[0].w, fmt, block=True).double()
        columns["dw2"][f] = square(qw - w)
        for b in batches:
            qx = fake_quantize(b.x, fmt).double()
            error = qx @ qw.t() - b.x.double() @ w.t()
            columns["dx_row2"][f] += square(qx - b.x.double())
            columns["dx_col2"][f] += square(fake_quantize(b.x, fmt, axis=0).double() - b.x.double())
            columns["dg_row2"][f] += float(errors_of_g(b.g, fmt, -1).sum())
            columns["dg_col2"][f] += float(errors_of_g(b.g, fmt, 0).sum())
            columns["e2"][f] += square(error)
            columns["c2"][f] += float((b.g.double() * error).sum(1).square().sum())
    return columns


def alone() -> ProbeGroups:
    return ProbeGroups(tp=None, dp=None)


def table_of(row: LinearRow, *recorders: LinearRecorder, groups: ProbeGroups | None = None) -> PartialTable:
    """The table's row of a linear, summed over recorders."""
    table = PartialTable((row,), FORMATS, ())
    reduce_loss_effects(recorders, groups or alone(), directly)
    add_loss_effects(table, recorders)
    assert not any(recorder.dots for recorder in recorders)
    for recorder in recorders:
        table.add_recorder(recorder, dp_rank=0)
    table.pack(torch.device("cpu")).reduce()
    return table


# -- one rank --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("linear", [COLUMN, ROW], ids=["column", "row"])
@pytest.mark.parametrize("samples", [64, 10_000])
def test_sums_are_the_definitions(linear: LinearId, samples: int) -> None:
    batches = microbatches()
    recorder = recorded(linear, batches, samples)
    arrays = table_of(LinearRow(str(linear), 0, N, K), recorder).arrays
    actual = {name.rpartition(".")[2]: array[0] for name, array in arrays.items() if array.any()}
    expected = definitions(batches, samples)
    if linear is ROW:  # partial over ranks there: completed from other columns in the table
        expected = {name: value for name, value in expected.items() if name not in ("y2", "e2")}
    assert actual.keys() == expected.keys()
    expected["d2"] = sum(square(b.g.double() @ b.w.double()) for b in batches)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=2e-5, err_msg=name)


def test_formats_of_one_scale_a_tensor_keep_it_in_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest element is in a token that is not sampled: E is still that of the whole tensor's scale."""
    recorders = []
    (b,) = microbatches(1)
    b.x[1, 5] = 4096.0
    for tokens in (64, T):
        monkeypatch.setattr("snip_megatron.sensitivity.recorder.OUTPUT_TOKENS", tokens)
        recorder = LinearRecorder(place(COLUMN), ("fp8_tensor",), 32)
        record(recorder, 0, b.x, b.w, b.g, b.d, b.d)
        recorders.append(recorder)
    sampled, whole = (recorder.dots[0].values for recorder in recorders)
    torch.testing.assert_close(sampled, whole[:, ::4], rtol=1e-4, atol=1e-4 * float(whole.abs().median()))


def test_column_norms() -> None:
    batches = microbatches()
    recorder = recorded(COLUMN, batches, 64)
    close = {"rtol": 1e-6, "atol": 0.0}
    torch.testing.assert_close(recorder.x_cols, sum(b.x.double().square().sum(0) for b in batches), **close)
    torch.testing.assert_close(recorder.g_cols, sum(b.g.double().square().sum(0) for b in batches), **close)
    for f, fmt in enumerate(FORMATS):
        dx = [fake_quantize(b.x, fmt, axis=0).double() - b.x.double() for b in batches]
        torch.testing.assert_close(recorder.dx_cols[f], sum(e.square().sum(0) for e in dx), **close)
        torch.testing.assert_close(recorder.dg_cols[f], sum(errors_of_g(b.g, fmt, 0).sum(0) for b in batches), **close)


def test_noise_passes_compare_with_the_statistics_pass_microbatch_by_microbatch() -> None:
    batches = microbatches()
    recorder = recorded(COLUMN, batches, 32)
    changed = [Microbatch(b.x + i + 1, b.w, b.g * (1 + 0.1 * (i + 1))) for i, b in enumerate(batches)]
    before = {name: value.clone() for name, value in recorder.sums.items()}
    rows = sample_rows(T, 32)
    fx2 = sum(square((c.x.float() - b.x.float())[rows]) for b, c in zip(batches, changed, strict=True)) * T / 32
    g2 = sum(square((c.g.float() - b.g.float())[rows]) for b, c in zip(batches, changed, strict=True)) * T / 32
    recorder.start(Pass.FORWARD_NOISE)
    for i, c in enumerate(changed):
        record(recorder, i, c.x, c.w, c.g, c.d, c.d)
    assert float(recorder.sums["fx2"]) == pytest.approx(fx2, rel=1e-6)
    assert float(recorder.sums["fg2"]) == pytest.approx(g2, rel=1e-6)
    assert all(torch.equal(recorder.sums[name], value) for name, value in before.items())


# -- experts ---------------------------------------------------------------------------------------------------
def expert(number: int, weight: torch.Tensor) -> LinearRecorder:
    handle = place(LinearId("decoder", 1, "mlp.experts.linear_fc1"))
    handle = replace(handle, parallel="column", expert=number, module=torch.nn.Linear(K, N, bias=False))
    with torch.no_grad():
        handle.module.weight.copy_(weight)
    return LinearRecorder(handle, FORMATS, 64)


def test_a_microbatch_without_tokens_changes_nothing() -> None:
    (b,) = microbatches(1, tokens=200)
    none = torch.empty(0, K).bfloat16(), b.w, torch.empty(0, N).bfloat16()
    plain, mixed = expert(0, b.w), expert(0, b.w)
    record(plain, 0, b.x, b.w, b.g, b.d, b.d)
    record(mixed, 0, *none, none[0], none[0])
    record(mixed, 1, b.x, b.w, b.g, b.d, b.d)
    assert torch.equal(mixed.local_expert_sums(), plain.local_expert_sums())
    assert plain.local_expert_sums()[3] == 200
    row = LinearRow(plain.handle.name, 0, N, K)
    for (name, value), other in zip(
        table_of(row, plain).arrays.items(), table_of(row, mixed).arrays.values(), strict=True
    ):
        np.testing.assert_array_equal(other, value, err_msg=name)


def test_experts_share_a_row_and_keep_columns_of_their_own() -> None:
    """One expert is busy, and one gets no token. Sums are over both, column norms are of each."""
    (b,) = microbatches(1, tokens=T)
    busy, idle = expert(0, b.w), expert(3, 2 * b.w)
    record(busy, 0, b.x, b.w, b.g, b.d, b.d)
    groups = ProbeGroups(tp=None, dp=None, experts=ProbeGroups(tp=None, dp=None))
    assert groups.of(busy.handle) is groups.experts
    assert groups.of(place(COLUMN)) is groups
    reduce_columns([busy, idle], groups, directly)
    assert not idle.expert_sums.any()
    assert busy.expert_sums.tolist() == [float(busy.sums[n]) for n in ("x2", "g2", "s2")] + [T]
    assert (idle.x_cols.shape, idle.dg_cols.shape) == ((K,), (len(FORMATS), N))
    record(idle, 0, torch.empty(0, K), 2 * b.w, torch.empty(0, N), torch.empty(0, K), torch.empty(0, K))
    row = LinearRow("decoder.layers.1.mlp.experts.linear_fc1", 0, N, K, experts=4, active=2)
    table = table_of(row, busy, idle, groups=groups)
    expected = definitions([b], 64)
    name = row.name
    assert table.linear(name, "w2") == pytest.approx(5 * expected["w2"])
    assert table.linear(name, "x2") == pytest.approx(expected["x2"], rel=1e-6)
    assert table.to_table(step=0, tokens=T, tokens_per_step=T, meta={}).linears == (row,)
    assert (row.elements, row.flops) == (4.0 * N * K, 2.0 * 2 * N * K)


# -- sampling --------------------------------------------------------------------------------------------------
@given(total=st.integers(0, 5000), count=st.integers(1, 600))
def test_sampled_rows_are_distinct_in_range_and_spread(total: int, count: int) -> None:
    rows = sample_rows(total, count)
    assert len(rows) == min(total, count)
    assert len(set(rows.tolist())) == len(rows)
    if len(rows):
        assert int(rows[0]) == 0
        assert total - int(rows[-1]) <= -(-total // len(rows))  # the gap after the last is no larger than others
        assert int(rows.diff().max() - rows.diff().min()) <= 1 if len(rows) > 1 else True


@given(local=st.integers(0, 300), size=st.integers(1, 8), count=st.integers(1, 600))
def test_shards_sample_what_the_whole_samples(local: int, size: int, count: int) -> None:
    shards = [TokenShard(rank, size, reports=True) for rank in range(size)]
    result = [
        row + shard.first_row(local) for shard in shards for row in local_sample_rows(shard, local, count).tolist()
    ]
    assert result == sample_rows(local * size, count).tolist()
