"""Records what a function does on the device, so that C++ repeats it without Python (``replay.cpp``).

The host bounds small linears: a function of a backend spends most of its time in Python, on views, dictionaries and
launchers. What it does on the device depends only on the shapes, dtypes, strides and alignments of its tensors and on
its other arguments. :class:`Replayed` therefore runs a call under a :class:`Recording`, and later calls with equal
arguments repeat its steps on other memory: allocations, calls of C functions (launches of Triton's kernels, products of
cuBLASLt), and calls of Python functions for everything else that computes.

A recording is refused, and Python runs the function in every call, if it used memory that is neither an argument nor
its own, looked at numbers on the device, or launched what has no address.

``replay.cpp`` is compiled into Triton's cache on disk. It needs a C++ compiler, which Triton needs as well, and the
headers of Python and of torch. It needs no CUDA toolkit: functions of libraries are called by their addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from snip_megatron.numerics.quantize.kernels.launch import current, listings, recording
from snip_megatron.numerics.quantize.rounding import key_words
from snip_megatron.precision import Format, Gemm

_ALLOCATING = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
_ZEROING = ("zeros", "zeros_like", "new_zeros")
_KERNEL_NUMBERS = ("i32", "u32", "i64", "u64")
_SEED = 1 << 31  # a larger number among the arguments is a seed, which differs from call to call

Argument = int | tuple[Any, ...]
"""An argument of a C function: a number, ("address", slot, offset in bytes from its first element), ("word", place of a
seed, 0 or 1), ("stream",), or ("pointer" or "pointers", arguments): an address of the one, or of addresses of all."""


@dataclass(frozen=True)
class View:
    """The tensor of a slot, or (not ``whole``) one like ``like`` on its memory from byte ``offset``."""

    slot: int
    offset: int
    whole: bool
    like: Tensor


class Seed:
    """A seed of stochastic rounding that differs from call to call. It is no number, so that nothing computes with it.

    ``place`` is its place among the seeds of a call.
    """

    def __init__(self, value: int, place: int) -> None:
        self.words = [Word(word - (word >> 31 << 32), place, index) for index, word in enumerate(key_words(value))]


class Word(int):
    """A key word of a :class:`Seed`, as a kernel takes it."""

    place: int
    index: int

    def __new__(cls, value: int, place: int, index: int) -> Word:
        made = super().__new__(cls, value)
        made.place, made.index = place, index
        return made


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the steps of one call.

    The arguments of the call are tensors, and tuples that hold tensors.
    """

    def __init__(self, arguments: Sequence[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: str | None = None
        self._steps: list[tuple[Any, ...]] = []
        self._kept: list[Tensor] = []  # the tensor of each slot. While they live, no memory is used twice
        self._slots: dict[int, list[int]] = {}  # storage → slots
        self._opaque = False
        for each in _leaves(arguments):
            if isinstance(each, Tensor):
                self._new_slot(each)

    def __enter__(self) -> Recording:
        """Record the calls of this thread."""
        current.recording = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        current.recording = None

    def refuse(self, reason: str) -> None:
        """Give up this recording. The call itself goes on."""
        self.refused = self.refused or reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one of torch's functions and record it."""
        result = func(*args, **(kwargs or {}))
        if not self._opaque and self.refused is None:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        found = [result] if isinstance(result, Tensor) else result
        name = func._schema.name.removeprefix("aten::")
        if not isinstance(found, (list, tuple)) or not all(isinstance(t, Tensor) for t in found):
            self.refuse(f"{name} returns no tensor")
        elif name in (*_ALLOCATING, *_ZEROING):
            self._steps.append(("allocation", self._new_slot(found[0]), found[0], name in _ZEROING))
        elif func._schema.is_mutable or not all(_storage(t) in self._slots for t in found):
            if any(isinstance(each, Tensor) for each in kwargs.values()):
                self.refuse(f"{name} has a tensor among its named arguments")
            arguments = self.placed(tuple(args))
            slots = tuple(-1 if _storage(t) in self._slots else self._new_slot(t) for t in found)
            self._steps.append(("python", functools.partial(func, **kwargs), arguments, slots))

    def _new_slot(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        self._slots.setdefault(_storage(tensor), []).append(len(self._kept) - 1)
        return len(self._kept) - 1

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """Return the slot of a tensor and its offset there."""
        slots = self._slots.get(_storage(tensor), [])
        if len(slots) > 1:  # arguments that share memory may lie elsewhere in another call
            slots = [slot for slot in slots if self._kept[slot].data_ptr() == tensor.data_ptr()]
        if len(slots) != 1:
            self.refuse("it uses memory that is not its own, or of which argument is unknown")
            return 0, 0
        offset = _start(tensor) - _start(self._kept[slots[0]])
        if offset < 0:
            self.refuse("it uses memory before an argument")
        return slots[0], offset

    def address(self, tensor: Tensor) -> Argument:
        """Return the argument of a C function that is the address of a tensor."""
        return ("address", *self._place(tensor))

    def placed(self, value: Any) -> Any:
        """Return a value with a :class:`View` for each tensor."""
        if isinstance(value, Tensor):
            slot, offset = self._place(value)
            return View(slot, offset, value is self._kept[slot], value)
        if isinstance(value, (tuple, list)):
            kind = type(value) if isinstance(value, tuple) else tuple
            return tuple.__new__(kind, [self.placed(each) for each in value])
        if isinstance(value, (Seed, Word, dict)):
            self.refuse("a seed or a dictionary is left over")
        return value

    # -- steps that torch does not see -----------------------------------------------------------------------------
    def launch(self, compiled: Any, grid: tuple[int, int], tensors: Sequence[Tensor], values: Sequence[Any]) -> None:
        """Record the launch of a kernel that Triton compiled.

        Args:
            compiled: Triton's compiled kernel; None if it is interpreted.
            grid: numbers of programs.
            tensors: the first arguments.
            values: the other arguments: numbers, then constants.
        """
        if 0 in grid:  # Triton launches nothing, and CUDA refuses such a launch
            return
        known = _launchable(compiled)
        types = list(compiled.src.signature.values())[len(tensors) :] if known else []
        if not known or not {*_KERNEL_NUMBERS, "constexpr"}.issuperset(types):
            self.refuse("a kernel has no address, or takes other arguments than addresses and integers")
            return
        numbers = [value for value, kind in zip(values, types, strict=False) if kind != "constexpr"]
        given = [("word", n.place, n.index) if isinstance(n, Word) else int(n) for n in numbers]
        # Triton's kernels end with one or two addresses of scratch memory, which these kernels do not use.
        arguments = ("pointers", (*map(self.address, tensors), *given, 0, 0))
        shape = (*grid, 1, 32 * compiled.metadata.num_warps, 1, 1, compiled.metadata.shared)
        self.c_call("cuLaunchKernel", launcher(), compiled.function, *shape, ("stream",), arguments, 0)

    def c_call(self, name: str, function: int, *arguments: Argument) -> None:
        """Record the call of a C function that returns 0. ``function`` is its address; 0: it has none."""
        if not function:
            self.refuse(f"{name} has no address")
        self._steps.append(("c", name, function, arguments))

    def opaque(self, function: Callable[..., object], *arguments: object) -> None:
        """Run a function that launches by itself, and record the call."""
        self._opaque = True
        try:
            function(*arguments)
        finally:
            self._opaque = False
        self._steps.append(("python", function, self.placed(arguments), ()))

    def finished(self, result: object) -> tuple[Any, ...] | None:
        """Return the recording of a call that returned ``result``, or None if it is refused."""
        placed = self.placed(result)
        if self.refused is not None:
            return None
        kept = set(_slots_of(placed))
        timed: list[tuple[Any, tuple[int, ...]]] = []
        for step in reversed(self._steps):  # a slot is freed after its last use, as Python would free it at the latest
            used = {step[1]} if step[0] == "allocation" else set(_slots_of(step[2:]))
            used |= {slot for slot in step[3] if slot >= 0} if step[0] == "python" else set()
            timed.append((step, tuple(used - kept)))
            kept |= used
        return len(self._kept), tuple(reversed(timed)), placed


_address_of_launch: list[int] = []


def launcher(address: int | None = None) -> int:
    """Return the address of ``cuLaunchKernel``, or set it."""
    if address is not None:
        _address_of_launch[:] = [address]
    return _address_of_launch[0] if _address_of_launch else 0


def run_opaque(function: Callable[..., object], *arguments: object) -> None:
    """Run a function that writes to its arguments by kernels that neither torch nor this package launches."""
    found = recording()
    if found is None:
        function(*arguments)
    else:
        found.opaque(function, *arguments)


def _launchable(compiled: Any) -> bool:
    """Return whether a kernel is launched with nothing but a grid, threads, shared memory and arguments."""
    metadata = getattr(compiled, "metadata", None)
    if metadata is None:
        return False
    unusual = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    return metadata.num_ctas == 1 and not any(getattr(metadata, name, 0) for name in unusual)


def _leaves(value: object) -> Iterator[object]:
    """Yield what is in tuples and lists of any depth, in the order in which replay.cpp finds it."""
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _slots_of(value: object) -> Iterator[int]:
    """Yield the slots in arguments and placed values."""
    if isinstance(value, tuple) and value[:1] == ("address",):
        yield value[1]
    elif isinstance(value, tuple):
        for each in value:
            yield from _slots_of(each)
    elif isinstance(value, View):
        yield value.slot


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _start(tensor: Tensor) -> int:
    """Return where a tensor starts in its storage, in bytes. The address of an empty tensor is 0 wherever it starts."""
    return int(tensor.storage_offset()) * tensor.itemsize


class Replayed:
    """A function that is recorded at the second call with given arguments, and replayed afterwards.

    Calls return what the function returns, with other tensors. A recording holds no memory of the device.

    Args:
        extension: the compiled ``replay.cpp``.
        function: called with positional arguments: tensors, numbers, constants, and tuples of them. It returns the
            same. What it does must depend only on its tensors' shapes, dtypes, strides and alignments and on its other
            arguments, of which numbers of 2³¹ and more are seeds that only kernels read.

    Attributes:
        call: replaces the function.
    """

    def __init__(self, extension: Any, function: Callable[..., Any]) -> None:
        self._function = function
        self._table = extension.Table(self._record, function, listings)
        self.call: Callable[..., Any] = self._table.call()

    @property
    def replays(self) -> int:
        return int(self._table.replays)

    @property
    def kept(self) -> int:
        return int(self._table.kept)

    def _record(self, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...] | None]:
        """Call the function. Returns its result and what was recorded."""
        seeds: list[Seed] = []
        given = _with_seeds(arguments, seeds)
        noted = Recording(given)
        try:
            with noted:
                result = self._function(*given)
            recorded = noted.finished(result)
        except TypeError:  # of a function that computes with a seed, before it wrote anything
            if not seeds:
                raise
            return self._function(*arguments), None
        if recorded is None and any(isinstance(each, Seed) for each in _leaves(result)):
            return self._function(*arguments), None  # which has only described what a GEMM will quantise
        return result, recorded


def _with_seeds(value: Any, seeds: list[Seed]) -> Any:
    if isinstance(value, tuple):
        return tuple.__new__(type(value), [_with_seeds(each, seeds) for each in value])
    if type(value) is int and value >= _SEED:
        seeds.append(Seed(value, len(seeds)))
        return seeds[-1]
    return value


# -- compilation of replay.cpp ---------------------------------------------------------------------------------------
_SOURCE = Path(__file__).with_name("replay.cpp")
_NAME = "snip_replay"
_PATIENCE = 120.0  # seconds for the compilation
CONSTANTS = (type(None), bool, str, Format, Gemm, torch.dtype, type(...), functools.partial)
"""Classes of arguments of which equal values are one object. Equal values that are two objects are recorded twice."""


@functools.cache
def replay_extension() -> tuple[Any | None, str]:
    """Return the extension, configured for this process's CUDA driver, and a phrase for the log.

    The first call on a machine compiles it, which takes about 15 seconds. The extension is None if it cannot be built
    or there is no driver; the phrase then says why.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        found = compiled_extension()
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        return None, f"Python launches kernels ({' '.join(str(error).split())[:200]})"
    launcher(int(ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p).value or 0))
    found.configure(CONSTANTS, torch._C._cuda_getCurrentRawStream)
    return found, "C++ launches kernels"


def compiled_extension() -> Any:
    """Import the extension that :func:`compiled_library` returns. Raises ImportError if it cannot be loaded."""
    spec = importlib.util.spec_from_file_location(_NAME, compiled_library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled_library() -> Path:
    """Return the path of the extension in the cache, which is compiled if it is not there.

    Processes of a node may compile it side by side. If it cannot be compiled, OSError or subprocess.SubprocessError has
    the compiler's first error.
    """
    import triton

    command = _command()
    identity = "\0".join(
        [_SOURCE.read_text(encoding="utf-8"), torch.__version__, sys.version, platform.platform(), *command]
    )
    library = Path(triton.knobs.cache.dir) / f"{_NAME}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.so"
    if not library.exists():
        _compile(command, library)
    return library


def _compile(command: list[str], library: Path) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        # Commands print JSON to standard output.
        print("snip: compiling the launches of kernels in C++ ...", file=sys.stderr, flush=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*command, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=_PATIENCE)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise subprocess.SubprocessError(f"{command[0]}: {errors[0] if errors else done.returncode}")
        with contextlib.suppress(FileExistsError):  # another process was faster, and may have loaded it
            os.link(made, library)


def _command() -> list[str]:
    """Return the compiler's command without the name of its result."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("there is no C++ compiler")
    root = Path(torch.__file__).parent
    headers = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    libraries = root / "lib"
    return [
        *compiler.split(), "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden",
        f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in headers), str(_SOURCE),
        f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_python", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
