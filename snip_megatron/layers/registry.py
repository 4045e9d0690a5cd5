"""The converted linears of this rank, the precision map that sets their formats, and what CUDA graphs read."""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from snip_megatron.layers.context import GRADIENT_GEMMS, GraphedState, LinearHandle, StepContext, signs_of
from snip_megatron.layers.weights import GraphedWeight
from snip_megatron.numerics.quantize.device_keys import DeviceKeys, LinearIdentity
from snip_megatron.precision import Format, Gemm, LinearRow, PrecisionMap, option_id
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.recipes import is_recipe_file, map_of_recipes, read_recipes

_APART = 4  # distance of two chunks' flags in int32: 16 bytes, the alignment that kernels are compiled for


def check_map_fits(precision_map: PrecisionMap, names: Sequence[str], where: str) -> None:
    """Check that a map names exactly the linears of the model.

    Raises SnipError if the map names a linear that the model does not have, or it lacks one that the model has.
    ``where``, which begins the message, says where the map comes from.
    """
    model_names = set(names)
    unknown = [str(linear) for linear in precision_map.linears() if str(linear) not in model_names]
    if unknown:
        raise SnipError(
            f"{where}: names {unknown[0]}, which this model does not have ({len(names)} linears, last {names[-1]});"
            " it is a map of another model"
        )
    missing = model_names - {str(linear) for linear in precision_map.linears()}
    if missing:
        raise SnipError(
            f"{where}: says nothing about {min(missing)} ({len(missing)} of {len(names)} linears missing);"
            " it is a map of another model"
        )


def load_map(path: str, names: Sequence[str], *, argument: str = "--snip-map") -> PrecisionMap:
    """Read the file that ``argument`` names and check that it is a map of this model. Raises SnipError.

    A YAML file is one of Megatron's ``--te-precision-config-file``.
    """
    if is_recipe_file(path):
        return map_of_recipes(read_recipes(path, argument), names)
    precision_map = PrecisionMap.load(path, argument)
    check_map_fits(precision_map, names, f"{argument} {path}")
    return precision_map


def describe_left_out(precision_map: PrecisionMap, names: Sequence[str]) -> str | None:
    """Return a line about the GEMMs without a format in a map. They run in bf16. None if there are none."""
    gemms = [option_id(name, gemm) for name in names if name not in precision_map.choices for gemm in Gemm]
    left_out = [gemm for gemm in gemms if gemm not in precision_map.choices]
    if not left_out:
        return None
    first = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
    return f"the map names no format for {len(left_out)} of {3 * len(names)} GEMMs, which run in bf16: {first}"


