"""``snip calibrate``: measures the seconds of GEMMs on this device, and writes them as a table (``snip.timings/1``)."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
from pathlib import Path

from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError, cut, plain_arguments
from snip_megatron.runtime.storage import check_folder, deliver

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


def run(args: argparse.Namespace) -> int:
    """Measure and write the table. Returns 0. Raises SnipError on bad input."""
    start = time.monotonic()
    formats = _parse_formats(args.formats)
    if not 0 < args.time < 1e6:
        raise SnipError(f"--time {args.time}: must be a number of seconds above 0")
    check_folder("--out", args.out)
    import torch

    from snip_megatron.numerics.products.selection import resolve_gemm, select_backend
    from snip_megatron.numerics.products.transformer_engine import transformer_engine_gemms
    from snip_megatron.timing.calibration import calibrate, compile_kernels, grid_workload
    from snip_megatron.timing.measure import Measurer, clock_for

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    workload = grid_workload(device.type)
    with plain_arguments():
        gemm = resolve_gemm(args.gemm, formats, te_linears=True)
        backend = select_backend(gemm, formats, checks=False).backend  # host launches are not timed
        if gemm == "transformer_engine":
            backend = transformer_engine_gemms()
        backend.check(device, formats)
    measurer = Measurer(backend, clock_for(device), formats)
    compilation = compile_kernels(measurer, workload)
    remaining = args.time - (time.monotonic() - start)
    origin = {
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("SNIP_COMMIT") or "unknown",
        "command": shlex.join(["snip", "calibrate", *sys.argv[2:]]),
    }
    table = calibrate(measurer, workload, origin, remaining, compilation)
    deliver("--out", args.out, table.to_json())
    line = f"snip calibrate: {table.device}, {table.backend}, {len(table.gemms)} shapes in"
    print(f"{line} {time.monotonic() - start:.0f} s", *table.about["notes"], sep="\nsnip calibrate: ", file=sys.stderr)
    return 0


def _parse_formats(text: str) -> tuple[Format, ...]:
    names = [name for name in text.split(",") if name and name != Format.BF16.value]
    unknown = [name for name in names if name not in Format._value2member_map_]
    if unknown or not names or len(set(names)) != len(names):
        valid = ", ".join(fmt.value for fmt in Format if fmt is not Format.BF16)
        raise SnipError(f"--formats {cut(text)}: give distinct names among {valid}")
    return tuple(Format(name) for name in names)
