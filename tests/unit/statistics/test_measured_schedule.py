"""The schedule of a measurement: every option once, on and off side by side, all of them in turn."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from snip_megatron.layers.registry import decoder_linear_names
from snip_megatron.precision import Format, Gemm
from snip_megatron.statistics.measured_schedule import (
    IDLE,
    Schedule,
    Trial,
    Unit,
    all_units,
    choose_units,
    plan_trials,
)

FORMATS = ("fp8", "fp4")


def options(trials: tuple[Trial, ...]) -> Counter[tuple[str, Gemm, str]]:
    return Counter((name, t.gemm, t.format.value) for t in trials if t.format is not None for name in t.linears)


@given(st.integers(1, 6))
def test_a_full_plan_forces_every_option_once(layers: int) -> None:
    names = decoder_linear_names(layers)
    trials = plan_trials(names, FORMATS, all_units(names))
    found = options(trials)
    assert set(found) == {(name, gemm, fmt) for name in names for gemm in Gemm for fmt in FORMATS}
    assert set(found.values()) == {1}
    # Nine for a layer's fprops, a nudge among them, nine for its dgrads, and two for all wgrads.
    assert len(trials) == layers * 2 * (1 + 4 * len(FORMATS)) + len(FORMATS)
    assert len({t for t in trials if t.format is None}) == 2 * layers


def test_a_variant_is_forced_on_the_gemms_that_may_run_in_it() -> None:
    names = decoder_linear_names(2)
    formats = ("mxfp8", "nvfp4_46", "nvfp4_hadamard")
    found = options(plan_trials(names, formats, all_units(names)))
    assert set(found) == {(n, g, f) for n in names for f in formats for g in Format(f).gemms}
    assert set(found.values()) == {1}


def test_what_is_skipped_is_not_forced() -> None:
    names = decoder_linear_names(2)
    skip = [(name, Gemm.FPROP) for name in names if ".0." in name] + [(names[5], gemm) for gemm in Gemm]
    trials = plan_trials(names, FORMATS, all_units(names), skip)
    assert not {(name, gemm) for name, gemm, _ in options(trials)} & set(skip)
    assert not any(t.layer == 0 and t.gemm is Gemm.FPROP for t in trials)  # its nudge is left out as well
    assert plan_trials(names, FORMATS, all_units(names), [(n, g) for n in names for g in Gemm]) == ()


@settings(max_examples=60)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 6))
def test_each_trial_has_each_microbatch_on_then_off(count: int, microbatches: int, multiple_of: int) -> None:
    trials = tuple(Trial(Gemm.DGRAD, (name,), Format.FP4) for name in decoder_linear_names(2)[:count])
    numbers = tuple(range(3, 3 + microbatches))
    schedule = Schedule(trials, numbers, multiple_of)
    slots = schedule.slots
    assert len(slots) % multiple_of == 0
    busy = 2 * microbatches * count
    assert len(slots) - busy < multiple_of
    assert all(slot.trial == IDLE and slot.sign == 0 for slot in slots[busy:])
    for on, off in zip(slots[:busy:2], slots[1:busy:2], strict=True):
        assert (on.trial, on.microbatch, on.sign, off.sign) == (off.trial, off.microbatch, 1, -1)
    for number, slot in enumerate(slots[:busy]):
        assert slot.trial == number // schedule.passes_a_trial
    assert Counter((s.trial, s.microbatch) for s in slots[:busy]) == {(t, m): 2 for t in range(count) for m in numbers}


@settings(max_examples=60)
@given(st.integers(1, 8), st.floats(0.01, 1.0), st.integers(0, 2**31))
def test_renewal_comes_round(layers: int, share: float, seed: int) -> None:
    measured_at = dict.fromkeys(all_units(decoder_linear_names(layers)), -1.0)
    each = math.ceil(share * len(measured_at))
    rounds = math.ceil(len(measured_at) / each)
    for update in range(2 * rounds):
        chosen = choose_units(measured_at, share, seed)
        assert len(set(chosen)) == each
        assert chosen == choose_units(dict(reversed(measured_at.items())), share, seed)
        oldest = max(measured_at[unit] for unit in chosen)
        assert all(at >= oldest for unit, at in measured_at.items() if unit not in chosen)
        measured_at |= dict.fromkeys(chosen, float(update))
        if update >= rounds - 1:
            assert min(measured_at.values()) > update - rounds


def test_seeds_choose_different_beginnings() -> None:
    units = dict.fromkeys(all_units(decoder_linear_names(8)), -1.0)
    assert len({tuple(choose_units(units, 0.25, seed)) for seed in range(8)}) > 4


def test_what_a_trial_reaches() -> None:
    fprop, dgrad, wgrad = (Trial(gemm, ("decoder.layers.2.mlp.linear_fc1",), Format.FP4) for gemm in Gemm)
    for layer in range(5):
        assert fprop.reaches(layer, linear=True)
        assert fprop.reaches(layer, linear=False)
        assert dgrad.reaches(layer, linear=True) == dgrad.reaches(layer, linear=False) == (layer <= 2)
        assert wgrad.reaches(layer, linear=True)
        assert not wgrad.reaches(layer, linear=False)
    assert Unit(1, Gemm.FPROP) in all_units(decoder_linear_names(2))