class DeviceStep:
    """The state of a step that the linears of a rank in CUDA graphs read from device memory.

    It consists of the keys of stochastic rounding, the signs of Hadamard transforms and, for each model chunk, a flag
    that says whether its weights are quantised already. A CUDA graph repeats kernels and runs no Python, so that the
    step hooks write this state to fixed addresses, where captured kernels read it. It must be made before the first
    graph is captured.

    The ``graphed`` states of ``handles`` are set; ``chunks`` is the index of the model chunk of each.
    """

    def __init__(self, handles: Sequence[LinearHandle], chunks: Sequence[int], device: torch.device) -> None:
        numbers = [(h.index, h.global_microbatch(0), h.global_microbatch(1)) for h in handles]
        identities = [LinearIdentity(index, factor=second - first, offset=first) for index, first, second in numbers]
        self._keys = DeviceKeys(identities, GRADIENT_GEMMS, device)
        self._current = torch.zeros(max(chunks, default=0) + 1, _APART, dtype=torch.int32, device=device)
        self._signs = torch.zeros(len(handles), _APART, dtype=torch.int32, device=device)
        self._handles = list(handles)
        for place, (handle, chunk) in enumerate(zip(handles, chunks, strict=True)):
            weight = GraphedWeight(self._current[chunk, :1])
            handle.state.graphed = GraphedState(weight, partial(self._keys.next, place), self._signs[place, :1])

    def start_step(self, seed: int, step: int) -> None:
        """Prepare for the first microbatch of a step. This does not wait for the device."""
        self._keys.start_step(seed, step)
        signs = signs_of(self._handles, seed, step)
        self._signs[:, 0].copy_(torch.tensor(signs, dtype=torch.int32), non_blocking=True)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Make forwards quantise their weights again, until :meth:`weights_are_current` is called."""
        self._current.zero_()

    def weights_are_current(self, chunk: int) -> None:
        """Make later forwards of ``chunk`` use the weights that a finished microbatch has quantised."""
        self._current[chunk].fill_(1)

    def forget_weights(self) -> None:
        """Free the quantised weights. Graphs that read them must not run afterwards."""
        for handle in self._handles:
            assert handle.state.graphed is not None
            handle.state.graphed.weight.clear()


@dataclass(eq=False)
class LinearRegistry:
    """The converted linears of this rank by global name, in global order."""

    rows: tuple[LinearRow, ...]  # all linears of the model, over all ranks, in the order that maps and broadcasts use
    context: StepContext
    stock: Mapping[str, str] = field(default_factory=dict)  # name of a linear of the model that was not converted → why
    uncovered: tuple[LinearRow, ...] = ()  # linears of the model that are not converted and stay in bf16
    current: PrecisionMap = field(default_factory=lambda: PrecisionMap(choices={}), init=False)
    device: DeviceStep | None = field(default=None, init=False)  # state of the step that CUDA graphs read, or None
    generation: int = field(default=0, init=False)  # number of adopted maps that changed a format
    _handles: dict[tuple[str, int | None], LinearHandle] = field(default_factory=dict, init=False)
    _ordered: list[LinearHandle] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.names = [row.name for row in self.rows]
        self._position = {name: position for position, name in enumerate(self.names)}

    def add(self, handle: LinearHandle) -> None:
        """Register a linear, or that of one expert. Raises SnipError if it is registered, or not of this model."""
        key = (handle.name, handle.expert)
        if key in self._handles or handle.name not in self._position:
            raise SnipError(f"{handle.name}: registered twice or not a linear of this model")
        handle.state.position = self._position[handle.name]
        self._handles[key] = handle
        bisect.insort(self._ordered, handle, key=lambda each: (each.state.position, each.expert or 0))

    def __iter__(self) -> Iterator[LinearHandle]:
        return iter(self._ordered)

    def __len__(self) -> int:
        return len(self._handles)

    def row(self, handle: LinearHandle) -> LinearRow:
        return self.rows[handle.state.position]

    def __getitem__(self, name: str) -> LinearHandle:
        return self._handles[name, None]

    def adopt(self, precision_map: PrecisionMap) -> None:
        """Set the formats of ``precision_map`` for all following forwards.

        Must be called between steps, with the same map on all ranks. Raises SnipError if the map names a linear that
        the model does not have.
        """
        unknown = {str(linear) for linear in precision_map.linears()} - set(self.names)
        if unknown:
            raise SnipError(f"map {precision_map.version} names {min(unknown)}, which this model does not have")
        for handle in self:
            handle.state.formats = precision_map.formats_of(handle.name)
            handle.state.weights.clear()
        formats = {fmt for name in self.names for fmt in precision_map.formats_of(name)}
        self.context.map_is_quantized = formats != {Format.BF16}
        # The whole map is compared, not only this rank's linears, so that all ranks capture new graphs together.
        if (precision_map.to_codes(self.names) != self.current.to_codes(self.names)).any():
            self.generation += 1
        self.current = precision_map

    def start_step(self, step: int) -> None:
        """Set the step, reset the counters of all linears, and discard their quantised weights."""
        self.context.step = step
        for handle in self:
            handle.state.backwards = 0
            handle.state.weights.clear()
        if self.device is not None:
            self.device.start_step(self.context.seed, step)

    def end_step(self) -> None:
        """Discard the quantised weights, because the optimizer has changed the weights and a validation may follow."""
        for handle in self:
            handle.state.weights.clear()
        if self.device is not None:
            self.device.weights_changed()
