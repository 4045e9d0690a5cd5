"""Reads the linears of a model off its built chunks: names, shapes, stages, and places in the residual stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_pg_size

from snip_megatron.precision import LinearId, LinearRow, Role, Side
from snip_megatron.precision.errors import SnipError

# Class → part of the module ("" if it has one linear) → the side that tensor parallel ranks shard. None stands for the
# side of its parallel_mode. Names of base classes are compared, so that Transformer Engine need not be importable.
_SHARDED: dict[str, dict[str, Side | None]] = {
    "ColumnParallelLinear": {"": Side.OUTPUT},
    "RowParallelLinear": {"": Side.INPUT},
    "TEColumnParallelLinear": {"": Side.OUTPUT},
    "TERowParallelLinear": {"": Side.INPUT},
    "TELayerNormColumnParallelLinear": {"": Side.OUTPUT},
    "TEColumnParallelGroupedLinear": {"": Side.OUTPUT},
    "TERowParallelGroupedLinear": {"": Side.INPUT},
    "TELinear": {"": Side.NEITHER},
    # Of Transformer Engine itself. The last one is torch's too.
    "LayerNormMLP": {"fc1": Side.OUTPUT, "fc2": Side.INPUT},
    "LayerNormLinear": {"": None},
    "GroupedLinear": {"": None},
    "Linear": {"": None},
}
_MODES = {"column": Side.OUTPUT, "row": Side.INPUT}
_INNER = ("mtp_model_layer", "transformer_layer")  # layers in a layer of multi-token prediction
# Sub-block → norm before it. Before any other sub-block it is "norm".
_NORMS = {
    "self_attention": "input_layernorm",
    "cross_attention": "pre_cross_attn_layernorm",
    "mlp": "pre_mlp_layernorm",
    "eh_proj": "hnorm",
}


@dataclass(frozen=True)
class BuiltLinear:
    """One linear of this rank, or of one of its experts."""

    id: LinearId
    module: Any  # the module. Grouped linears of experts share one
    parent: Any  # the module that contains ``module``
    reader: Any  # the module that reads the residual stream at the beginning of the linear's sub-block
    writer: Any  # the layer whose output is the residual stream after the sub-block
    expert: int | None  # global index of the expert. None if the linear belongs to no expert
    row: LinearRow  # its row, whose ``sub_block`` is counted within the layer
    parameter: str = "weight"  # name of the module's parameter that is its weight


def built_linears(chunks: Sequence[torch.nn.Module]) -> list[BuiltLinear]:
    """Return the linears of this rank's decoder and MTP layers, in the order of the forward pass.

    Raises SnipError if a chunk has no decoder.
    """
    return [linear for chunk in chunks for stack, layer in _layers(chunk) for linear in _in_layer(stack, layer)]


@dataclass(frozen=True)
class ModelLinears:
    """The linears of a model, over all ranks."""

    covered: tuple[LinearRow, ...]  # those that a precision map covers, in the order of maps and broadcasts
    uncovered: tuple[LinearRow, ...] = ()  # those that stay in bf16. They count in the fp4 share

    @classmethod
    def split(cls, rows: Iterable[LinearRow], stock: Mapping[str, str]) -> ModelLinears:
        """Split the linears of a model into converted ones and those named in ``stock``."""
        ordered = sorted(dict.fromkeys(rows), key=_place)
        covered = _numbered([row for row in ordered if row.name not in stock])
        return cls(tuple(covered), tuple(row for row in ordered if row.name in stock))

    @property
    def names(self) -> list[str]:
        return [row.name for row in self.covered]

    @property
    def flops(self) -> dict[str, float]:
        """Name → FLOPs per token of one GEMM of the linear. Its three GEMMs have equal FLOPs."""
        return {row.name: row.flops for row in self.covered}

    @property
    def uncovered_flops(self) -> dict[int, float]:
        """Pipeline stage → FLOPs per token of all GEMMs of the linears that stay in bf16. Empty if there are none.

        Dropped tokens and padding are not taken into account.
        """
        flops: dict[int, float] = {}
        for row in self.uncovered:
            flops[row.stage] = flops.get(row.stage, 0.0) + row.runs(None) * row.flops
        return flops


def gather_stages[Key, Value](local: Mapping[Key, Value]) -> dict[Key, Value]:
    """Return the entries of all pipeline stages. Collective over all ranks."""
    if not (dist.is_initialized() and parallel_state.model_parallel_is_initialized()):
        return dict(local)
    group = parallel_state.get_pipeline_model_parallel_group()
    parts: list[Mapping[Key, Value]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, local, group=group)
    return {key: value for part in parts for key, value in part.items()}


def _place(row: LinearRow) -> tuple[str, int]:
    return row.id.stack, row.id.layer


def _numbered(rows: Sequence[LinearRow]) -> list[LinearRow]:
    """Number the sub-blocks of the model. Each MTP layer has its own stream, which begins with a new boundary."""
    numbered: list[LinearRow] = []
    first = 0
    for (stack, _), group in itertools.groupby(rows, key=_place):
        first += stack != "decoder"
        layer = list(group)
        blocks = sorted({row.sub_block for row in layer})  # a sub-block without a converted linear has no number
        layer = [replace(row, sub_block=first + blocks.index(row.sub_block)) for row in layer]
        first = 1 + max(row.sub_block for row in layer)
        numbered += layer
    return numbered


def _layers(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    try:  # a pipeline stage with only the embedding or the loss has a decoder without layers
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    except RuntimeError:
        raise SnipError("no decoder found in the model: SNIP supports Megatron's GPT and hybrid models") from None
    for stack in ("decoder", "mtp"):
        for layer in getattr(getattr(model, stack, None), "layers", ()):
            yield stack, layer


def _in_layer(stack: str, layer: Any) -> list[BuiltLinear]:
    linears = [(path, module) for path, module in layer.named_modules() if _parts(module)]
    blocks = list(dict.fromkeys(_sub_block(path) for path, _ in linears))
    built: list[BuiltLinear] = []
    for path, module in linears:
        for part in _parts(module):
            built += _built(stack, layer, path, module, part, blocks.index(_sub_block(path)))
    roles = list(Role)  # modules are in the order of construction: attention builds its output first
    return sorted(built, key=lambda each: (each.row.sub_block, roles.index(each.row.role)))


def _built(stack: str, layer: Any, path: str, module: Any, part: str, sub_block: int) -> list[BuiltLinear]:
    config, parent = layer.config, layer.get_submodule(path.rpartition(".")[0])
    sharded = _parts(module)[part] or _MODES.get(getattr(module, "parallel_mode", ""), Side.NEITHER)
    path, name = (f"{path}.{part}", f"{part}_weight") if part else (path, "weight")
    weights: list[tuple[int | None, str]] = [(None, name)]
    mixture = layer.get_submodule(path.rpartition(".experts.")[0]) if "experts" in path.split(".") else None
    indices = getattr(mixture, "local_expert_indices", None)  # which an MLP of another library need not have
    if indices is not None:
        experts, separate, suffix = path.partition(".local_experts.")
        if separate:  # one module for each expert, under one name
            local, _, suffix = suffix.partition(".")
            weights, path = [(indices[int(local)], name)], f"{experts}.{suffix}"
        elif not part:
            weights = [(expert, f"weight{i}") for i, expert in enumerate(indices)]
    linear = LinearId(stack, layer.layer_number - 1, path)
    weight = getattr(module, weights[0][1], None)  # Transformer Engine may hold it in parts, or for several groups
    n, k = (module.out_features, module.in_features) if weight is None or weight.dim() != 2 else weight.shape
    ranks = get_pg_size(getattr(module, "_tp_group", None) or getattr(module, "tp_group", None))
    n, k = n * (ranks if sharded is Side.OUTPUT else 1), k * (ranks if sharded is Side.INPUT else 1)
    passes = config.mtp_num_layers if stack == "mtp" and config.mtp_use_repeated_layer else 1
    initialized = parallel_state.model_parallel_is_initialized()
    row = LinearRow(
        str(linear), parallel_state.get_pipeline_model_parallel_rank() if initialized else 0, n, k,
        experts=getattr(module, "num_gemms", 1) if indices is None else config.num_moe_experts,
        active=passes * (1 if indices is None else config.moe_router_topk), sub_block=sub_block,
        role=_role(n, k, sharded, config.hidden_size), sharded=sharded,
    )  # fmt: skip
    inside, _, norm = norm_of(path).rpartition(".")
    reader = writer = layer.get_submodule(inside)
    if norm not in ("input_layernorm", "norm"):  # attention and mixers begin with their layer
        reader = getattr(writer, norm, writer)
    return [BuiltLinear(linear, module, parent, reader, writer, expert, row, name) for expert, name in weights]


def norm_of(path: str) -> str:
    """Return the path in the layer of the norm that reads the residual stream for the linear at ``path``."""
    inside, _, last = _sub_block(path).rpartition(".")
    return f"{inside}.{_NORMS.get(last, 'norm')}".lstrip(".")


def _role(n: int, k: int, sharded: Side, hidden: int) -> Role:
    """Return the role of a linear in its sub-block, given its width and the side that is sharded.

    Tensor parallelism shards the input of linears that end a branch, and the output of all others.
    """
    if sharded is not Side.INPUT and k % hidden == 0:  # MTP's eh_proj reads the stream and the embedding
        return Role.READS
    return Role.WRITES if sharded is not Side.OUTPUT and n == hidden else Role.BETWEEN


def _parts(module: torch.nn.Module) -> dict[str, Side | None]:
    return next((_SHARDED[base.__name__] for base in type(module).__mro__ if base.__name__ in _SHARDED), {})


def _sub_block(path: str) -> str:
    """Return the path in the layer up to the module whose output is added to the residual stream."""
    parts = path.split(".")
    end = 0
    while parts[end] in _INNER or parts[end] == "layers":  # a hybrid's MTP layer holds layers with numbers
        end += 2 if parts[end] == "layers" else 1
    return ".".join(parts[: end + 1])
