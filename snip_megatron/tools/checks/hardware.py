"""Checks the GPUs, and which GEMM backends give correct results on them."""

import importlib.util
from collections.abc import Iterator
from functools import partial

from snip_megatron.precision import VARIANTS, Format
from snip_megatron.precision.errors import SnipError, first_line
from snip_megatron.tools.checks.check import Check, attempt, fail, note, ok

ROOM = "hardware"
GEMM_ROOM = "gemm backends"


def check_hardware() -> Iterator[Check]:
    """Check the GPUs that torch sees."""
    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch
    except Exception as error:  # a library that torch loads can be missing
        yield fail(ROOM, "torch", first_line(error), "install a torch whose libraries this machine has")
        return

    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        yield note(ROOM, "gpu", f"none ({built})", "training runs on the CPU: for tests and demonstrations only")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        card = f"{properties.name}, sm_{properties.major}{properties.minor}"
        yield ok(ROOM, f"gpu {index}", f"{card}, {memory:.0f} GiB of memory")
    yield times_of(torch.cuda.get_device_name(0))
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    yield ok(ROOM, "nccl", ".".join(map(str, version)))


def times_of(card: str) -> Check:
    """Say which times of GEMMs there are of a card, by its name in torch."""
    from snip_megatron.runtime.run_timings import cache_folder, cached_tables
    from snip_megatron.timing.loading import NoTableError, packaged_table
    from snip_megatron.timing.table import TimingTable

    cached = len(cached_tables(card))
    own = f"trainings timed {cached} model{'s' * (cached != 1)} ({cache_folder()})"
    try:
        device = TimingTable.load(packaged_table(card)).device
    except NoTableError:
        found = f"the package has no table of {card}; {own}"
        return note(ROOM, "times", found, "for snip plan, in a minute: snip calibrate --out FILE.json")
    if device != card:
        found = f"the package has those of {device}, the nearest relative; {own}"
        return note(ROOM, "times", found, "those of this card, in a minute: snip calibrate --out FILE.json")
    return ok(ROOM, "times", f"the package has those of {device}; {own}")


def check_backends() -> Iterator[Check]:
    """Select every backend of ``--snip-gemm``, and compare its products and roundings of small matrices with FP32."""
    try:
        import torch  # noqa: F401
    except Exception:  # :func:`check_hardware` reports it
        return
    from snip_megatron.numerics.products import BACKENDS

    for name in BACKENDS:
        yield attempt(GEMM_ROOM, name, partial(_backend, name), "mend that; until then use --snip-gemm reference")
    yield from _host_path()


def _host_path() -> Iterator[Check]:
    from snip_megatron.numerics.products.selection import why_not_hopper

    if why_not_hopper() is not None:
        return
    from snip_megatron.numerics.quantize.kernels.replay import replay_extension

    extension, how = replay_extension()
    if extension is not None:
        yield ok(GEMM_ROOM, "host path", how)
    else:
        advice = "install a C++ compiler (g++); without it the results are the same, and small linears take longer"
        yield note(GEMM_ROOM, "host path", how, advice)


def _backend(name: str) -> Check:
    import torch

    from snip_megatron.numerics.products.check import wrong_numbers
    from snip_megatron.numerics.products.selection import select_backend
    from snip_megatron.numerics.products.transformer_engine import formats_on_card, transformer_engine_gemms

    try:
        selection = select_backend(name)
    except SnipError as error:
        return note(GEMM_ROOM, name, "cannot run here", str(error))
    backend, device = selection.backend, "cuda" if torch.cuda.is_available() else "cpu"
    formats = [fmt for fmt in Format if fmt not in VARIANTS]
    if name == "transformer_engine":
        backend, formats = transformer_engine_gemms(), list(formats_on_card())
    faults = [fault for fmt in formats if (fault := wrong_numbers(backend, device, [fmt])) is not None]
    found = f"{backend.name} ({selection.reason})"
    if faults:
        advice = "mend that; until then use another --snip-gemm, and report wrong numbers"
        return fail(GEMM_ROOM, name, "; ".join((found, *faults)), advice)
    right = ", ".join(fmt.value for fmt in formats if fmt is not Format.BF16)
    return ok(GEMM_ROOM, name, f"{found}; right on this device: {right}")
