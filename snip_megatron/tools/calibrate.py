"""``snip calibrate``: measures the seconds of GEMMs on this device, as the table of a ``time`` cost model."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError, cut, plain_arguments
from snip_megatron.runtime.records.storage import check_folder, deliver

if TYPE_CHECKING:
    from snip_megatron.timing.calibration.measure import Measurer

_FORMATS = (Format.FP8, Format.FP8_TENSOR, Format.FP4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip calibrate``."""
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE.json", help="file for the table; default: standard output")
    add("--formats", default=",".join(_FORMATS), metavar="F,F", help="formats to measure; default: %(default)s")
    add(
        "--time", type=float, default=55.0, metavar="S", help="seconds after which it ends as after Ctrl-C; default: 55"
    )
    add("--gemm", default="auto", metavar="NAME", help="GEMM backend, as --snip-gemm; default: auto")
    add("--device", default=None, metavar="cuda|cpu", help="device to measure; default: a GPU if there is one")
    add("--commit", metavar="HASH", help="commit that the table records; default: $SNIP_COMMIT, or unknown")


def run(args: argparse.Namespace) -> int:
    """Measure and write the table. Returns 0. Raises SnipError on bad input."""
    started = time.monotonic()
    formats = _parse_formats(args.formats)
    if not 0 < args.time < 1e6:
        raise SnipError(f"--time {args.time}: must be a number of seconds above 0")
    check_folder("--out", args.out)
    from snip_megatron.timing.calibration.calibrate import calibrate, compile_kernels
    from snip_megatron.timing.calibration.workload import grid_workload

    device = _device(args.device)
    workload = grid_workload(device.type)
    measurer = _measurer(device, args.gemm, formats)
    compilation = compile_kernels(measurer, workload)
    left = args.time - (time.monotonic() - started)
    table = calibrate(measurer, workload, _about(args), left, compilation)
    deliver("--out", args.out, table.to_json())
    line = f"snip calibrate: {table.device}, {table.backend}, {len(table.gemms)} shapes in"
    print(
        f"{line} {time.monotonic() - started:.0f} s", *table.about["notes"], sep="\nsnip calibrate: ", file=sys.stderr
    )
    return 0


def _measurer(device: Any, gemm: str, formats: tuple[Format, ...]) -> Measurer:
    from snip_megatron.numerics.products.backend import REFERENCE, GemmBackend
    from snip_megatron.numerics.products.selection import select_backend
    from snip_megatron.timing.calibration.clock import clock_for
    from snip_megatron.timing.calibration.measure import Measurer

    on_cpu = device.type == "cpu" and gemm == "auto"  # --device cpu on a machine with a GPU
    # Launches are not timed, so that C++ need not repeat them: numbers alone are checked.
    with plain_arguments():
        backend: GemmBackend = REFERENCE if on_cpu else select_backend(gemm, formats, checks=False).backend
        backend.check(device, formats)
    return Measurer(backend, clock_for(device), formats)


def _device(name: str | None) -> Any:
    import torch

    if name not in (None, "cpu", "cuda"):
        raise SnipError(f"--device {cut(name)}: must be cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise SnipError("--device cuda: there is no CUDA device here")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def _parse_formats(text: str) -> tuple[Format, ...]:
    names = [name for name in text.split(",") if name and name != Format.BF16.value]
    unknown = [name for name in names if name not in Format._value2member_map_]
    if unknown or not names or len(set(names)) != len(names):
        known = ", ".join(fmt.value for fmt in Format if fmt is not Format.BF16)
        raise SnipError(f"--formats {cut(text)}: give distinct names among {known}")
    return tuple(Format(name) for name in names)


def _about(args: argparse.Namespace) -> dict[str, Any]:
    """Return date, commit and command for the table."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or os.environ.get("SNIP_COMMIT") or "unknown",
        "command": shlex.join(["snip", "calibrate", *sys.argv[2:]]),
    }
