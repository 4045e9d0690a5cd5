"""``snip doctor``: reports what this machine can run under SNIP, and what is missing for the rest.

The checks are grouped under four headings: packages, hardware, GEMM backends, host. Packages are checked by version
without being imported. A check that raises an error fails, and the other checks still run.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from snip_megatron.megatron.startup import SUPPORTED
from snip_megatron.precision import VARIANTS, Format
from snip_megatron.precision.errors import SnipError, first_line, installed_version

MEGATRON = Requirement(f"megatron-core{SUPPORTED}")
NEWER_MEGATRON = Requirement(f"megatron-core>={SUPPORTED.rpartition('<')[2]}")
REQUIRED = (
    *(Requirement("torch>=2.8"), MEGATRON, Requirement("ortools>=9.15,<10"), Requirement("numpy>=2")),
    *(Requirement("scipy>=1.14"), Requirement("omegaconf>=2.3"), Requirement("psutil>=6"), Requirement("jinja2>=3")),
    *(Requirement("PyYAML>=6"), Requirement("packaging>=24")),
)
EXTRAS = (
    (Requirement("transformers>=5"), "text", "--tokenizer-type HuggingFaceTokenizer"),
    (Requirement("tokenizers>=0.22"), "text", "snip prepare-data"),
    (Requirement("tqdm>=4.66"), "text", "snip prepare-data"),
    (Requirement("plotly>=6"), "report", "a report"),
    (Requirement("wandb>=0.22"), "wandb", "--wandb-project"),
    (Requirement("tensorboard>=2.19"), "tensorboard", "--tensorboard-dir"),
)
"""(Requirement, extra of snip_megatron that installs it, what needs it). No training imports them."""
OPTIONAL = (
    (Requirement("triton>=3.4"), "the quantisation kernels of a GPU need it"),
    (
        Requirement("transformer-engine>=2.9"),
        "--transformer-impl transformer_engine needs it, and 2.19 the GEMMs of Blackwell",
    ),
    (Requirement("apex"), "never needed; Megatron's fused kernels use it where it is"),
    (Requirement("megatron-bridge>=0.6,<0.8"), "the Bridge callback needs it"),
    (
        Requirement("sgl-deep-gemm==0.1.4"),
        "faster fp8 and fp4 GEMMs on Hopper, with nvcc and torch 2.11: pip install 'snip_megatron[deepgemm]'",
    ),
    *(
        (requirement, f"{purpose} needs it: pip install 'snip_megatron[{extra}]'")
        for requirement, extra, purpose in EXTRAS
    ),
)
_LOW_DISK_BYTES = 5 * 2**30
_LOW_SHARED_MEMORY_BYTES = 2 * 2**30


class Check(NamedTuple):
    """One line of the report."""

    # ``ok``; ``note`` if something optional is missing, or slower than it could be; or ``fail`` if training under SNIP
    # cannot run here
    status: str
    name: str
    result: str
    advice: str = ""


def attempt(name: str, check: Callable[[], Check], advice: str) -> Check:
    """Run ``check``. If it raises an error, the check fails with ``advice``."""
    try:
        return check()
    except Exception as error:  # a broken or unsupported package can raise anything
        return Check("fail", name, first_line(error), advice)


def noted(name: str, result: str, advice: str, *, is_good: bool) -> Check:
    """Return a check that is ok, or a note with its advice if the result is not good."""
    return Check("ok", name, result) if is_good else Check("note", name, result, advice)


# -- the command ---------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip doctor``."""
    add = parser.add_argument
    add("--json", action="store_true", help="print the checks as JSON (snip.doctor/1)")
    add("--ranks", action="store_true", help="started by torchrun: compare the ranks of a job, by host")
    add("--dir", metavar="DIR", type=Path, default=Path(), help="where runs will write; default: the current folder")


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 1 if training under SNIP cannot run here, otherwise 0.

    With ``--ranks``, returns 19 on all ranks if they could not start a training together.
    """
    if args.ranks:
        return compare_ranks()
    sections = {
        "packages": list(check_packages()),
        "hardware": list(check_hardware()),
        "gemm backends": list(check_backends()),
        "host": list(check_host(args.dir)),
    }
    if args.json:
        rows = [
            {"room": heading, "name": c.name, "status": c.status, "found": c.result, "advice": c.advice}
            for heading, checks in sections.items()
            for c in checks
        ]
        print(json.dumps({"schema": "snip.doctor/1", "checks": rows}))
    else:
        print(_text(sections))
    return int(any(check.status == "fail" for checks in sections.values() for check in checks))


def _text(sections: dict[str, list[Check]]) -> str:
    everything = [check for checks in sections.values() for check in checks]
    width = max(len(check.name) for check in everything)
    blocks = []
    for heading, checks in sections.items():
        lines = [heading]
        for check in checks:
            label = "FAIL" if check.status == "fail" else check.status
            lines.append(f"  {label:<4} {check.name:<{width}}  {check.result}")
            if check.advice:
                lines.append(f"       {'':<{width}}  → {check.advice}")
        blocks.append("\n".join(lines))
    failures = sum(check.status == "fail" for check in everything)
    ready = "ready: training under SNIP can run here"
    return "\n\n".join([*blocks, f"not ready: {failures} to mend (FAIL above)" if failures else ready])


def compare_ranks() -> int:
    """Print on rank 0 what the ranks of a job must agree about, each value with its hosts. Returns the exit code.

    The table is that of a training with ``--snip`` alone.
    """
    from snip_megatron.runtime.agreement import EXIT_DISAGREEMENT, describe, differences, of_launcher

    channel = of_launcher()
    if channel is None:
        raise SnipError("--ranks compares the ranks of a job: start it with torchrun -m snip_megatron.tools.cli")
    try:
        table = _own_table()
    except Exception as error:  # a broken or unsupported package can raise anything
        table = {"error": describe(error)}
    ranks: list[tuple[str, dict[str, str]]] | None = channel.collect((socket.gethostname(), table))
    differ = channel.share(ranks and any("error" in table or differences(table, ranks[0][1]) for _, table in ranks))
    if ranks is not None:
        print(rank_table(ranks))
        print("ranks differ: a training would not start" if differ else f"{len(ranks)} ranks agree", flush=True)
    channel.leave()
    return EXIT_DISAGREEMENT if differ else 0


def _own_table() -> Mapping[str, str]:
    """Return what this rank must agree about with the others."""
    from snip_megatron.megatron.startup import prepare

    on_cpu = prepare([], []).on_cpu
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from snip_megatron.megatron.attachment import configuration, terms_of
    from snip_megatron.megatron.conversion import with_resolved_gemm
    from snip_megatron.runtime.config import parse_snip_arguments

    args = parse_snip_arguments(["--snip"])
    args.transformer_impl = "transformer_engine" if HAVE_TE and not on_cpu else "local"
    config, _ = configuration(args)
    return terms_of(with_resolved_gemm(config, args), args, lambda library: None).table


def rank_table(ranks: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Return a line for each field, or for each of its values with the ranks and hosts that have it.

    ``ranks`` has the host and the table of each rank.
    """
    from snip_megatron.runtime.agreement import WHERE_KNOWN

    lines = []
    names = dict.fromkeys(name for _, table in ranks for name in table)
    for name in names:
        values: dict[str, dict[str, list[int]]] = {}
        for rank, (host, table) in enumerate(ranks):
            if name in WHERE_KNOWN and name not in table:
                continue
            values.setdefault(table.get(name, "none"), {}).setdefault(host, []).append(rank)
        for value, hosts in values.items():
            where = ", ".join(f"{host} (rank {', '.join(map(str, members))})" for host, members in hosts.items())
            lines.append(f"  {name:<32}  {value}" + (f"  on {where}" if len(values) > 1 else ""))
    return "\n".join(lines)


