"""A hand-written table of times, as a user's machine might have measured one: input of tests, no measurement."""

from pathlib import Path

from snip_megatron.precision import Format
from snip_megatron.timing.table import TimingTable

RATES = {Format.BF16: 1.0, Format.FP8: 1.4, Format.FP8_TENSOR: 1.8, Format.FP4: 1.3}
"""GEMMs' speed over bf16's. Quantising takes 2 % of a bf16 GEMM of [128, 64, 64] a read, whatever the format."""
_FLOP = 1e-12
_READ = 2e-14


def write_timings(path: Path, device: str = "Test GPU") -> Path:
    """Four shapes of a tiny Llama; wgrad gains less than fprop and dgrad."""
    shapes = [(128, n, k) for n in (32, 512) for k in (32, 256)]
    gemms = {
        (m, n, k): {f: tuple(2.0 * m * n * k * _FLOP / s for s in (r, r, 1 + 0.7 * (r - 1))) for f, r in RATES.items()}
        for m, n, k in shapes
    }
    quantised = [f for f in RATES if f is not Format.BF16]
    read = dict.fromkeys(quantised, (128 * _READ * 64, 128 * _READ * 64, 128 * _READ * 80))
    table = TimingTable(
        device=device,
        backend="hopper",
        formats=tuple(RATES),
        gemms=gemms,
        activations={(128, k): {"input": read, "gradient": read} for k in (32, 512)},
        weights={(n, k): dict.fromkeys(quantised, n * k * _READ) for n in (32, 512) for k in (32, 256)},
        about={"date": "2026-11-21", "notes": "written by hand for tests"},
    )
    path.write_text(table.to_json())
    return path
