"""Checks before training whether the host can launch steps as fast as a ``speedup=`` budget promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from snip_megatron.planner.host import REMEDY
from snip_megatron.precision import Format, Gemm
from snip_megatron.sensitivity.times import OptionTimes

_WORTH_SAYING = 0.02  # of the step speedup


def host_limit(times: OptionTimes, stages: Mapping[str, int], speedup: float, formats: Sequence[str]) -> str | None:
    """Return one line if the host cannot launch steps as fast as the GPU times of a ``speedup=`` budget promise.

    The launching time is a lower bound over all maps that meet the budget. It assumes that only the fewest GEMMs that
    can save the wanted time are quantised, and that their format is the one that adds least to the launching time.

    Args:
        times: predicted times of the run.
        stages: name of a linear → pipeline stage.
        speedup: the wanted speedup of the linears on the slowest stage.
        formats: the candidate formats.

    Returns:
        The line. None if the host is fast enough, if its time is not modelled, or if the time of the rest of the step
        is not known.
    """
    linears = times.linears(stages)
    if times.host is None or not linears or not set(linears) <= set(times.rest):
        return None
    most = max(linears.values()) / speedup
    gpu = max(times.rest[k] + min(seconds, most) for k, seconds in linears.items())
    host = max(
        times.host.stages.get(k, 0.0)
        + _least_added(times, [n for n, s in stages.items() if s == k], seconds - most, formats)
        for k, seconds in linears.items()
    )
    before = max(max(times.rest[k] + seconds, times.host.stages.get(k, 0.0)) for k, seconds in linears.items())
    gpu_before = max(times.rest[k] + seconds for k, seconds in linears.items())
    promised, possible = gpu_before / gpu, before / max(gpu, host)
    start = f"--snip-budget speedup={speedup:g} promises steps {promised:.2f} × as fast as in bf16, and"
    if possible < promised * (1.0 - _WORTH_SAYING):
        return (
            f"{start} the host allows at most {possible:.2f} ×: launching a step takes it {host:.3g} s, the GPU would"
            f" take {gpu:.3g} s; {REMEDY}"
        )
    if gpu < times.host.reserve * host:
        return (
            f"{start} steps are likely to wait for the slowest host of the tensor parallel ranks: launching a step"
            f" takes {host:.3g} s, the GPU would take {gpu:.3g} s; {REMEDY}"
        )
    return None


def _least_added(times: OptionTimes, names: Sequence[str], wanted: float, formats: Sequence[str]) -> float:
    """Return the least seconds of launching that saving ``wanted`` seconds of GEMMs can add on a stage."""
    assert times.host is not None
    quantised = [fmt for fmt in formats if fmt != Format.BF16.value]
    if wanted <= 0 or not quantised:
        return 0.0
    of_gemm = {gemm: [fmt for fmt in quantised if gemm in Format(fmt).gemms] for gemm in Gemm}
    savings = sorted(
        (
            times.of(name, gemm, Format.BF16.value) - min(times.of(name, gemm, fmt) for fmt in of_gemm[gemm])
            for name in names
            for gemm in Gemm
            if of_gemm[gemm]
        ),
        reverse=True,
    )
    count, saved = 0, 0.0
    while count < len(savings) and saved < wanted and savings[count] > 0:
        saved += savings[count]
        count += 1
    return count * max(0.0, min(times.host.gemm.get(fmt, 0.0) for fmt in quantised))