# -- packages ------------------------------------------------------------------------------------------------------
def check_packages() -> Iterator[Check]:
    """Check the versions of Python, of the required packages and of the optional packages."""
    yield Check("ok", "python", platform.python_version())  # an older one cannot import this module
    for requirement in REQUIRED:
        yield _check_package(requirement, "fail", f"pip install '{requirement}'")
    for requirement, purpose in OPTIONAL:
        yield _check_package(requirement, "note", purpose)


def admits(requirement: Requirement, version: str) -> bool:
    """Whether a requirement admits a version. Release candidates and local builds count as their release."""
    try:
        return requirement.specifier.contains(Version(version).base_version)
    except InvalidVersion:
        return not requirement.specifier


def _check_package(requirement: Requirement, otherwise: str, advice: str) -> Check:
    """Check the version of a package. The status is ``otherwise`` if it is missing or not supported."""
    name, version = requirement.name, installed_version(requirement.name)
    if version is None:
        return Check(otherwise, name, "not installed", advice)
    if admits(requirement, version):
        return Check("ok", name, version)
    if requirement is MEGATRON and admits(NEWER_MEGATRON, version):
        return Check("note", name, version, f"tested: {requirement.specifier}; a training tries a newer one")
    return Check(otherwise, name, version, f"supported: {requirement.specifier}; {advice}")


