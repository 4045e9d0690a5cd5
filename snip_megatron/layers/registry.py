"""The converted linears of this rank, and the precision map that sets their formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from snip_megatron.errors import SnipError
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.device_step import DeviceStep
from snip_megatron.layers.experts import ExpertLayers
from snip_megatron.precision import EXPERT_KINDS, LINEAR_KINDS, Gemm, LinearId, PrecisionMap


def decoder_linear_names(num_layers: int, experts: ExpertLayers | None = None) -> list[str]:
    """Return the global names of a decoder's candidate linears in the order that maps and broadcasts use."""
    return [str(LinearId(layer, kind)) for layer in range(num_layers) for kind in linear_kinds(layer, experts)]


def linear_kinds(layer: int, experts: ExpertLayers | None) -> tuple[str, ...]:
    """Return the kinds of the candidate linears of ``layer``. ``experts`` is None for a dense decoder."""
    if experts is None or layer not in experts.layers:
        return LINEAR_KINDS
    attention = tuple(kind for kind in LINEAR_KINDS if not kind.startswith("mlp."))
    return (*attention, *EXPERT_KINDS)


def check_map_fits(precision_map: PrecisionMap, names: Sequence[str], where: str) -> None:
    """Check that a map names exactly the linears of the model.

    Args:
        precision_map: the map.
        names: global names of the model's linears, in order.
        where: the start of the error message: where the map comes from.

    Raises:
        SnipError: the map names a linear that the model does not have, or it lacks one that the model has.
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


class LinearRegistry:
    """The converted linears of this rank by global name, in global order.

    Attributes:
        names: global names of all linears of the model, over all ranks.
        context: the state of the step, which all linears share.
        current: the map in force.
        device: the state of the step that CUDA graphs read; None without graphs.
        generation: number of adopted maps that changed a format.
        frozen: names of this rank's linears that were not converted because their weight requires no gradient.
        mixture: (number of experts per layer, number of experts per token); (1, 1) without experts.
    """

    def __init__(self, names: Sequence[str], context: StepContext, mixture: tuple[int, int] = (1, 1)) -> None:
        self.names = list(names)
        self.mixture = mixture
        self.context = context
        self.current = PrecisionMap(choices={})
        self.device: DeviceStep | None = None
        self.generation = 0
        self.frozen: list[str] = []
        self._handles: dict[tuple[str, int | None], LinearHandle] = {}
        self._ordered: list[LinearHandle] = []

    def add(self, handle: LinearHandle) -> None:
        """Register a linear, or the linear of one expert.

        Raises:
            SnipError: the linear is registered already, or the model has none of its name.
        """
        key = (handle.name, handle.expert)
        if key in self._handles or handle.name not in self.names:
            raise SnipError(f"{handle.name}: registered twice or not a linear of this model")
        self._handles[key] = handle
        self._ordered = sorted(self._handles.values(), key=lambda handle: (handle.id, handle.expert or 0))

    def __iter__(self) -> Iterator[LinearHandle]:
        return iter(self._ordered)

    def __len__(self) -> int:
        return len(self._handles)

    def __getitem__(self, name: str) -> LinearHandle:
        return self._handles[name, None]

    def adopt(self, precision_map: PrecisionMap) -> None:
        """Set the formats of ``precision_map`` for all following forwards.

        Must be called between steps, with the same map on all ranks.

        Raises:
            SnipError: the map names a linear that the model does not have.
        """
        unknown = {str(linear) for linear in precision_map.linears()} - set(self.names)
        if unknown:
            raise SnipError(f"map {precision_map.version} names {min(unknown)}, which this model does not have")
        for handle in self:
            fprop, dgrad, wgrad = (precision_map.format_of(handle.name, gemm) for gemm in Gemm)
            handle.state.formats = (fprop, dgrad, wgrad)
            handle.state.weights.clear()
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
