"""``snip calibrate``: measures the seconds of GEMMs on this device, as the table of a ``time`` cost model."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snip_megatron.errors import SnipError, cut
from snip_megatron.precision import Format
from snip_megatron.records.output_file import check_folder, deliver

if TYPE_CHECKING:
    from snip_megatron.timing.calibration.measure import Measurer
    from snip_megatron.timing.calibration.workload import Size, Workload
    from snip_megatron.timing.collectives import Exchange
    from snip_megatron.timing.table import TimingTable

_FORMATS = (Format.FP8, Format.FP8_TENSOR, Format.FP4)
_SHARES = {"gemms": 1.0, "activations": 0.6, "weights": 0.7, "attention": 0.75}
"""Kind of measurement → fraction of the time limit after which no more measurements of the kind start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip calibrate``."""
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE.json", help="file for the table; default: standard output")
    add(
        "--shapes",
        default="grid",
        metavar="grid|MODEL",
        help="what to measure: a grid of shapes that covers any model, or the linears of one model; default: grid",
    )
    add("--tp", type=int, default=1, metavar="N", help="tensor parallel size of the model of --shapes; default: 1")
    add(
        "--tokens",
        default="8192",
        metavar="N,N",
        help="tokens of a microbatch of the model, one number or several; default: 8192",
    )
    add(
        "--formats",
        default=",".join(_FORMATS),
        metavar="F,F",
        help="quantised formats to measure, comma separated; default: %(default)s",
    )
    add(
        "--time", type=float, default=110.0, metavar="S", help="seconds after which no measurement starts; default: 110"
    )
    add(
        "--gemm",
        default="auto",
        metavar="NAME",
        help="GEMM backend, as --snip-gemm; default: auto",
    )
    add("--device", default=None, metavar="cuda|cpu", help="device to measure; default: a GPU if there is one")
    add(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="also measure collectives over N GPUs of this machine (on a CPU: N processes); default: 1, none",
    )
    add(
        "--add-to",
        metavar="TABLE",
        help="write this table, a file or one of the package such as h200, with the collectives of --ranks; nothing"
        " else is measured",
    )
    add(
        "--commit",
        metavar="HASH",
        help="commit of the measured code, which the table records; default: $SNIP_COMMIT, or unknown",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and write the table. Returns 0. Raises SnipError on bad input."""
    started = time.monotonic()
    formats = _parse_formats(args.formats)
    if not args.time > 0:
        raise SnipError(f"--time {args.time}: must be a number of seconds above 0")
    check_folder("--out", args.out)
    from snip_megatron.timing.calibration.ranks import check_ranks
    from snip_megatron.timing.calibration.workload import grid_workload, model_workload

    device = _device(args.device)
    check_ranks(device.type, args.ranks)
    if args.add_to is not None:
        return _add(args, device)
    if args.shapes == "grid":
        workload = grid_workload(device.type)
    else:
        workload = model_workload(args.shapes, _parse_tokens(args.tokens), args.tp)
    measurer = _measurer(device, args.gemm, formats)
    collectives = _collectives(device, args.ranks)  # they come first: if they fail, nothing is lost
    about, deadline = _about(args), time.monotonic() + args.time
    table = replace(calibrate(measurer, workload, deadline, about), collectives=collectives)
    deliver("--out", args.out, table.to_json())
    seconds = time.monotonic() - started
    incomplete = "" if table.about["complete"] else ", incomplete: give it more --time"
    print(
        f"snip calibrate: {table.device}, {table.backend}, {len(table.gemms)} shapes in {seconds:.0f} s{incomplete}",
        file=sys.stderr,
    )
    return 0