# -- hardware ------------------------------------------------------------------------------------------------------
def check_hardware() -> Iterator[Check]:
    """Check the GPUs that torch sees, and which measured times of GEMMs there are for them."""
    try:
        import torch
    except Exception as error:  # a library that torch loads can be missing
        yield Check("fail", "torch", first_line(error), "install a torch whose libraries this machine has")
        return

    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        yield Check("note", "gpu", f"none ({built})", "training runs on the CPU: for tests and demonstrations only")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        card = f"{properties.name}, sm_{properties.major}{properties.minor}"
        yield Check("ok", f"gpu {index}", f"{card}, {memory:.0f} GiB of memory")
    yield check_times(torch.cuda.get_device_name(0))
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    yield Check("ok", "nccl", ".".join(map(str, version)))


def check_times(card: str) -> Check:
    """Say which measured times of GEMMs there are for a card. ``card`` is its name in torch."""
    from snip_megatron.timing.table import NoTableError, TimingTable, packaged_table

    try:
        device = TimingTable.load(packaged_table(card)).device
    except NoTableError:
        advice = "for snip plan, in a minute: snip calibrate --out FILE.json"
        return Check("note", "times", f"the package has no table of {card}", advice)
    result = f"the package has those of {device}" + ("" if device == card else ", the nearest relative")
    advice = "those of this card, in a minute: snip calibrate --out FILE.json"
    return noted("times", result, advice, is_good=device == card)


def check_backends() -> Iterator[Check]:
    """Select each backend of ``--snip-gemm``, and compare its products and roundings of small matrices with FP32."""
    if "torch" not in sys.modules:  # :func:`check_hardware` reports why it cannot be imported
        return
    from snip_megatron.numerics.products import BACKENDS

    for name in BACKENDS:
        yield attempt(name, partial(_check_backend, name), "mend that; until then use --snip-gemm reference")
    yield from _check_host_path()


def _check_backend(name: str) -> Check:
    import torch

    from snip_megatron.numerics.products.check import wrong_numbers
    from snip_megatron.numerics.products.selection import select_backend
    from snip_megatron.numerics.products.transformer_engine import formats_on_card, transformer_engine_gemms

    try:
        selection = select_backend(name)
    except SnipError as error:
        return Check("note", name, "cannot run here", str(error))
    backend, device = selection.backend, "cuda" if torch.cuda.is_available() else "cpu"
    formats = [fmt for fmt in Format if fmt not in VARIANTS]
    if name == "transformer_engine":
        backend, formats = transformer_engine_gemms(), list(formats_on_card())
    faults = [fault for fmt in formats if (fault := wrong_numbers(backend, device, [fmt])) is not None]
    result = f"{backend.name} ({selection.reason})"
    if faults:
        advice = "mend that; until then use another --snip-gemm, and report wrong numbers"
        return Check("fail", name, "; ".join((result, *faults)), advice)
    right = ", ".join(fmt.value for fmt in formats if fmt is not Format.BF16)
    return Check("ok", name, f"{result}; right on this device: {right}")


