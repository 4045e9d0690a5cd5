"""``snip calibrate``: measures the seconds of GEMMs on this device, as the table of a ``time`` cost model."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snip_megatron.errors import SnipError, cut
from snip_megatron.precision import Format
from snip_megatron.records.output_file import check_folder, deliver

if TYPE_CHECKING:
    from snip_megatron.timing.calibration.measure import Measurer
    from snip_megatron.timing.calibration.ranks import Rank
    from snip_megatron.timing.calibration.workload import Size, Workload
    from snip_megatron.timing.collectives import Exchange
    from snip_megatron.timing.table import Launching, TimingTable

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
        help="GEMM backend, as --snip-gemm; default: auto, or with --add-to that of the table",
    )
    add("--device", default=None, metavar="cuda|cpu", help="device to measure; default: a GPU if there is one")
    add(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="also measure over N GPUs of this machine (on a CPU: N processes): collectives, and how long their hosts"
        " take to launch a step of tensor parallel layers; default: 1, neither",
    )
    add(
        "--add-to",
        metavar="TABLE",
        help="write this table, a file or one of the package such as h200, with the time that this machine's host takes"
        " to launch a step; with --ranks, with the measurements over several ranks. Nothing else is measured",
    )
    add("--no-host", dest="host", action="store_false", help="do not measure how long the host takes to launch a step")
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
    # The host comes before the GEMMs. It imports Transformer Engine, which on some machines loads another copy of
    # cuDNN than torch does. That fails once torch has run its own copy, as it does for attention.
    host = _hosts(device, args.ranks, args.gemm, formats) if args.host else {}
    about, deadline = _about(args), time.monotonic() + args.time
    table = replace(calibrate(measurer, workload, deadline, about), collectives=collectives)
    for ranks, found in host.items():
        table = found.added(table, ranks)
    deliver("--out", args.out, table.to_json())
    seconds = time.monotonic() - started
    incomplete = "" if table.about["complete"] else ", incomplete: give it more --time"
    print(
        f"snip calibrate: {table.device}, {table.backend}, {len(table.gemms)} shapes in {seconds:.0f} s{incomplete}",
        file=sys.stderr,
    )
    return 0


def _add(args: argparse.Namespace, device: Any) -> int:
    """Write the table of ``--add-to`` with the collectives of ``--ranks``, or with host seconds. Returns 0."""
    from snip_megatron.timing.loading import load_table

    table = load_table(args.add_to, _name(device))
    what = []
    if args.host:
        _check_backend(args, table)
    if args.ranks > 1:
        table = replace(table, collectives={**table.collectives, **_collectives(device, args.ranks)})
        what.append(f"{len(table.collectives)} collectives")
    if args.host:
        found = _host(device, args.ranks, table.backend, table.quantised)
        if found.launching is None and not what:
            raise SnipError(f"--add-to {cut(args.add_to)}: {found.said}", exit_code=1)
        measured = _about(args)
        table = found.added(table, args.ranks, f"measured on {measured['date']} at commit {measured['commit']}")
        what += ["the host" if args.ranks == 1 else f"the hosts of {args.ranks} ranks"] * (found.launching is not None)
    if not what:
        raise SnipError(f"--add-to {cut(args.add_to)} --no-host: nothing is left to measure; give --ranks")
    deliver("--out", args.out, table.to_json())
    print(f"snip calibrate: {table.device}, {', '.join(what)}", file=sys.stderr)
    return 0


def _check_backend(args: argparse.Namespace, table: TimingTable) -> None:
    """Raise SnipError unless the host can be measured with the GEMMs of the table: a step adds the times of both."""
    from snip_megatron.gemm.selection import select_backend

    if args.gemm not in ("auto", table.backend):
        raise SnipError(
            f"--gemm {cut(args.gemm)}: --add-to {cut(args.add_to)} has the times of {cut(table.backend)};"
            " leave out --gemm"
        )
    try:
        select_backend(table.backend, table.quantised)
    except SnipError as error:
        raise SnipError(
            f"--add-to {cut(args.add_to)}: has the times of {cut(table.backend)}, which does not run here ({error});"
            " measure a table on this machine"
        ) from None


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

    host, copy_rate = measurer.host(), measurer.copy_rate()
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
        host=host,
        about=about | {"complete": not skipped, "notes": notes},
    )


@dataclass(frozen=True)
class Hosts:
    """Host seconds of Megatron's layers, or None if they cannot be measured; and what to note about them."""

    launching: Launching | None
    said: str | None

    def added(self, table: TimingTable, ranks: int, measured: str | None = None) -> TimingTable:
        """Return ``table`` with the seconds of so many ranks, and with notes in place of earlier ones about them."""
        start = "launching: " if ranks == 1 else f"launching over {ranks} ranks: "
        notes = [each for each in table.about.get("notes", ()) if not each.startswith(start)]
        notes += [f"{start}{each}" for each in (self.said, measured) if each is not None]
        table = replace(table, about={**table.about, "notes": notes})
        if ranks == 1:
            return replace(table, launching=self.launching)
        if self.launching is None:
            return table
        return replace(table, launching_over_ranks={**table.launching_over_ranks, ranks: self.launching})


def _hosts(device: Any, ranks: int, gemm: str, formats: tuple[Format, ...]) -> dict[int, Hosts]:
    """Measure the host of one rank and, of several ranks, theirs. Returns number of ranks → what was found."""
    return {size: _host(device, size, gemm, formats) for size in sorted({1, ranks})}


def _host(device: Any, ranks: int, gemm: str, formats: tuple[Format, ...]) -> Hosts:
    launching, said = measured_launching(device, ranks, gemm, formats)
    if said is not None:
        print(f"snip calibrate: {said}", file=sys.stderr)
    return Hosts(launching, said)


def measured_launching(
    device: Any, ranks: int, gemm: str, formats: tuple[Format, ...]
) -> tuple[Launching | None, str | None]:
    """Return the host seconds of Megatron's layers, or None if they cannot be measured; and what to note about them."""
    import torch

    from snip_megatron.timing.calibration.ranks import in_ranks

    try:
        if device.type == "cpu" and torch.cuda.is_available():
            raise SnipError("Megatron would run on the GPU of this machine")
        if ranks == 1:
            found, said = _launching(None, device, gemm, formats)
        else:
            measure = partial(_launching, device=device, gemm=gemm, formats=formats)
            found, said = in_ranks(device.type, ranks, measure, "their hosts")[0]
    except Exception as error:  # Megatron can raise anything where it is not supported; the table must not be lost
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
        return None, f"the host cannot be measured: {why}"
    return found, said


def _launching(rank: Rank | None, device: Any, gemm: str, formats: tuple[Format, ...]) -> tuple[Launching, str | None]:
    """Measure in this process: alone, or as one of several ranks."""
    from snip_megatron.megatron.startup import prepare

    prepare([], [])
    from snip_megatron.megatron.launching import lost_in_noise, measure_launching, measure_launching_of

    with contextlib.redirect_stdout(sys.stderr):  # standard output is the table's
        if rank is None:
            found = measure_launching(device, gemm, formats)
        else:
            found = measure_launching_of(rank, gemm, formats)
    return found, lost_in_noise(found)


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
