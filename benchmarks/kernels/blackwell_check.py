"""Checks the formats on this GPU: which work, how exact they are and how fast they are, on one page.

    python -m benchmarks.kernels.blackwell_check --out blackwell_check.md

The check was written for the first owner of a Blackwell GPU, and runs on any GPU since Ampere. Every backend that can
run here runs its formats: the native one, and ``emulated`` on bf16 tensor cores. Its GEMMs are compared with the
reference's, and their signal-to-noise ratio with float64. One linear is timed against bf16, with forward, backward and
all quantisation, and four microbatches per quantisation of the weight. A variant of a format is compared in the GEMMs
that may run in it, and timed with its base in the others. A format that fails gets a row with the reason.
``--formats`` names some of the formats. ``--dry-run`` runs the same on small matrices on any machine, without times. A
JSON file beside the page has the same figures.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import header, interleaved, write
from snip_megatron.numerics.products.backend import REFERENCE, GemmBackend
from snip_megatron.numerics.products.blackwell_engine import NATIVE as OF_BLACKWELL
from snip_megatron.numerics.products.emulated import EmulatedBackend
from snip_megatron.numerics.products.exact_products import ExactProducts
from snip_megatron.numerics.products.hopper import NATIVE as OF_HOPPER
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.numerics.quantize.exact import quantize_exact
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import Format, Gemm
from snip_megatron.precision.errors import SnipError

BACKENDS = ("blackwell", "hopper", "emulated")
FORMATS = tuple(fmt for fmt in Format if fmt is not Format.BF16)
OF = {"blackwell": OF_BLACKWELL, "hopper": OF_HOPPER}
"""Formats of the backends that do not have all formats."""
SHAPES = ((8192, 4096, 4096), (8192, 8192, 8192), (8192, 14336, 4096))  # T, N, K
SMALL = ((256, 128, 384),)
GOAL = 0.80
"""Wanted speed of an emulated linear relative to bf16, for weights of 4096² and larger."""
_CHECKED = (512, 1024, 768)
_NOTHING = 1e-30
_MICROBATCHES, _ROUNDS = 4, 8


def draw(shape: tuple[int, int, int], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return X, W and G whose rows differ in size."""
    generator = torch.Generator(device=device).manual_seed(sum(shape))
    tokens, n, k = shape
    x, w, g = (torch.randn(s, device=device, generator=generator) for s in ((tokens, k), (n, k), (tokens, n)))
    spread = torch.rand(tokens, 1, device=device, generator=generator).exp()
    return (x * spread).bfloat16(), (w * k**-0.5).bfloat16(), (g * spread * 1e-3).bfloat16()


def formats_of(fmt: Format) -> tuple[Format, ...]:
    """Return the formats of fprop, dgrad and wgrad of a linear in ``fmt``: its base where a variant does not run."""
    return tuple(fmt if gemm in fmt.gemms else fmt.base for gemm in Gemm)


