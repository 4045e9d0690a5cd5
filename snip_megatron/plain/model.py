"""The linears of a transformer's blocks: finding them, and converting them in place.

The experts of a mixture in transformers are one module with the weights of all of them, [experts, N, K], in two
parameters. Both are linears here, as experts' linears are in Megatron.
"""

import copyreg
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.grouped import grouped_product
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import LinearId, LinearRow
from snip_megatron.precision.errors import SnipError

_MIN_LINEARS = 4  # of a block; the experts of a mixture have fewer
_MIN_REACH = 0.5
_UNSUPPORTED_WRAPPERS = {"DataParallel": "DataParallel", "FullyShardedDataParallel": "FSDP1; use fully_shard"}


@dataclass(frozen=True)
class Structure:
    """The linears of a model's blocks. Only a forward pass shows their sub-blocks and roles."""

    model: nn.Module  # the model without DDP and torch.compile around it
    blocks: tuple[nn.Module, ...]  # the blocks in order
    linears: Mapping[LinearRow, nn.Module]  # the linears that are converted, in global order, with their modules
    unconverted: Mapping[LinearRow, nn.Module]  # the blocks' other matrices, which stay as they are, with their modules

    @property
    def unquantised_flops(self) -> float:
        """FLOPs a token of what stays as it is, for all GEMMs together."""
        return 3.0 * sum(row.flops for row in self.unconverted)

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the weights of the linears that are converted, with the linears' names."""
        for row, module in self.linears.items():
            yield row.name, getattr(module, parameter_of(row, module))

    def reach(self) -> tuple[float, float]:
        """Return the share of the blocks' matrices that is converted, of their parameters and of their FLOPs."""
        inside, outside = self.linears, self.unconverted
        parameters, flops = (
            [sum(getattr(row, name) for row in rows) for rows in (inside, outside)] for name in ("elements", "flops")
        )
        return parameters[0] / sum(parameters), flops[0] / sum(flops)

    def describe(self) -> Iterator[str]:
        """Yield a line about what is in reach, and one about what is not, if there is anything."""
        parameters, flops = self.reach()
        yield (
            f"formats are chosen for {flops:.0%} of the FLOPs and {parameters:.0%} of the parameters of the matrices in"
            f" {len(self.blocks)} blocks: {_kinds(self.linears)}"
        )
        if self.unconverted:
            yield f"stays as it is: {_kinds(self.unconverted)}"


def parameter_of(row: LinearRow, module: nn.Module) -> str:
    """Return the name of the parameter that is the weight of a linear."""
    return "weight" if isinstance(module, nn.Linear) else row.id.path.rpartition(".")[2]


def _kinds(rows: Mapping[LinearRow, nn.Module]) -> str:
    """Return the kinds of matrices with their parameters, the largest first."""
    sizes: dict[str, float] = defaultdict(float)
    for row, module in rows.items():
        cls = "" if type(module) in (nn.Linear, SnipLinear) else f"{type(module).__name__}, "
        path = re.sub(r"\b\d+\b", "*", row.id.path)
        sizes[f"{path} ({cls}"] += row.elements
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind}{elements:,.0f} parameters)" for kind, elements in largest)


def find_structure(model: nn.Module, blocks: Sequence[nn.Module] | None, *, allow_partial: bool = False) -> Structure:
    """Find blocks and linears. The arguments are those of :func:`snip_megatron.plain.convert`.

    Raises SnipError if no blocks or linears are found, if blocks share a linear, or if less than half of the blocks'
    matrices can be converted and ``allow_partial`` is not set.
    """
    model = _unwrap(model)
    blocks = tuple(blocks or _find_blocks(model))
    linears: dict[LinearRow, nn.Module] = {}
    unconverted: dict[LinearRow, nn.Module] = {}
    names: dict[tuple[int, str], str] = {}
    for layer, block in enumerate(blocks):
        for path, module in block.named_modules():
            for parameter, row, converts in _matrices(layer, path, module):
                name = names.setdefault((id(module), parameter), row.name)
                if name != row.name:
                    raise SnipError(f"{row.name} is also {name}: blocks that share linears are not supported")
                (linears if converts else unconverted)[row] = module
    if not linears:
        raise SnipError("the blocks have no nn.Linear that SNIP can choose formats for")
    structure = Structure(model, blocks, linears, unconverted)
    if min(structure.reach()) < _MIN_REACH and not allow_partial:
        raise SnipError(f"{'; '.join(structure.describe())}; to train with less than half, pass allow_partial=True")
    return structure


