"""Tables of timings made of a formula, so that tests know what every answer must be."""

import itertools
from collections.abc import Sequence

from snip_megatron.precision import Format
from snip_megatron.timing.table import TimingTable

FORMATS = (Format.BF16, Format.FP8, Format.FP8_TENSOR, Format.FP4)
SPEED = {Format.BF16: 1.0, Format.FP8: 1.5, Format.FP8_TENSOR: 1.9, Format.FP4: 1.4, Format.NVFP4: 2.5}
GEMM_SHARE = (1.0, 1.1, 1.3)  # fprop, dgrad, wgrad
RATE = 3e14  # tokens·n·k a second in bf16
FUSED = 1e-6  # what quantising adds to SwiGLU, for experts
STOCK = 3.0  # what Transformer Engine takes for experts, over grouped GEMMs
QUANTISED = 1e12  # elements a second, one side


def formula_table(features: Sequence[int] = (512, 4096, 16384), formats: tuple[Format, ...] = FORMATS) -> TimingTable:
    """A table on a grid. The row side of a quantisation takes 1, the column side 1.2, both together 1.8."""
    tokens = (1024, 4096)
    quantised = [fmt for fmt in formats if fmt is not Format.BF16]
    gemms, activations = {}, {}
    for m, n, k in itertools.product(tokens, features, features):
        seconds = m * n * k / RATE
        gemms[m, n, k] = {
            fmt: (GEMM_SHARE[0] * s, GEMM_SHARE[1] * s, GEMM_SHARE[2] * s)
            for fmt in formats
            for s in (seconds / SPEED[fmt],)
        }
    for m, f in itertools.product(tokens, features):
        row = m * f / QUANTISED
        sides = (row, 1.2 * row, 1.8 * row)
        twice = (2 * sides[0], 2 * sides[1], 2 * sides[2])  # gradients: stochastic
        activations[m, f] = {"input": dict.fromkeys(quantised, sides), "gradient": dict.fromkeys(quantised, twice)}
    weights = {
        (n, k): dict.fromkeys(quantised, 2 * n * k / QUANTISED) for n, k in itertools.product(features, features)
    }
    grouped = {}
    for e, m, n, k in itertools.product((4, 64), tokens, features, features):  # GEMMs as fast as one of all tokens
        times = {"gemms": gemms[m, n, k], "weights": {fmt: e * each for fmt, each in weights[n, k].items()}}
        times |= {"input": activations[m, k]["input"], "gradient": activations[m, n]["gradient"]}
        fused = {f"fused_{of}": dict.fromkeys(quantised, FUSED) for of in ("input", "gradient")}
        stock = {"stock": {Format.BF16: STOCK * sum(gemms[m, n, k][Format.BF16])}}
        grouped[e, m, n, k] = times | fused | stock
    return TimingTable(
        device="Formula 1", backend="none", formats=formats, gemms=gemms, activations=activations, weights=weights,
        grouped=grouped, attention={(s, 8, 128): (s * s * 1e-11, s * s * 3e-11) for s in (1024, 8192)}, copy_rate=4e12,
        about={"date": "2026-11-21", "command": "a formula"},
    )  # fmt: skip
