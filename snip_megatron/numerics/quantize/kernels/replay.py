"""Records what a function does on the device, so that C++ can repeat it without Python (``replay.cpp``).

Python spends more time on a small linear than the GPU does. What a function of a backend does on the device depends
only on the shapes, dtypes, strides and alignments of its tensors and on its other arguments. :class:`Replayed`
therefore runs one call under a :class:`Recording`. Later calls with equal arguments repeat its steps on other memory:
allocations, calls of C functions (launches of Triton's kernels, products of cuBLASLt), and calls of Python functions
for everything else that computes.

A recording is refused if the function used memory that it neither got nor allocated, read numbers from the device or a
seed, or launched a kernel that has no address. Python then runs the function in every call.

``replay.cpp`` is compiled into Triton's cache on disk, by a C++ compiler, which Triton needs as well. It needs no CUDA
toolkit: functions of libraries are called by their addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import itertools
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
"""An argument of a C function: a number; ("address", slot, offset in bytes from its first element); ("word", index of a
seed, 0 or 1); ("stream",); ("pointer", [argument]), its address; or ("pointers", arguments), the address of an array of
their addresses."""


@dataclass(frozen=True)
class View:
    """The tensor of a slot or, unless ``whole``, a tensor like ``like`` on its memory from byte ``offset``."""

    slot: int
    offset: int
    whole: bool
    like: Tensor


class Seed:
    """A seed of stochastic rounding, which differs from call to call. Only kernels may read its words.

    Code that computes with its number gets the number, but the recording is refused, because a replay would repeat the
    numbers of the recorded call. It is no ``int``, so that no C function reads the number unnoticed.
    """

    def __init__(self, value: int, index: int, refuse: Callable[[str], None]) -> None:
        self.value = value
        self.words = [Word(word - (word >> 31 << 32), index, i) for i, word in enumerate(key_words(value))]
        self._refuse = refuse

    def __index__(self) -> int:
        self._refuse("the function computes with a seed")
        return self.value

    __int__ = __index__

    def __and__(self, other: int) -> int:
        return int(self) & other

    def __xor__(self, other: int) -> int:
        return int(self) ^ other


class Word(int):
    """Word ``index`` of the two key words of a :class:`Seed`, as a kernel takes it."""

    seed: int
    index: int

    def __new__(cls, value: int, seed: int, index: int) -> Word:
        word = super().__new__(cls, value)
        word.seed, word.index = seed, index
        return word


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the steps of one call.

    Attributes:
        arguments: the arguments of the call with a :class:`Seed` in place of each seed, for the function.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: str | None = None
        self._steps: list[tuple[Any, ...]] = []
        self._tensors: list[Tensor] = []  # the tensor of each slot. While they live, no memory is used twice
        self._slots: dict[int, list[int]] = {}  # storage → slots
        self._opaque = False
        numbers = itertools.count()

        def visit(value: Any) -> Any:  # in the order in which replay.cpp visits them
            if isinstance(value, Tensor):
                self._new_slot(value)
            return Seed(value, next(numbers), self.refuse) if type(value) is int and value >= _SEED else value

        self.arguments = map_tuples(arguments, visit)

    def __enter__(self) -> Recording:
        """Record the calls of this thread."""
        current.recording = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        current.recording = None

    def refuse(self, reason: str) -> None:
        """Give up this recording. The call itself continues."""
        self.refused = self.refused or reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one of torch's functions and record it."""
        result = func(*args, **(kwargs or {}))
        if not self._opaque and self.refused is None:
            self._record_operator(func, args, kwargs or {}, result)
        return result

    def _record_operator(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        results = [result] if isinstance(result, Tensor) else result
        name = func._schema.name.removeprefix("aten::")
        if not isinstance(results, (list, tuple)) or not all(isinstance(t, Tensor) for t in results):
            self.refuse(f"{name} returns no tensor")
        elif name in (*_ALLOCATING, *_ZEROING):
            self._steps.append(("allocation", self._new_slot(results[0]), results[0], name in _ZEROING))
        elif func._schema.is_mutable or not all(_storage(t) in self._slots for t in results):
            if any(isinstance(each, Tensor) for each in kwargs.values()):
                self.refuse(f"{name} has a tensor among its named arguments")
            arguments = self.placed(tuple(args))
            slots = tuple(-1 if _storage(t) in self._slots else self._new_slot(t) for t in results)
            self._steps.append(("python", functools.partial(func, **kwargs), arguments, slots))

    def _new_slot(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        self._slots.setdefault(_storage(tensor), []).append(len(self._tensors) - 1)
        return len(self._tensors) - 1

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """Return the slot of a tensor and its offset there."""
        slots = self._slots.get(_storage(tensor), [])
        if len(slots) > 1:  # arguments that share memory may lie elsewhere in another call
            slots = [slot for slot in slots if self._tensors[slot].data_ptr() == tensor.data_ptr()]
        if len(slots) != 1:
            self.refuse("memory is of no argument and of no allocation, or of several arguments")
            return 0, 0
        offset = _start(tensor) - _start(self._tensors[slots[0]])
        if offset < 0:
            self.refuse("memory lies before an argument")
        return slots[0], offset

    def address(self, tensor: Tensor) -> Argument:
        """Return the argument of a C function that is the address of a tensor."""
        return ("address", *self._place(tensor))

    def placed(self, value: Any) -> Any:
        """Return a value with a :class:`View` for each tensor."""
        if isinstance(value, Tensor):
            slot, offset = self._place(value)
            return View(slot, offset, value is self._tensors[slot], value)
        if isinstance(value, (tuple, list)):
            kind = type(value) if isinstance(value, tuple) else tuple
            return tuple.__new__(kind, [self.placed(each) for each in value])
        if isinstance(value, (Seed, Word, dict)):
            self.refuse("a seed or a dictionary is an argument or a result")
        return value

    # -- steps that torch does not see -----------------------------------------------------------------------------
    def launch(self, compiled: Any, grid: tuple[int, int], tensors: Sequence[Tensor], values: Sequence[Any]) -> None:
        """Record the launch of Triton's ``compiled`` kernel, None if it is interpreted.

        ``tensors`` are its first arguments, and ``values`` the others: numbers, then constants.
        """
        if 0 in grid:  # Triton launches nothing, and CUDA refuses such a launch
            return
        launchable = _is_launchable(compiled)
        types = list(compiled.src.signature.values())[len(tensors) :] if launchable else []
        if not launchable or not {*_KERNEL_NUMBERS, "constexpr"}.issuperset(types):
            self.refuse("a kernel has no address, or takes other arguments than addresses and integers")
            return
        numbers = [value for value, kind in zip(values, types, strict=False) if kind != "constexpr"]
        scalars = [("word", n.seed, n.index) if isinstance(n, Word) else int(n) for n in numbers]
        # Triton's kernels end with one or two addresses of scratch memory, which these kernels do not use.
        arguments = ("pointers", (*map(self.address, tensors), *scalars, 0, 0))
        shape = (*grid, 1, 32 * compiled.metadata.num_warps, 1, 1, compiled.metadata.shared)
        self.c_call("cuLaunchKernel", launcher.value, compiled.function, *shape, ("stream",), arguments, 0)

    def c_call(self, name: str, function: int, *arguments: Argument, owner: object = None) -> None:
        """Record the call of a C function that returns 0. ``function`` is its address, or 0 if it has none.

        The ``owner`` of the memory that arguments point to lives as long as the recording.
        """
        if not function:
            self.refuse(f"{name} has no address")
        self._steps.append(("c", name, function, arguments, owner))

    def opaque(self, function: Callable[..., object], *arguments: object) -> None:
        """Run a function whose launches are not recorded, and record its call."""
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
        live = set(_slots_of(placed))
        steps: list[tuple[Any, tuple[int, ...]]] = []
        for step in reversed(self._steps):  # a slot is freed after its last use, as Python would free it at the latest
            used = {step[1]} if step[0] == "allocation" else set(_slots_of(step[2:]))
            used |= {slot for slot in step[3] if slot >= 0} if step[0] == "python" else set()
            steps.append((step, tuple(used - live)))
            live |= used
        return len(self._tensors), tuple(reversed(steps)), placed


launcher = ctypes.c_uint64()  # the address of ``cuLaunchKernel``


def run_opaque(function: Callable[..., object], *arguments: object) -> None:
    """Run a function that writes to its arguments by kernels that neither torch nor this package launches."""
    active = recording()
    if active is None:
        function(*arguments)
    else:
        active.opaque(function, *arguments)


def _is_launchable(compiled: Any) -> bool:
    """Return whether a kernel is launched with nothing but a grid, threads, shared memory and arguments."""
    metadata = getattr(compiled, "metadata", None)
    unusual = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    return metadata is not None and metadata.num_ctas == 1 and not any(getattr(metadata, u, 0) for u in unusual)


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
    """Return where a tensor starts in its storage, in bytes. The address of an empty tensor would always be 0."""
    return int(tensor.storage_offset()) * tensor.itemsize


class Replayed:
    """A function that is recorded in the second call with equal arguments, and replayed afterwards.

    Calls return what the function returns, with other tensors. A recording holds no memory of the device.

    Args:
        extension: the compiled ``replay.cpp``.
        function: a function of positional arguments: tensors, numbers, constants, and tuples of them. Its result
            consists of the same. What it does must depend only on its tensors' shapes, dtypes, strides and alignments
            and on its other arguments. Numbers of 2³¹ and more are seeds, which only kernels may read.

    Attributes:
        call: replaces the function.
    """

    def __init__(self, extension: Any, function: Callable[..., Any]) -> None:
        self._function = function
        self._table = extension.Table(self._record, function, listings)
        self.call: Callable[..., Any] = self._table.call()

    @property
    def replays(self) -> int:
        """Number of calls that were replayed."""
        return int(self._table.replays)

    @property
    def recordings(self) -> int:
        """Number of recordings."""
        return int(self._table.recordings)

    def _record(self, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...] | None]:
        """Call the function, and return its result and the recording, which is None if it is refused.

        The function runs once, whatever happens: a second call would add a gradient twice.
        """
        recording = Recording(arguments)
        with recording:
            result = self._function(*recording.arguments)
        recorded = recording.finished(result)
        return map_tuples(result, lambda each: each.value if isinstance(each, Seed) else each), recorded


def map_tuples(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a value with ``function`` of every item of its tuples, of any depth."""
    if isinstance(value, tuple):
        return tuple.__new__(type(value), [map_tuples(each, function) for each in value])
    return function(value)


# -- compilation of replay.cpp ---------------------------------------------------------------------------------------
_SOURCE = Path(__file__).with_name("replay.cpp")
_NAME = "snip_replay"
_TIMEOUT = 120.0  # seconds for the compilation
CONSTANTS = (type(None), bool, str, Format, Gemm, torch.dtype, type(...), functools.partial)
"""Classes of arguments of which equal values are one object. Equal values that are two objects are recorded twice."""


@functools.cache
def replay_extension() -> tuple[Any | None, str]:
    """Return the extension, configured for this process's CUDA driver, and a phrase for the log.

    The first call on a machine compiles it in about 15 seconds. Where that fails, it is None, and the phrase says why.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        extension = compiled_extension()
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        return None, f"Python launches kernels ({' '.join(str(error).split())[:200]})"
    launcher.value = ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p).value or 0
    extension.configure(CONSTANTS, torch._C._cuda_getCurrentRawStream)
    return extension, "C++ launches kernels"


def compiled_extension() -> Any:
    """Import the extension that :func:`compiled_library` returns. Raises ImportError if it cannot be loaded."""
    spec = importlib.util.spec_from_file_location(_NAME, compiled_library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled_library() -> Path:
    """Return the path of the extension in the cache, and compile it if it is not there, as other processes may too.

    Raises OSError or subprocess.SubprocessError, with the compiler's first error, if it cannot be compiled.
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
        output = Path(folder) / library.name
        command = [*command, "-o", str(output)]
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT)
        if run.returncode:
            errors = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
            raise subprocess.SubprocessError(f"{command[0]}: {errors[0] if errors else run.returncode}")
        with contextlib.suppress(FileExistsError):  # another process was faster, and may have loaded it
            os.link(output, library)


def _command() -> list[str]:
    """Return the compiler's command without the path of its output."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("there is no C++ compiler")
    root = Path(torch.__file__).parent
    headers = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    libraries = root / "lib"
    return [
        *compiler.split(), "-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden",
        f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in headers), str(_SOURCE),
        f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_python", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
