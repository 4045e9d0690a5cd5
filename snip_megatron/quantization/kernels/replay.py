"""Records what a function does on the device, so that C++ repeats it without Python (``replay.cpp``).

The host bounds small linears: a function of a backend spends most of its time in Python, on views, dictionaries and
launchers. What it does on the device depends only on the shapes, dtypes, strides and alignments of its tensors and on
its other arguments. :class:`Replayed` therefore runs a call under a :class:`Recording`, and later calls with equal
arguments repeat its steps on other memory: allocations, launches of Triton's kernels, products of cuBLASLt, and
calls of Python functions for everything else that computes.

A recording is refused, and Python runs the function in every call, if it used memory that is neither an argument nor
its own, looked at numbers on the device, or launched what has no address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from snip_megatron.quantization.kernels.listing import _active as listings
from snip_megatron.quantization.rounding import key_words

Address = tuple[int, int]
"""A slot and an offset in bytes from its first element, or -1 and an address."""
NOWHERE: Address = (-1, 0)
_ALLOCATING = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
_ZEROING = ("zeros", "zeros_like", "new_zeros")
_KERNEL_NUMBERS = ("i32", "u32", "i64", "u64")
_current = threading.local()


# -- what is recorded: replay.cpp reads these attributes --------------------------------------------------------------
@dataclass(frozen=True)
class View:
    """The tensor of a slot, or (not ``whole``) one like ``like`` on its memory from byte ``offset``."""

    slot: int
    offset: int
    whole: bool
    like: Tensor


@dataclass(frozen=True)
class Object:
    """An object that is made without its ``__init__``, from the values of its attributes."""

    type: type
    attributes: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Allocation:
    """Memory like that of ``like``, uninitialised or zero, for a slot."""

    slot: int
    like: Tensor
    zero: bool
    kind: Literal["allocation"] = "allocation"


@dataclass(frozen=True)
class Launch:
    """A launch of a compiled kernel. ``numbers`` are (-1, number), or (seed, 0 or 1) for a key word of a seed."""

    function: int
    grid: tuple[int, int]
    threads: int
    shared: int
    addresses: tuple[Address, ...]
    numbers: tuple[tuple[int, int], ...]
    kind: Literal["launch"] = "launch"


@dataclass(frozen=True)
class Product:
    """A product of cuBLASLt: the addresses of its functions, of what a plan holds, and of the matrices."""

    matmul: int
    set_attribute: int
    handle: int
    operation: int
    layouts: tuple[int, int, int]
    algorithm: int
    alpha: Address
    beta: Address
    a: Address
    b: Address
    c: Address
    workspace: Address
    workspace_size: int
    scale_names: tuple[int, int]
    scales: tuple[Address, ...]
    kind: Literal["product"] = "product"


@dataclass(frozen=True)
class Call:
    """A call of a Python function. ``results`` are the slots of its results; -1: memory of another slot."""

    function: Callable[..., object]
    arguments: tuple[object, ...]
    results: tuple[int, ...]
    kind: Literal["call"] = "call"


Step = Allocation | Launch | Product | Call


@dataclass(frozen=True)
class _Timed:
    step: Step
    last_uses: tuple[int, ...]


@dataclass(frozen=True)
class _Recorded:
    slots: int
    steps: tuple[_Timed, ...]
    result: object


class Seed:
    """A seed of stochastic rounding that differs from call to call. It is no number, so that nothing computes with it.

    Args:
        value: the seed in this call.
        place: its place among the seeds of a call.
    """

    def __init__(self, value: int, place: int) -> None:
        self.words = [Word(word - (word >> 31 << 32), place, index) for index, word in enumerate(key_words(value))]


class Word(int):
    """A key word of a :class:`Seed`, as a kernel takes it."""

    place: int
    index: int

    def __new__(cls, value: int, place: int, index: int) -> Word:
        """Make the word. ``index`` is 0 or 1."""
        made = super().__new__(cls, value)
        made.place, made.index = place, index
        return made


# -- recording --------------------------------------------------------------------------------------------------------
class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the steps of one call.

    Args:
        arguments: the arguments of the call: tensors, and values that hold tensors.
    """

    def __init__(self, arguments: Sequence[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: str | None = None
        self._steps: list[Step] = []
        self._kept: list[Tensor] = []  # the tensor of each slot. While they live, no memory is used twice
        self._slots: dict[int, list[int]] = {}  # storage → slots
        self._opaque = False
        for tensor in tensors_of(arguments):
            self._new_slot(tensor)

    def __enter__(self) -> Recording:
        """Record the calls of this thread."""
        _current.recording = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop recording."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _current.recording = None

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
            self._steps.append(Allocation(self._new_slot(found[0]), found[0], name in _ZEROING))
        elif func._schema.is_mutable or not all(_storage(t) in self._slots for t in found):
            if list(tensors_of(kwargs.values())):
                self.refuse(f"{name} has a tensor among its named arguments")
            arguments = self.placed(tuple(args))
            slots = tuple(-1 if _storage(t) in self._slots else self._new_slot(t) for t in found)
            self._steps.append(Call(partial(func, **kwargs), arguments, slots))

    def _new_slot(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        self._slots.setdefault(_storage(tensor), []).append(len(self._kept) - 1)
        return len(self._kept) - 1

    def address(self, tensor: Tensor) -> Address:
        """Return where a tensor is."""
        slots = self._slots.get(_storage(tensor), [])
        if len(slots) > 1:  # arguments that share memory may lie elsewhere in another call
            slots = [slot for slot in slots if self._kept[slot].data_ptr() == tensor.data_ptr()]
        if len(slots) != 1:
            self.refuse("it uses memory that is not its own, or of which argument is unknown")
            return NOWHERE
        offset = _start(tensor) - _start(self._kept[slots[0]])
        if offset < 0:
            self.refuse("it uses memory before an argument")
        return slots[0], offset

    def placed(self, value: Any) -> Any:
        """Return a value with a :class:`View` for each tensor, and with objects taken apart."""
        if isinstance(value, Tensor):
            slot, offset = self.address(value)
            return View(slot, offset, slot >= 0 and value is self._kept[slot], value)
        if isinstance(value, (tuple, list)):
            return tuple(self.placed(each) for each in value)
        if is_dataclass(value) and not isinstance(value, type):
            return Object(type(value), tuple((f.name, self.placed(getattr(value, f.name))) for f in fields(value)))
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
        numbers = [value for value, kind in zip(values, types, strict=False) if kind != "constexpr"]
        if not known or not {*_KERNEL_NUMBERS, "constexpr"}.issuperset(types):
            self.refuse("a kernel has no address, or takes other arguments than addresses and integers")
            return
        addresses = tuple(self.address(t) for t in tensors)
        given = tuple((n.place, n.index) if isinstance(n, Word) else (-1, int(n)) for n in numbers)
        metadata = compiled.metadata
        threads = 32 * metadata.num_warps
        self._steps.append(Launch(compiled.function, grid, threads, metadata.shared, addresses, given))

    def product(self, product: Product | None) -> None:
        """Record a product of cuBLASLt; None if the library's functions have no address."""
        if product is None:
            self.refuse("a library has no address")
        else:
            self._steps.append(product)

    def opaque(self, function: Callable[..., object], *arguments: object) -> None:
        """Run a function that launches by itself, and record the call."""
        self._opaque = True
        try:
            function(*arguments)
        finally:
            self._opaque = False
        self._steps.append(Call(function, self.placed(arguments), ()))

    def finished(self, result: object) -> _Recorded | None:
        """Return the recording of a call that returned ``result``, or None if it is refused."""
        placed = self.placed(result)
        if self.refused is not None:
            return None
        kept = set(_slots_of(placed))
        timed: list[_Timed] = []
        for step in reversed(self._steps):  # a slot is freed after its last use, as Python would free it at the latest
            used = set(_slots_of(step))
            timed.append(_Timed(step, tuple(used - kept)))
            kept |= used
        return _Recorded(len(self._kept), tuple(reversed(timed)), placed)


def recording() -> Recording | None:
    """Return the recording of this thread in progress, or None."""
    return getattr(_current, "recording", None)


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


def tensors_of(values: Iterable[object]) -> Iterable[Tensor]:
    """Yield the tensors in ``values``, in the order in which replay.cpp finds them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_of(value)
        elif is_dataclass(value) and not isinstance(value, type):
            yield from tensors_of(getattr(value, f.name) for f in fields(value))


def _slots_of(value: object) -> Iterable[int]:
    """Yield the slots that a step or a placed value uses."""
    if isinstance(value, View):
        yield value.slot
    elif isinstance(value, Object):
        yield from _slots_of(tuple(each for _, each in value.attributes))
    elif isinstance(value, tuple):
        for each in value:
            yield from _slots_of(each)
    elif isinstance(value, Allocation):
        yield value.slot
    elif isinstance(value, Launch):
        yield from (slot for slot, _ in value.addresses)
    elif isinstance(value, Product):
        places = (value.alpha, value.beta, value.a, value.b, value.c, value.workspace, *value.scales)
        yield from (slot for slot, _ in places if slot >= 0)
    elif isinstance(value, Call):
        yield from _slots_of(value.arguments)
        yield from (slot for slot in value.results if slot >= 0)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _start(tensor: Tensor) -> int:
    """Return where a tensor starts in its storage, in bytes. The address of an empty tensor is 0 wherever it starts."""
    return int(tensor.storage_offset()) * tensor.itemsize


# -- replay -----------------------------------------------------------------------------------------------------------
class Replayed:
    """A function that is recorded at the second call with given arguments, and replayed afterwards.

    Calls return what the function returns, with other tensors. A recording holds no memory of the device.

    Args:
        extension: the compiled ``replay.cpp``.
        function: called with the arguments of a call. It returns tensors, alone or inside tuples and dataclasses. What
            it does must depend only on its arguments' shapes, dtypes, strides, alignments and other values.
        patience: number of calls with given arguments before the one that is recorded.

    Attributes:
        call: called with a tuple of seeds and the arguments. A seed is a number that may differ from call to call. The
            function gets the seeds as its first argument, as numbers or as :class:`Seed`.
    """

    def __init__(self, extension: Any, function: Callable[..., Any], patience: int = 1) -> None:
        self._function = function
        self._table = extension.Table(self._record, function, listings, patience)
        self.call: Callable[..., Any] = self._table.function()

    @property
    def replays(self) -> int:
        """Number of calls that were replayed."""
        return int(self._table.replays)

    @property
    def kept(self) -> int:
        """Number of recordings."""
        return int(self._table.kept)

    def _record(self, seeds: tuple[int, ...], *arguments: Any) -> Any:
        if recording() is not None:  # inside another recorded call
            return self._function(seeds, *arguments)
        noted = Recording(arguments)
        try:
            with noted:
                result = self._function(tuple(Seed(seed, place) for place, seed in enumerate(seeds)), *arguments)
            recorded = noted.finished(result)
        except TypeError:  # of a function that computes with a seed, before it wrote anything
            if not seeds:
                raise
            recorded = None
        self._table.add(arguments, recorded)
        if recorded is None and seeds:  # the result may hold a seed that is no number
            return self._function(seeds, *arguments)
        return result
