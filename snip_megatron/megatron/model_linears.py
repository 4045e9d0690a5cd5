"""Reads the linears of a model off its built chunks: names, shapes, stages, and places in the residual stream."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_pg_size

from snip_megatron.precision import LinearId, LinearRow, Role, Side
from snip_megatron.precision.errors import SnipError

# Class → part of the module, if it has several linears → what tensor parallel ranks share; None: what its parallel_mode
# says. Subclasses are found by their bases, so that Transformer Engine's need not be importable.
_SHARDED: dict[str, dict[str, Side | None]] = {
    "ColumnParallelLinear": {"": Side.OUTPUT},
    "RowParallelLinear": {"": Side.INPUT},
    "TEColumnParallelLinear": {"": Side.OUTPUT},
    "TERowParallelLinear": {"": Side.INPUT},
    "TELayerNormColumnParallelLinear": {"": Side.OUTPUT},
    "TEColumnParallelGroupedLinear": {"": Side.OUTPUT},
    "TERowParallelGroupedLinear": {"": Side.INPUT},
    "TELinear": {"": Side.NEITHER},
    # Transformer Engine's own; the last also torch's
    "LayerNormMLP": {"fc1": Side.OUTPUT, "fc2": Side.INPUT},
    "LayerNormLinear": {"": None},
    "GroupedLinear": {"": None},
    "Linear": {"": None},
}
_MODES = {"column": Side.OUTPUT, "row": Side.INPUT}
_INNER = ("mtp_model_layer", "transformer_layer")  # layers in a layer of multi-token prediction
# Sub-block → norm before it; "norm" before any other.
_NORMS = {
    "self_attention": "input_layernorm",
    "cross_attention": "pre_cross_attn_layernorm",
    "mlp": "pre_mlp_layernorm",
    "eh_proj": "hnorm",
}


@dataclass(frozen=True)
class BuiltLinear:
    """One linear of this rank, or that of one expert.

    Attributes:
        module: the module. Grouped linears of experts share one.
        owner: the module that has it.
        reader: the module that reads the residual stream at the beginning of the linear's sub-block.
        writer: the layer whose output is the residual stream after the sub-block.
        expert: global index of the expert; None for a linear that belongs to none.
        row: its row, whose ``sub_block`` is counted within the layer.
        parameter: name of the module's parameter that is its weight.
    """

    id: LinearId
    module: Any
    owner: Any
    reader: Any
    writer: Any
    expert: int | None
    row: LinearRow
    parameter: str = "weight"


def built_linears(chunks: Sequence[torch.nn.Module]) -> list[BuiltLinear]:
    """Return the linears of this rank's decoder and MTP layers, in the order of the forward pass.

    Raises SnipError if a chunk has no decoder.
    """
    found: list[BuiltLinear] = []
    for chunk in chunks:
        for stack, layer in _layers(chunk):
            found += _in_layer(stack, layer)
    return found


@dataclass(frozen=True)
class ModelLinears:
    """The linears of a model, over all ranks.

    Attributes:
        covered: those that a precision map covers, in the order that maps and broadcasts use.
        left: those that stay in bf16. They count in the fp4 share.
    """

    covered: tuple[LinearRow, ...]
    left: tuple[LinearRow, ...] = ()

    @classmethod
    def split(cls, rows: Iterable[LinearRow], stock: Mapping[str, str]) -> ModelLinears:
        """Split the linears of a model, of which those named in ``stock`` are not converted."""
        ordered = sorted(dict.fromkeys(rows), key=_place)
        covered = _numbered([row for row in ordered if row.name not in stock])
        return cls(tuple(covered), tuple(row for row in ordered if row.name in stock))

    @property
    def names(self) -> list[str]:
        """Names of the linears that a map covers."""
        return [row.name for row in self.covered]

    @property
    def flops(self) -> dict[str, float]:
        """Name → FLOPs per token of one GEMM of the linear. Its three GEMMs have equal FLOPs."""
        return {row.name: row.flops for row in self.covered}

    @property
    def left_flops(self) -> dict[int, float]:
        """Pipeline stage → FLOPs per token of all GEMMs of the linears that stay in bf16. Empty if there are none.

        Dropped tokens and padding are not taken into account.
        """
        found: dict[int, float] = {}
        for row in self.left:
            found[row.stage] = found.get(row.stage, 0.0) + row.runs(None) * row.flops
        return found


def model_linears(local: Sequence[BuiltLinear], stock: Mapping[str, str]) -> ModelLinears:
    """Return the linears of the whole model, from those of this rank. Collective, over all ranks.

    Raises SnipError if ranks of the same pipeline stage have built different models. ``stock`` is the name of a linear
    of the model that is not converted → why.
    """
    rows = of_all_stages({each.row: None for each in local})  # experts of a layer share a row
    linears = ModelLinears.split(rows, stock)
    _check_equal(linears.covered)
    return linears


def of_all_stages[Key, Value](own: Mapping[Key, Value]) -> dict[Key, Value]:
    """Return the entries of all pipeline stages. Collective, over all ranks."""
    if not (dist.is_initialized() and parallel_state.model_parallel_is_initialized()):
        return dict(own)
    group = parallel_state.get_pipeline_model_parallel_group()
    parts: list[Mapping[Key, Value]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, own, group=group)
    return {key: value for part in parts for key, value in part.items()}


def _place(row: LinearRow) -> tuple[str, int]:
    return row.id.stack, row.id.layer


def _numbered(rows: Sequence[LinearRow]) -> list[LinearRow]:
    """Count sub-blocks over the model. Each MTP layer has a stream of its own, which begins with a new boundary."""
    found: list[LinearRow] = []
    first = 0
    for (stack, _), group in itertools.groupby(rows, key=_place):
        first += stack != "decoder"
        of_layer = list(group)
        blocks = sorted({row.sub_block for row in of_layer})  # a sub-block without a converted linear has none
        own = [replace(row, sub_block=first + blocks.index(row.sub_block)) for row in of_layer]
        first = 1 + max(row.sub_block for row in own)
        found += own
    return found


def _check_equal(rows: Sequence[LinearRow]) -> None:
    if not dist.is_initialized():
        return
    digest = zlib.crc32(repr(rows).encode())
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ends = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    if int(ends[0]) != -int(ends[1]):
        raise SnipError("data parallel ranks have built different models: all ranks must get the same arguments")


def _layers(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    try:  # a pipeline stage that holds the embedding or the loss alone has a decoder without layers
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    except RuntimeError:
        raise SnipError("no decoder found in the model: SNIP supports Megatron's GPT and hybrid models") from None
    for stack in ("decoder", "mtp"):
        for layer in getattr(getattr(model, stack, None), "layers", ()):
            yield stack, layer


def _in_layer(stack: str, layer: Any) -> list[BuiltLinear]:
    linears = [(path, module) for path, module in layer.named_modules() if _parts(module)]
    blocks = list(dict.fromkeys(_sub_block(path) for path, _ in linears))
    found: list[BuiltLinear] = []
    for path, module in linears:
        for part in _parts(module):
            found += _built(stack, layer, path, module, part, blocks.index(_sub_block(path)))
    roles = list(Role)  # modules are in the order of construction: attention builds its output first
    return sorted(found, key=lambda each: (each.row.sub_block, roles.index(each.row.role)))


def _built(stack: str, layer: Any, path: str, module: Any, part: str, sub_block: int) -> list[BuiltLinear]:
    config, owner = layer.config, layer.get_submodule(path.rpartition(".")[0])
    sharded = _parts(module)[part] or _MODES.get(getattr(module, "parallel_mode", ""), Side.NEITHER)
    path, own = (f"{path}.{part}", f"{part}_weight") if part else (path, "weight")
    weights: list[tuple[int | None, str]] = [(None, own)]
    mixed = layer.get_submodule(path.rpartition(".experts.")[0]) if "experts" in path.split(".") else None
    indices = getattr(mixed, "local_expert_indices", None)  # which an MLP of another library need not have
    if indices is not None:
        mixture, inside, rest = path.partition(".local_experts.")
        if inside:  # one module an expert, under one name
            local, _, rest = rest.partition(".")
            weights, path = [(indices[int(local)], own)], f"{mixture}.{rest}"
        elif not part:
            weights = [(expert, f"weight{i}") for i, expert in enumerate(indices)]
    linear = LinearId(stack, layer.layer_number - 1, path)
    weight = getattr(module, weights[0][1], None)  # Transformer Engine's own may be in parts, or one of several groups
    n, k = (module.out_features, module.in_features) if weight is None or weight.dim() != 2 else weight.shape
    ranks = get_pg_size(getattr(module, "_tp_group", None) or getattr(module, "tp_group", None))
    n, k = n * (ranks if sharded is Side.OUTPUT else 1), k * (ranks if sharded is Side.INPUT else 1)
    passes = config.mtp_num_layers if stack == "mtp" and getattr(config, "mtp_use_repeated_layer", False) else 1
    row = LinearRow(
        str(linear),
        parallel_state.get_pipeline_model_parallel_rank() if parallel_state.model_parallel_is_initialized() else 0,
        n,
        k,
        experts=getattr(module, "num_gemms", 1) if indices is None else config.num_moe_experts,
        active=passes * (1 if indices is None else config.moe_router_topk),
        sub_block=sub_block,
        role=_role(n, k, sharded, config.hidden_size),
        sharded=sharded,
    )
    ends = _ends(layer, path)
    return [BuiltLinear(linear, module, owner, *ends, expert, row, parameter) for expert, parameter in weights]


def norm_of(path: str) -> str:
    """Return the path in the layer of the norm that reads the residual stream for the linear at ``path``."""
    inside, _, last = _sub_block(path).rpartition(".")
    return f"{inside}.{_NORMS.get(last, 'norm')}".lstrip(".")


def _ends(layer: Any, path: str) -> tuple[Any, Any]:
    """Return reader and writer of a linear's sub-block. Attention and mixers begin with their layer."""
    inside, _, norm = norm_of(path).rpartition(".")
    layer = layer.get_submodule(inside)
    return layer if norm in ("input_layernorm", "norm") else getattr(layer, norm, layer), layer


def _role(n: int, k: int, sharded: Side, hidden: int) -> Role:
    """Return what a linear does in its sub-block, by its width and by what is sharded: its input in linears that end a
    branch, else its output.
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
