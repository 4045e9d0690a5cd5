"""Patches torch so that code written for one CUDA device per rank runs on the CPU (``cpu`` compat set).

Megatron binds some of these names while it is imported, so :func:`install` must run before and this module does not
import Megatron. The patches hold for the whole process and are meant for tests and demonstrations.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

CPU = torch.device("cpu")

# fmt: off
_FACTORIES = (
    "tensor", "as_tensor", "asarray", "zeros", "ones", "empty", "full", "arange", "linspace", "eye", "rand", "randn",
    "randint", "randperm", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "empty_strided", "tril_indices", "triu_indices",
)
# fmt: on
_TENSOR_FACTORIES = ("new_tensor", "new_zeros", "new_ones", "new_empty", "new_full")


def is_installed() -> bool:
    """Whether torch is patched in this process."""
    return install.cache_info().currsize > 0


@functools.cache
def install() -> None:
    """Patch torch for this process. A second call does nothing."""
    # torch.compile needs a C++ compiler, compiles once per rank and brings nothing here.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # torch._dynamo registers torch's functions by identity, so it is imported before they are replaced.
    import torch._dynamo

    # So does a default device, when it is first used.
    with CPU:
        torch.empty(0)

    _redirect_devices()
    _replace_cuda_runtime()
    _separate_data_loader_seeds()
    _take_split_sizes_as_tensors()
    _mesh_of_cpus()
    _round_products_once()
    _hide_fused_optimizers()


def _hide_fused_optimizers() -> None:
    """Hide Transformer Engine's optimizers, which need a CUDA device, so that Megatron takes torch's."""
    with contextlib.suppress(Exception):  # not installed, or not for this machine
        import transformer_engine.pytorch  # noqa: F401

        sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]


# -- devices ---------------------------------------------------------------------------------------------------
def _to_cpu(device: Any) -> Any:
    """Replace a CUDA device (index, "cuda:0" or torch.device) by the CPU. Other values are returned unchanged."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    named = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return CPU if is_index or named else device


def _redirected(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _redirect_devices() -> None:
    for owner, names in ((torch, _FACTORIES), (torch.Tensor, _TENSOR_FACTORIES)):
        for name in names:
            setattr(owner, name, _redirected(getattr(owner, name)))

    tensor_to, tensor_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            args = (_to_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        return tensor_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizers sort parameters by type names such as "torch.cuda.FloatTensor".
        result = tensor_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.to = to  # type: ignore[method-assign,assignment]
    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]
    for moved, name in ((torch.Tensor, "cuda"), (torch.Tensor, "pin_memory"), (torch.nn.Module, "cuda")):
        setattr(moved, name, lambda self, *args, **kwargs: self)


# -- the runtime -----------------------------------------------------------------------------------------------
class _Event(torch.cpu.Event):
    """An event that reads the clock when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = 0.0

    def record(self, *args: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end.seconds - self.seconds) * 1e3


class _Stream(torch.cpu.Stream):
    """A stream whose work is complete when it is issued, so that waiting returns at once."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:  # type: ignore[override]
        event = event or _Event()
        event.record()
        return event

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...


class _Properties:
    """Properties of a device of compute capability 8.0, for which no Hopper or Blackwell path is taken."""

    name = "cpu"
    major, minor = 8, 0
    multi_processor_count = 1
    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _MemoryStats(dict[str, int]):
    def __missing__(self, key: str) -> int:
        if "bytes" not in key:
            return 0
        return _peak_memory() if "peak" in key else _resident_memory()


def _resident_memory(*args: Any) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_memory(*args: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _nothing() -> Callable[..., None]:
    """Return a new function that does nothing. torch's compiler allows one rule per function object."""
    return lambda *args, **kwargs: None


# fmt: off
_WITHOUT_EFFECT = (
    "set_device", "synchronize", "set_stream", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "_lazy_init",
    "manual_seed_all",
)
# fmt: on
_RANDOM = ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all")


def _replace_cuda_runtime() -> None:
    stream = _Stream()
    stand_ins: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda *a: _Properties.name,
        "get_device_properties": lambda *a: _Properties,
        "get_device_capability": lambda *a: (_Properties.major, _Properties.minor),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *a: stream,
        "default_stream": lambda *a: stream,
        "stream": lambda s=None: contextlib.nullcontext(s),
        "is_current_stream_capturing": lambda: False,
        "memory_stats": lambda *a: _MemoryStats(),
        "memory_allocated": _resident_memory,
        "memory_reserved": lambda *a: _resident_memory(),
        "device_memory_used": lambda *a: _resident_memory(),
        "max_memory_allocated": _peak_memory,
        "max_memory_reserved": lambda *a: _peak_memory(),
        "mem_get_info": lambda *a: (_Properties.total_memory - _resident_memory(), _Properties.total_memory),
        "_lazy_call": lambda call, **k: call(),
        # Dropout and initialisation draw from the CPU's generator, which replaces the device's.
        "default_generators": (torch.default_generator,),
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    }
    for name, value in (stand_ins | {name: _nothing() for name in _WITHOUT_EFFECT}).items():
        setattr(torch.cuda, name, value)
    for name in _RANDOM:
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _nothing())
    torch.Tensor.record_stream = _nothing()  # type: ignore[method-assign]


