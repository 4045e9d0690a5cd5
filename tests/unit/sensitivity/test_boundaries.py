"""Boundaries of the residual stream: what is recorded, and that sharding the tokens changes nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.sensitivity.recorder import Boundary, Pass, TokenShard, local_sample_rows
from snip_megatron.sensitivity.sums import sample_rows

WHOLE = TokenShard(rank=0, size=1, reports=True)
S, B, HIDDEN = 32, 2, 8


def square(t: torch.Tensor) -> float:
    return float(t.double().square().sum())


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
    found = [
        row + shard.first_row(local) for shard in shards for row in local_sample_rows(shard, local, count).tolist()
    ]
    assert found == sample_rows(local * size, count).tolist()


# -- sums ------------------------------------------------------------------------------------------------------
class Sub:
    """A sub-block: h → h + tanh(h·A), and its microbatches with a fixed gradient at the output."""

    def __init__(self, *, backwards: bool = False) -> None:
        self.backwards = backwards
        generator = torch.Generator().manual_seed(3)
        self.a = torch.randn(HIDDEN, HIDDEN, generator=generator)
        self.h = [torch.randn(S, B, HIDDEN, generator=generator) for _ in range(2)]
        self.noise = [torch.randn(S, B, HIDDEN, generator=generator) * 0.1 for _ in range(2)]
        self.top = [torch.randn(S, B, HIDDEN, generator=generator) for _ in range(2)]

    def run(self, low: Boundary, high: Boundary, phase: Pass, tokens: slice) -> None:
        """A pass over the tokens that a rank holds.

        Microbatches run one after the other, or all forward first, as a layer that runs several times in one does.
        """
        low.start(phase)
        high.start(phase)
        ends = []
        for h, noise, top in zip(self.h, self.noise, self.top, strict=True):
            stream = (h + noise if phase is Pass.FORWARD_NOISE else h)[tokens].clone().requires_grad_()
            low.on_forward(stream)
            out = self.out(stream)
            high.on_forward(out)
            ends.append((out, top[tokens]))
            if not self.backwards:
                out.backward(ends.pop()[1])
        for out, gradient in reversed(ends):
            out.backward(gradient)

    def out(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.tanh(h @ self.a)

    def gradient(self, h: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        """By hand: ∂/∂h of ⟨top, h + tanh(h·A)⟩."""
        return top + (top * (1 - torch.tanh(h @ self.a).square())) @ self.a.t()


def probe(
    shard: TokenShard, sample: int, tokens: slice = slice(None), *, backwards: bool = False
) -> tuple[Boundary, Boundary]:
    """All passes over one sub-block between two boundaries."""
    low, high = Boundary(4, shard, sample), Boundary(5, shard, sample)
    sub = Sub(backwards=backwards)
    for phase in Pass:
        sub.run(low, high, phase, tokens)
        if phase is Pass.STATISTICS:
            low.finish_statistics(high)
    return low, high


@pytest.mark.parametrize("sample", [16, S * B])
def test_sums_are_the_definitions(sample: int) -> None:
    low, high = probe(WHOLE, sample)
    sub = Sub()
    plain, noisy = (
        [sub.gradient(h + n * on, top) for h, n, top in zip(sub.h, sub.noise, sub.top, strict=True)] for on in (0, 1)
    )
    rows, weight = sample_rows(S * B, sample), S * B / sample

    def of(values: list[torch.Tensor]) -> float:
        return sum(square(v.reshape(-1, HIDDEN)[rows]) for v in values) * weight

    dots = [(r * n).reshape(-1, HIDDEN)[rows].sum(1) for r, n in zip(plain, sub.noise, strict=True)]
    expected = {
        "h2": of(sub.h),
        "r2": of(plain),
        "branch_h2": of([sub.out(h) - h for h in sub.h]),
        "branch_r2": of([r - top for r, top in zip(plain, sub.top, strict=True)]),
        "cn2": sum(square(d) for d in dots) * weight,
        "fr2": of([n - r for n, r in zip(noisy, plain, strict=True)]),
    }
    assert low.sums.keys() == expected.keys()
    for name, value in expected.items():
        assert float(low.sums[name]) == pytest.approx(value, rel=1e-5), name
    assert "branch_h2" not in high.sums
    assert float(high.sums["r2"]) == pytest.approx(of(sub.top), rel=1e-6)


@pytest.mark.parametrize("sample", [1, 16, S * B])
def test_token_shards_add_up_to_the_whole(sample: int) -> None:
    whole = probe(WHOLE, sample)
    parts = [probe(TokenShard(r, 4, reports=True), sample, slice(r * S // 4, (r + 1) * S // 4)) for r in range(4)]
    for index, boundary in enumerate(whole):
        for name, value in boundary.sums.items():
            total = sum(float(part[index].sums[name]) for part in parts)
            assert total == pytest.approx(float(value), rel=1e-6), name


def test_a_replicated_stream_is_reported_once() -> None:
    low, _ = probe(TokenShard(rank=0, size=1, reports=False), 16)
    assert low.sums == {}


def test_a_layer_may_run_several_times_before_its_backward_passes() -> None:
    once, again = probe(WHOLE, 16), probe(WHOLE, 16, backwards=True)
    for one, other in zip(once, again, strict=True):
        assert {name: float(value) for name, value in other.sums.items()} == pytest.approx(
            {name: float(value) for name, value in one.sums.items()}
        )