def _matrices(layer: int, path: str, module: nn.Module) -> Iterator[tuple[str, LinearRow, bool]]:
    """Yield the matrices that a module itself holds: parameter, row, and whether it is converted."""
    if isinstance(module, nn.Embedding | nn.modules.conv._ConvNd):
        return
    fused = _fused_experts(module)
    for parameter, weight in module.named_parameters(recurse=False):
        if weight.dim() < 2:
            continue
        n, k = weight.shape[-2:]
        if isinstance(module, nn.Linear):
            n, k = module.out_features, module.in_features  # the weight may be packed
        experts = max(1, weight.numel() // (n * k)) if weight.dim() > 2 else 1
        active = _active_experts(module) if experts == getattr(module, "num_experts", 0) else experts
        parts = [path] if parameter == "weight" and path else [path, parameter]
        name = str(LinearId("decoder", layer, ".".join(filter(None, parts))))
        row = LinearRow(name, 0, n, k, experts, active or experts, trained=weight.requires_grad)
        yield parameter, row, parameter in fused or type(module) is nn.Linear


def _fused_experts(module: nn.Module) -> tuple[str, ...]:
    """Return the two parameters of experts as transformers have them, [experts, N, K], if their code is the usual one.

    Returns nothing for experts with transposed weights, biases or norms of their own, or if the number of experts that
    a token goes through is unknown.
    """
    usual = {"is_transposed": False, "has_bias": False, "has_post_expert_norm": False, "_is_expert_parallel": False}
    if any(getattr(module, name, None) is not value for name, value in usual.items()) or not _active_experts(module):
        return ()
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _active_experts(module: nn.Module) -> int | None:
    """Return the number of experts that a token goes through. None if it is not known."""
    active = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    return active if isinstance(active, int) else None


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and torch.compile. Raises SnipError for other wrappers."""
    for module in model.modules():
        for cls in type(module).__mro__:
            if wrapper := _UNSUPPORTED_WRAPPERS.get(cls.__name__):
                raise SnipError(f"the model is wrapped by {wrapper}: convert() takes a plain model, DDP or fully_shard")
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    return model if inner is None else _unwrap(inner)


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module)
        and all(sum(isinstance(m, nn.Linear) for m in child.modules()) >= _MIN_LINEARS for child in module)
    ]
    if not lists:
        raise SnipError(
            f"no blocks found in {type(model).__name__}: no ModuleList whose modules have {_MIN_LINEARS} linears each;"
            " give blocks=[...]"
        )
    return max(lists, key=len)


# -- conversion ----------------------------------------------------------------------------------------------------
class SnipLinear(nn.Linear):
    """An ``nn.Linear`` whose GEMMs follow the precision map. Conversion assigns it as the class of a built module.

    With three bf16 GEMMs the code of ``nn.Linear`` runs. torch.compile leaves the linear out of its graphs, because
    the map may change at any step.
    """

    snip: LinearHandle

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Make copies and pickles plain ``nn.Linear``, because no map of the training would reach them."""
        state = {name: value for name, value in self.__dict__.items() if name != "snip"}
        return copyreg._reconstructor, (nn.Linear, object, None), state  # type: ignore[attr-defined]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute Y = X·Wᵀ (+ bias). Under autocast in autocast's dtype, as ``nn.Linear`` does."""
        handle = self.snip
        if handle.is_stock:
            return super().forward(x)
        device = x.device.type
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if not torch.is_grad_enabled():
            # A write to weight.data, as averaged weights are put in place, changes no version of the weight.
            handle.state.weights.clear()
        override = None if handle.context.override is None else handle.context.override(handle)
        call = LinearCall(handle, has_backward=torch.is_grad_enabled(), override=override)
        with torch.autocast(device, enabled=False):
            return QuantizedLinear.apply(x, weight, bias, call)  # type: ignore[no-untyped-call,no-any-return]


class SnipExperts(nn.Module):
    """All experts of a layer, as transformers hold them, whose GEMMs follow the precision map.

    Conversion makes the class of a built module a subclass of this one and of its own class, whose code runs while all
    GEMMs are in bf16. Otherwise a token's rows are sorted by expert, and each linear is one grouped product.
    """

    snip: tuple[list[LinearHandle], list[LinearHandle]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Make copies and pickles of the class before."""
        state = {name: value for name, value in self.__dict__.items() if name != "snip"}
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), state  # type: ignore[attr-defined]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """Return the weighted sum of the experts of each token. ``top_k_index`` and ``top_k_weights`` are [T, k]."""
        first, second = self.snip
        if first[0].is_stock and second[0].is_stock:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        experts, active = top_k_index.reshape(-1), top_k_index.shape[-1]
        order = experts.argsort(stable=True)
        splits = torch.bincount(experts, minlength=len(first)).tolist()
        y = self._product(first, hidden_states[order // active], splits)
        y = self._apply_gate(y) if self.has_gate else self.act_fn(y)  # type: ignore[operator]
        y = self._product(second, y, splits) * top_k_weights.reshape(-1, 1)[order]
        return y[order.argsort()].view(-1, active, y.shape[-1]).sum(1).to(hidden_states.dtype)

    def _product(self, handles: list[LinearHandle], x: torch.Tensor, splits: list[int]) -> torch.Tensor:
        weight, device = getattr(self, handles[0].parameter), x.device.type
        if torch.is_autocast_enabled(device):
            x, weight = (each.to(torch.get_autocast_dtype(device)) for each in (x, weight))
        if not torch.is_grad_enabled():
            handles[0].state.weights.clear()
        with torch.autocast(device, enabled=False):
            return grouped_product(handles, weight.unbind(), x, splits)


def convert_linears(linears: Mapping[LinearRow, nn.Module], context: StepContext) -> LinearRegistry:
    """Convert linears, in global order, in place. They share ``context``, the state of the step."""
    registry = LinearRegistry(tuple(linears), context)
    experts: dict[nn.Module, list[list[LinearHandle]]] = defaultdict(list)
    for row, module in linears.items():
        is_linear = isinstance(module, nn.Linear)
        parameter = parameter_of(row, module)
        features = torch.arange(row.n), torch.arange(row.k)
        handles = [
            LinearHandle(
                row.id, "column", row.n, row.k, 0, 0, 1, *features, context, module,
                expert=None if is_linear else expert, parameter=parameter,
            )
            for expert in range(row.experts)
        ]  # fmt: skip
        for handle in handles:
            registry.add(handle)
        if is_linear:
            module.__class__, module.snip = SnipLinear, handles[0]  # type: ignore[assignment]
        else:
            experts[module].append(handles)
    for module, both in experts.items():
        module.__class__ = type(f"Snip{type(module).__name__}", (SnipExperts, type(module)), {})
        module.snip = tuple(sorted(both, key=lambda handles: handles[0].parameter == "down_proj"))  # type: ignore[assignment]
    return registry
