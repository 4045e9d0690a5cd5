"""The linears of this rank, and the precision map they run under."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from snip_megatron.errors import SnipError
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.experts import ExpertLayers
from snip_megatron.precision import EXPERT_KINDS, LINEAR_KINDS, Gemm, LinearId, PrecisionMap


def decoder_linear_names(num_layers: int, experts: ExpertLayers | None = None) -> list[str]:
    """Global names of a decoder's candidate linears, in order: what maps and broadcasts index."""
    return [str(LinearId(layer, kind)) for layer in range(num_layers) for kind in linear_kinds(layer, experts)]


def linear_kinds(layer: int, experts: ExpertLayers | None) -> tuple[str, ...]:
    """Kinds of the candidate linears of ``layer``; ``experts`` None: of a dense decoder."""
    if experts is None or layer not in experts.layers:
        return LINEAR_KINDS
    attention = tuple(kind for kind in LINEAR_KINDS if not kind.startswith("mlp."))
    return attention if experts.grouped else (*attention, *EXPERT_KINDS)


def check_map_fits(precision_map: PrecisionMap, names: Sequence[str], where: str) -> None:
    """Refuse a map of another model: every linear that it names must exist, and it must name some.

    Raises:
        SnipError: naming the first linear that the model lacks.
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
        names: global names of all linears of the model, on whatever rank.
        context: the step's state that all of them share.
        current: the map in force.
        frozen: names of this rank's linears that are left alone because their weight takes no gradient.
        mixture: number of experts that share a name, and how many of them a token goes through; (1, 1) without experts.
    """

    def __init__(self, names: Sequence[str], context: StepContext, mixture: tuple[int, int] = (1, 1)) -> None:
        self.names = list(names)
        self.mixture = mixture
        self.context = context
        self.current = PrecisionMap(choices={})
        self.frozen: list[str] = []
        self._handles: dict[tuple[str, int | None], LinearHandle] = {}
        self._ordered: list[LinearHandle] = []

    def add(self, handle: LinearHandle) -> None:
        """Register a linear, or one of several experts. Raises SnipError when its name is taken or unknown."""
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
        """Run under ``precision_map`` from the next forward on. Call between steps only, on all ranks alike.

        Raises:
            SnipError: the map names a linear that the model does not have.
        """
        unknown = {str(linear) for linear in precision_map.linears()} - set(self.names)
        if unknown:
            raise SnipError(f"map {precision_map.version} names {min(unknown)}, which this model does not have")
        for handle in self:
            fprop, dgrad, wgrad = (precision_map.format_of(handle.name, gemm) for gemm in Gemm)
            handle.formats = (fprop, dgrad, wgrad)
            handle.weights.clear()
        self.current = precision_map

    def start_step(self, step: int) -> None:
        """Reset the per-step counters of all linears; quantise weights anew."""
        self.context.step = step
        for handle in self:
            handle.backwards = 0
            handle.weights.clear()

    def end_step(self) -> None:
        """The optimizer has changed the weights: a validation that follows must not see the old ones."""
        for handle in self:
            handle.weights.clear()