def _check_host_path() -> Iterator[Check]:
    """Check on Hopper whether C++ launches the kernels, which shortens small linears."""
    from snip_megatron.numerics.products.selection import why_not_hopper

    if why_not_hopper() is not None:
        return
    from snip_megatron.numerics.quantize.kernels.replay import replay_extension

    extension, reason = replay_extension()
    advice = "install a C++ compiler (g++); without it the results are the same, and small linears take longer"
    yield noted("host path", reason, advice, is_good=extension is not None)


# -- host ----------------------------------------------------------------------------------------------------------
def check_host(directory: Path) -> Iterator[Check]:
    """Check CPU cores, solver, Megatron, process group, shared memory, and the ``directory`` of future runs."""
    cores = len(os.sched_getaffinity(0))
    advice = "the solver process shares it with training: give rank 0 one more"
    yield noted("cpu", f"{cores} core{'s' * (cores > 1)}", advice, is_good=cores > 1)
    yield attempt("solver", _check_solver, "reinstall the pinned ortools")
    yield attempt("megatron", _check_megatron, f"install an unpatched {MEGATRON}")
    yield attempt("process group", _check_process_group, "check the driver and the network interface")
    yield check_disk(directory)
    if not Path("/dev/shm").exists():
        yield Check("note", "shared memory", "no /dev/shm", "data loader workers and NCCL use it")
        return
    free = shutil.disk_usage("/dev/shm").free
    advice = "containers: start them with a larger --shm-size (or --ipc=host)"
    yield noted("shared memory", f"{free / 2**30:.1f} GiB free", advice, is_good=free >= _LOW_SHARED_MEMORY_BYTES)


def _check_solver() -> Check:
    """Solve a small problem with the solver that a run uses."""
    from snip_megatron.precision.budget import Budget
    from snip_megatron.solver.api import solve
    from snip_megatron.solver.problem import Choice, Item, Problem

    fp8 = Choice(Format.FP8, (0.0,), 0.0)
    items = tuple(Item(str(i), 0, 1.0, (fp8, Choice(Format.FP4, (1.0 + i,), 1.0))) for i in range(8))
    start = time.monotonic()
    solution = solve(Problem(items=items, budget=Budget("fp4", 0.5)))
    seconds = time.monotonic() - start
    in_fp4 = sorted(item for item, fmt in solution.choices.items() if fmt is Format.FP4)
    if solution.status != "optimal" or in_fp4 != ["0", "1", "2", "3"]:
        return Check("fail", "solver", f"CP-SAT answered {solution.status}: {in_fp4}", "reinstall the pinned ortools")
    return Check("ok", "solver", f"CP-SAT proved a small optimum in {seconds:.2f} s")


def _check_megatron() -> Check:
    """Import the modules that check Megatron's version and the private names that SNIP uses."""
    from snip_megatron.megatron.startup import names_checked, prepare

    prepare([], [])
    with names_checked():  # of the imported Megatron, which can be a vendored copy instead of the installed package
        from snip_megatron.megatron.compat import MEGATRON_VERSION

    version = ".".join(str(part) for part in MEGATRON_VERSION)
    return Check("ok", "megatron", f"{version}: every private name that the step hook needs is as expected")


def _check_process_group() -> Check:
    """Create a process group of one rank and run a collective."""
    import torch

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        torch.distributed.all_reduce(torch.ones(1, device="cuda" if backend == "nccl" else "cpu"))
        torch.distributed.destroy_process_group()
    return Check("ok", "process group", f"{backend} works on one rank")


def check_disk(directory: Path) -> Check:
    """Check whether ``directory`` can be created and how much space it has. Nothing stays behind.

    A folder is created for this, because permissions alone do not show whether a file system allows it (/proc).
    """
    path = directory.absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    try:
        with tempfile.TemporaryDirectory(dir=existing) as folder:
            (Path(folder) / path.relative_to(existing)).mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(existing).free
    except OSError as error:
        result = f"no folder can be made at {path} ({error.strerror})"
        return Check("fail", "disk", result, "give --dir a directory that this user can write")
    advice = "a checkpoint takes 14 to 18 bytes a parameter, a run directory some MB"
    return noted("disk", f"{free / 2**30:.0f} GiB free at {existing}", advice, is_good=free >= _LOW_DISK_BYTES)