def products(backend: GemmBackend, fmt: Format, x: Tensor, w: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Return the three GEMMs of a linear in FP32."""
    fprop, dgrad, wgrad = formats_of(fmt)
    x_row, x_col = backend.quantize(x, OperandSpec(fprop, wgrad))
    w_row, w_col = backend.quantize(w, OperandSpec(fprop, dgrad, weight=True))
    g_row, g_col = backend.quantize(g, OperandSpec(dgrad, wgrad, keys=_keys(w)))
    main_grad = torch.zeros(w.shape, device=w.device)
    return {
        "fprop": backend.multiply(Gemm.FPROP, x_row, w_row, torch.float32),
        "dgrad": backend.multiply(Gemm.DGRAD, g_row, w_col, torch.float32),
        "wgrad": backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32, main_grad),
    }


def accuracy(backend: GemmBackend, fmt: Format, shape: tuple[int, int, int], device: str) -> dict[str, Any]:
    """Return the largest relative difference from the reference, and the signal-to-noise ratio in dB of each GEMM.

    Both are of the GEMMs that may run in ``fmt``.
    """
    x, w, g = draw(shape, device)
    found, expected = products(backend, fmt, x, w, g), products(REFERENCE, fmt, x, w, g)
    exact = {
        "fprop": x.double() @ w.double().t(),
        "dgrad": g.double() @ w.double(),
        "wgrad": g.double().t() @ x.double(),
    }
    own = [gemm.value for gemm in fmt.gemms]
    return {
        "difference": max(relative(expected[gemm].double(), found[gemm]) for gemm in own),
        "decibel": {gemm: round(-20 * math.log10(relative(exact[gemm], found[gemm])), 1) for gemm in own},
    }


def relative(exact: Tensor, found: Tensor) -> float:
    """Return ‖found − exact‖ / ‖exact‖, but at least 1e-30 so that its logarithm exists."""
    return max(float((found.double() - exact).norm() / exact.norm()), _NOTHING)


def step(backend: GemmBackend, fmt: Format, x: Tensor, w: Tensor, g: Tensor) -> Callable[[], None]:
    """Return a call of four microbatches of a linear, forward and backward, with all quantisation."""
    main_grad, keys = torch.zeros(w.shape, device=w.device), _keys(w)
    fprop, dgrad, wgrad = formats_of(fmt)

    def run() -> None:
        w_row, w_col = backend.quantize(w, OperandSpec(fprop, dgrad, weight=True))
        for _ in range(_MICROBATCHES):
            x_row, x_col = backend.quantize(x, OperandSpec(fprop, wgrad))
            backend.multiply(Gemm.FPROP, x_row, w_row, torch.bfloat16)
            g_row, g_col = backend.quantize(g, OperandSpec(dgrad, wgrad, keys=keys))
            backend.multiply(Gemm.DGRAD, g_row, w_col, torch.bfloat16)
            backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32, main_grad)

    return run


def speeds(backends: dict[str, GemmBackend], rows: list[dict[str, Any]], shape: tuple[int, int, int]) -> dict[str, Any]:
    """Time a step of every contender that works. Returns milliseconds per microbatch and the speed relative to bf16."""
    x, w, g = draw(shape, "cuda")
    plain = next(iter(backends.values()))
    calls = {"bf16": step(plain, Format.BF16, x, w, g)}
    for row in rows:
        if "failed" not in row:
            fmt = Format(row["format"])
            call = step(backends[row["backend"]], fmt, x, w, g)
            try:
                call()
            except Exception as error:
                row["failed"] = _line(error)
            else:
                calls[f"{row['backend']}_{fmt.value}"] = call
    times = {name: ms / _MICROBATCHES for name, ms in interleaved(calls, _ROUNDS).items()}
    return {"shape": shape, "ms": times, "speed": {name: times["bf16"] / ms for name, ms in times.items()}}


def check(formats: Iterable[Format] = FORMATS, *, dry: bool) -> dict[str, Any]:
    """Return everything that the page shows of ``formats``."""
    backends, refusals = available(dry=dry)
    device = "cuda" if torch.cuda.is_available() and not dry else "cpu"
    result: dict[str, Any] = {"dry_run": dry, "refused": refusals, "rows": [], "speeds": []}
    for name, backend in backends.items():
        for fmt in (fmt for fmt in formats if fmt in OF.get(name, FORMATS)):
            row: dict[str, Any] = {"backend": name, "format": fmt.value}
            try:
                row |= accuracy(backend, fmt, SMALL[0] if dry else _CHECKED, device)
            except Exception as error:  # libraries raise what they like, and the page is to be finished
                row["failed"] = _line(error)
            result["rows"].append(row)
    if not dry and backends:
        result["speeds"] = [speeds(backends, result["rows"], shape) for shape in SHAPES]
    return result


def available(*, dry: bool) -> tuple[dict[str, GemmBackend], dict[str, str]]:
    """Return the backends that run here, and why the others do not."""
    found: dict[str, GemmBackend] = {}
    if dry:
        found = {"reference": REFERENCE, "emulated": EmulatedBackend(quantize_exact, ExactProducts())}
    refused = {}
    for name in BACKENDS:
        try:
            backend = select_backend(name).backend
        except SnipError as error:
            refused[name] = str(error)
        else:
            if not dry:
                found[name] = backend
    return found, refused


def page(result: dict[str, Any]) -> str:
    """Return the figures of :func:`check` as Markdown."""
    formats = ", ".join(dict.fromkeys(row["format"] for row in result["rows"]))
    lines = [f"# {formats} on {result['device']}, {result['date']}", ""]
    if result["dry_run"]:
        lines += [
            "Dry run: plain torch on a CPU and small matrices. It shows that the check runs, nothing about a GPU.",
            "",
        ]
    lines += [
        f"{result['date']}, commit {result['commit']}, `{result['command']}`, {_versions(result['versions'])}",
        "",
    ]
    lines += ["## What works and how exact it is", "", *_accuracy_table(result["rows"]), ""]
    lines += [f"- `{name}` does not run here: {why}" for name, why in result["refused"].items()]
    lines += ["", "## How fast it is", ""]
    if not result["speeds"]:
        return "\n".join([*lines, "Not measured.", ""])
    lines += ["Speed of one linear over bf16's (forward, backward, quantisation, accumulation into FP32):", ""]
    names = [name for name in result["speeds"][0]["speed"] if name != "bf16"]
    names = [name for name in names if all(name in entry["speed"] for entry in result["speeds"])]
    lines += ["| T, N, K | bf16, ms | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for entry in result["speeds"]:
        shown = " | ".join(f"{entry['speed'][name]:.3f}" for name in names)
        lines.append(f"| {', '.join(map(str, entry['shape']))} | {entry['ms']['bf16']:.3f} | {shown} |")
    slow = sorted({name for e in result["speeds"] for name, s in e["speed"].items() if "emulated" in name and s < GOAL})
    lines += ["", f"Emulated formats below {GOAL:.2f} × bf16 somewhere: {', '.join(slow) or 'none'}.", ""]
    return "\n".join(lines)


def _accuracy_table(rows: Iterable[dict[str, Any]]) -> list[str]:
    lines = ["| backend | format | from the reference | fprop, dgrad, wgrad, dB |", "|---|---|---|---|"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['backend']} | {row['format']} | fails: {row['failed']} | – |")
        else:
            signal = ", ".join(str(row["decibel"].get(gemm.value, "–")) for gemm in Gemm)
            difference = f"{row['difference']:.1e}" if row["difference"] > _NOTHING else "equal"
            lines.append(f"| {row['backend']} | {row['format']} | {difference} | {signal} |")
    return lines


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _keys(w: Tensor) -> GradientKeys:
    return GradientKeys(1, 2, torch.arange(w.shape[0], device=w.device))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What works on this GPU, how exact it is, how fast it is")
    parser.add_argument("--out", type=Path, default=Path("blackwell_check.md"), help="the page; a .json lies beside it")
    parser.add_argument("--dry-run", action="store_true", help="small matrices on any machine, without times")
    parser.add_argument("--formats", help=f"comma separated, of {', '.join(fmt.value for fmt in FORMATS)}; default all")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    arguments = parser.parse_args(argv)
    wanted = arguments.formats.split(",") if arguments.formats else [fmt.value for fmt in FORMATS]
    unknown = [name for name in wanted if name not in {fmt.value for fmt in FORMATS}]
    if unknown:
        parser.error(f"--formats {unknown[0]}: unknown; choose among {', '.join(fmt.value for fmt in FORMATS)}")
    if arguments.out.is_dir() or arguments.out.suffix == ".json":
        parser.error(f"--out {arguments.out}: name a file such as page.md; a .json is written beside it")
    if not arguments.dry_run and not torch.cuda.is_available():
        print("blackwell_check.py: needs a CUDA device; --dry-run shows that the check runs", file=sys.stderr)
        return 2
    result = header(arguments.commit) | check([*map(Format, wanted)], dry=arguments.dry_run)
    if arguments.dry_run:
        result["device"] = "cpu"
    write(arguments.out.with_suffix(".json"), result)
    arguments.out.write_text(page(result) + "\n")
    print(page(result))
    return 1 if any("failed" in row for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
