"""The converted linears of this rank, and the precision map that sets their formats."""

from collections.abc import Iterator, Mapping, Sequence

from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.device_step import DeviceStep
from snip_megatron.precision import Format, LinearRow, PrecisionMap
from snip_megatron.precision.errors import SnipError


def check_map_fits(precision_map: PrecisionMap, names: Sequence[str], where: str) -> None:
    """Check that a map names exactly the linears of the model.

    Raises SnipError if the map names a linear that the model does not have, or it lacks one that the model has.
    ``where``, which begins the message, says where the map comes from.
    """
    known = set(names)
    unknown = [str(linear) for linear in precision_map.linears() if str(linear) not in known]
    if unknown:
        raise SnipError(
            f"{where}: names {unknown[0]}, which this model does not have ({len(names)} linears, last {names[-1]});"
            " it is a map of another model"
        )
    missing = known - {str(linear) for linear in precision_map.linears()}
    if missing:
        raise SnipError(
            f"{where}: says nothing about {min(missing)} ({len(missing)} of {len(names)} linears missing);"
            " it is a map of another model"
        )


def load_map(path: str, names: Sequence[str], *, argument: str = "--snip-map") -> PrecisionMap:
    """Read the file that ``argument`` names and check that it is a map of this model. Raises SnipError."""
    precision_map = PrecisionMap.load(path, argument)
    check_map_fits(precision_map, names, f"{argument} {path}")
    return precision_map


class LinearRegistry:
    """The converted linears of this rank by global name, in global order.

    Attributes:
        rows: all linears of the model, over all ranks, in the order that maps and broadcasts use.
        left: linears of the model that are not converted and stay in bf16.
        device: the state of the step that CUDA graphs read; None without graphs.
        generation: number of adopted maps that changed a format.
        stock: name of a linear of the model that was not converted → why.
    """

    def __init__(
        self,
        rows: Sequence[LinearRow],
        context: StepContext,
        stock: Mapping[str, str] | None = None,
        left: Sequence[LinearRow] = (),
    ) -> None:
        self.rows, self.left = tuple(rows), tuple(left)
        self.names = [row.name for row in rows]
        self._position = {name: position for position, name in enumerate(self.names)}
        self.context = context
        self.current = PrecisionMap(choices={})
        self.device: DeviceStep | None = None
        self.generation = 0
        self.stock = dict(stock or {})
        self._handles: dict[tuple[str, int | None], LinearHandle] = {}
        self._ordered: list[LinearHandle] = []

    def add(self, handle: LinearHandle) -> None:
        """Register a linear, or the linear of one expert.

        Raises SnipError if the linear is registered already, or the model has none of its name.
        """
        key = (handle.name, handle.expert)
        if key in self._handles or handle.name not in self._position:
            raise SnipError(f"{handle.name}: registered twice or not a linear of this model")
        handle.state.position = self._position[handle.name]
        self._handles[key] = handle
        self._ordered = sorted(self._handles.values(), key=lambda each: (each.state.position, each.expert or 0))

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