def _add(args: argparse.Namespace, device: Any) -> int:
    """Write the table of ``--add-to`` with the collectives of ``--ranks``. Returns 0."""
    from snip_megatron.timing.loading import load_table

    table = load_table(args.add_to, _name(device))
    if args.ranks == 1:
        raise SnipError(f"--add-to {cut(args.add_to)}: nothing is left to measure; give --ranks")
    table = replace(table, collectives={**table.collectives, **_collectives(device, args.ranks)})
    deliver("--out", args.out, table.to_json())
    print(f"snip calibrate: {table.device}, {len(table.collectives)} collectives", file=sys.stderr)
    return 0


def _collectives(device: Any, ranks: int) -> dict[Exchange, float]:
    """Return the seconds of collectives over ``ranks`` ranks; nothing for one rank."""
    from snip_megatron.timing.calibration.collectives import measure_collectives

    return {} if ranks == 1 else measure_collectives(device.type, ranks)


def calibrate(measurer: Measurer, workload: Workload, deadline: float, about: dict[str, Any]) -> TimingTable:
    """Measure ``workload``. No measurement starts after ``deadline``, except for the first size of each kind.

    Args:
        measurer: Measures one size.
        workload: Sizes to measure.
        deadline: In seconds of ``time.monotonic``.
        about: Facts about the measurement for the table.
    """
    import torch

    from snip_megatron.timing.table import TimingTable

    begin = time.monotonic()
    device = measurer.clock.device
    skipped: list[str] = []

    def measured(kind: str, sizes: Sequence[Size], measure: Callable[[Size], Any]) -> dict[Size, Any]:
        end = begin + (deadline - begin) * _SHARES[kind]
        rows: dict[Size, Any] = {}
        for size in sizes:
            if rows and time.monotonic() > end:
                skipped.append(f"{kind}: {len(sizes) - len(rows)} of {len(sizes)} sizes for lack of time")
                break
            try:
                rows[size] = measure(size)
            except RuntimeError as error:  # out of memory, or a size that a library refuses: the table lacks this size
                skipped.append(f"{kind} {size}: {' '.join(str(error).split())[:160]}")
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return rows

    copy_rate = measurer.copy_rate()
    activations = measured("activations", workload.activations, measurer.activations)
    weights = measured("weights", workload.weights, measurer.weights)
    attention = measured("attention", workload.attention, measurer.attention)
    gemms = measured("gemms", workload.gemms, measurer.gemms)
    for kind, rows in (("activations", activations), ("weights", weights), ("gemms", gemms)):
        if not rows:  # nothing can read a table without them
            raise SnipError(f"no size of {kind} could be measured: {'; '.join(skipped)}")
    notes = ["operands of GEMMs are quantised before; medians of calls that took turns on a busy device", *skipped]
    return TimingTable(
        device=_name(device),
        backend=measurer.backend.name,
        formats=(Format.BF16, *measurer.formats),
        gemms=gemms,
        activations=activations,
        weights=weights,
        attention=attention,
        copy_rate=copy_rate,
        memory=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        about=about | {"complete": not skipped, "notes": notes},
    )


def _measurer(device: Any, gemm: str, formats: tuple[Format, ...]) -> Measurer:
    from snip_megatron.gemm.backend import REFERENCE, GemmBackend
    from snip_megatron.gemm.selection import select_backend
    from snip_megatron.timing.calibration.clock import clock_for
    from snip_megatron.timing.calibration.measure import Measurer

    on_cpu = device.type == "cpu" and gemm == "auto"  # --device cpu on a machine with a GPU
    backend: GemmBackend = REFERENCE if on_cpu else select_backend(gemm).backend
    return Measurer(backend, clock_for(device), formats)


def _name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


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


def _parse_tokens(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(count) for count in text.split(","))
    except ValueError:
        raise SnipError(f"--tokens {cut(text)}: give whole numbers, comma separated") from None


def _about(args: argparse.Namespace) -> dict[str, Any]:
    """Return date, commit, command and versions for the table."""
    import torch

    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    return {
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or os.environ.get("SNIP_COMMIT") or "unknown",
        "command": shlex.join(["snip", "calibrate", *sys.argv[2:]]),
        "versions": versions,
    }