def _separate_data_loader_seeds() -> None:
    """Give every DataLoader a generator of its own.

    A loader draws a seed when it is iterated. If it drew from the generator that replaces the device's, it would shift
    dropout, and a resumed run, whose generator is restored, would not be bitwise equal.
    """
    initialise = torch.utils.data.DataLoader.__init__

    @functools.wraps(initialise)
    def with_generator(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("generator", torch.Generator())
        initialise(self, *args, **kwargs)

    torch.utils.data.DataLoader.__init__ = with_generator  # type: ignore[method-assign]


# -- gloo ------------------------------------------------------------------------------------------------------
def _take_split_sizes_as_tensors() -> None:
    """Accept split sizes as tensors, which the code of mixtures of experts passes, in ``all_to_all_single``."""
    all_to_all_single = dist.all_to_all_single

    @functools.wraps(all_to_all_single)
    def with_lists(*args: Any, **kwargs: Any) -> Any:
        args = tuple(a.tolist() if i >= 2 and isinstance(a, torch.Tensor) else a for i, a in enumerate(args))
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return all_to_all_single(*args, **kwargs)

    dist.all_to_all_single = with_lists


def _mesh_of_cpus() -> None:
    """Make meshes of a process group that torch's ``fully_shard`` takes for parameters on the CPU."""
    from_group = DeviceMesh.from_group

    def of_cpus(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return from_group(group, "cpu", *args, **kwargs)

    DeviceMesh.from_group = staticmethod(of_cpus)  # type: ignore[method-assign]


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# The kernels are in use as long as this object lives.
_LIBRARY = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


# -- products ----------------------------------------------------------------------------------------------------
def _round_products_once() -> None:
    """Replace torch's CPU kernels of matrix products. Products of bf16 are computed in FP32 and rounded once.

    torch multiplies bf16 matrices by oneDNN where the processor has AVX-512. Elsewhere it uses scalar loops, which take
    3 to 50 times as long as a product in FP32. Other dtypes keep their bits.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name in _PRODUCTS:
            kernel = functools.partial(_product, getattr(torch.ops.aten, name).out)
            _LIBRARY.impl(name, kernel, "CPU", allow_override=True)  # type: ignore[no-untyped-call]


def _product(multiply: Callable[..., torch.Tensor], *operands: Any, **scalars: float) -> torch.Tensor:
    """Call the out variant, whose kernel has not been replaced."""
    dtype = operands[0].dtype
    if dtype != torch.bfloat16:
        return multiply(*operands, **scalars, out=operands[0].new_empty(0))
    wide = [operand.float() if isinstance(operand, torch.Tensor) else operand for operand in operands]
    return multiply(*wide, **scalars, out=wide[0].new_empty(0)).to(dtype)
