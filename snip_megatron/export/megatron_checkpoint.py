"""Reads a GPT checkpoint of Megatron as whole tensors by global names, without Megatron or a process group.

Supported are ``torch_dist`` (any parallel layout) and the legacy ``torch`` format (any tensor, pipeline and virtual
pipeline parallel size). Pickles are read by :mod:`snip_megatron.megatron.inert_pickle`, which runs no code that the
checkpoint chooses.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from snip_megatron.errors import SnipError, cut
from snip_megatron.megatron import inert_pickle

_TRACKER = "latest_checkpointed_iteration.txt"
_MODEL = ("embedding.", "decoder.", "encoder.", "output_layer.", "mtp.", "position_embeddings.")
_LAYERS = "decoder.layers."
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?\Z")
_BROKEN = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    KeyError,
    AttributeError,
    TypeError,
    AssertionError,
    pickle.UnpicklingError,
    CheckpointException,
)
"""Exceptions that torch and pickle raise on truncated files and on files of another kind."""

_SPLIT_ON = {
    "embedding.word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
    "mlp.linear_fc1.weight": 0,
    "mlp.linear_fc1.bias": 0,
    "mlp.linear_fc2.weight": 1,
}
"""Parameter → the dimension that tensor parallelism shards. Other parameters are equal on every rank."""

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Name of a norm that Transformer Engine fuses with the next linear → its name as a module of its own.

``torch_dist`` checkpoints use the fused names with and without Transformer Engine.
"""


@dataclass(frozen=True)
class MegatronCheckpoint:
    """The model weights of a checkpoint and the arguments of the run that wrote it.

    Attributes:
        path: Folder of the iteration.
        arguments: Megatron's arguments by name.
        tensors: Global name (``decoder.layers.<0-based>.…``) → whole tensor on the CPU in the stored dtype. Under
            SwiGLU, ``linear_fc1`` holds the rows of the gate projection followed by those of the up projection.
    """

    path: Path
    arguments: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


def read_checkpoint(source: Path, step: int | None = None) -> MegatronCheckpoint:
    """Read a checkpoint.

    Args:
        source: The ``--save`` folder of a run, or the folder of one iteration.
        step: Iteration to read from a run's folder. With None, the tracker file names it.

    Raises:
        SnipError: If this is not a checkpoint of a supported format, or if it is incomplete or lacks the arguments of
            its run.
    """
    path = iteration_folder(source, step)
    try:
        if (path / ".metadata").is_file():
            arguments, tensors = _read_distributed(path)
        elif any(_RANK.match(entry.name) for entry in path.iterdir()):
            arguments, tensors = _read_legacy(path)
        else:
            raise SnipError(f"{path}: not a checkpoint of Megatron: neither .metadata nor mp_rank_… is in it")
    except _BROKEN as error:
        raise SnipError(f"{path}: cannot be read as a checkpoint ({_one_line(error)})") from None
    if "embedding.word_embeddings.weight" not in tensors:
        raise SnipError(f"{path}: holds no embedding.word_embeddings.weight: not a GPT model of Megatron's")
    return MegatronCheckpoint(path, arguments, {_plain_name(name): tensor for name, tensor in tensors.items()})


def iteration_folder(source: Path, step: int | None = None) -> Path:
    """Return the folder of one iteration. Raises SnipError if it does not exist."""
    if not source.is_dir():
        raise SnipError(f"{source}: is not a folder; give a run's --save folder or one of its iter_… folders")
    tracker = source / _TRACKER
    if step is not None:
        path = source / f"iter_{step:07d}"
        if not path.is_dir():
            raise SnipError(f"--step {step}: there is no {path}")
        return path
    if not tracker.is_file():
        return source
    try:
        text = tracker.read_text(encoding="ascii").strip()
        path = source / ("release" if text == "release" else f"iter_{int(text):07d}")
    except (OSError, ValueError):
        raise SnipError(f"{tracker}: names no iteration; choose one by --step") from None
    if not path.is_dir():
        raise SnipError(f"{tracker}: names iteration {cut(text)}, and there is no {path}; choose another by --step")
    return path


def _one_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # its own text names ranks instead of what failed there
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _plain_name(name: str) -> str:
    for fused, plain in _FUSED_NORMS.items():
        name = name.replace(fused, plain)
    return name


def _arguments(state: Any, where: Path) -> dict[str, Any]:
    args = state.get("args") if isinstance(state, Mapping) else None
    if args is None or not hasattr(args, "__dict__"):
        raise SnipError(f"{where}: holds no arguments of Megatron's run: what model it is cannot be known")
    return dict(vars(args))


# -- torch_dist ----------------------------------------------------------------------------------------------------
class _Reader(FileSystemReader):
    """Reads the metadata by :mod:`inert_pickle`; the base class would unpickle everything that it names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = inert_pickle.load(file)
        if not isinstance(metadata, Metadata):
            raise ValueError(".metadata is not that of a distributed checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """Reads objects by :mod:`inert_pickle`; the base class would unpickle everything that they name.

    Attributes:
        objects: Name → object that was read.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.objects: dict[str, Any] = {}

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.objects[read_item.dest_index.fqn] = _load(value)


def _load(file: Any) -> Any:
    return torch.load(
        file, map_location="cpu", weights_only=False, pickle_module=inert_pickle, mmap=isinstance(file, Path) or None
    )


def _read_distributed(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    reader = _Reader(path)
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {}
    for name, entry in stored.items():
        if isinstance(entry, TensorStorageMetadata) and name.startswith(_MODEL):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    common = [name for name in stored if name.startswith("common_state/")]
    planner = _Planner()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load(state | dict.fromkeys(common), storage_reader=reader, planner=planner, no_dist=True)
    # Older versions of Megatron write the common state into a separate file.
    content = planner.objects[common[0]] if common else _load(path / "common.pt")
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    return _arguments(content, path), dict(_unstacked(_joined_halves(state)))


def _joined_halves(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Concatenate gate and up projections of SwiGLU, which Megatron stores under two names with some options."""
    for name in [name for name in tensors if name.endswith("_w") and f"{name[:-2]}_v" in tensors]:
        gate, up = tensors.pop(name), tensors.pop(f"{name[:-2]}_v")
        tensors[name[:-2]] = torch.cat([gate, up], dim=-2)
    return tensors


def _unstacked(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Split tensors that Megatron stacks over layers (``decoder.layers.mlp.…``, [layers, …]) into views per layer."""
    for name, tensor in tensors.items():
        rest = name.removeprefix(_LAYERS)
        if rest == name or rest.split(".")[0].isdigit():
            yield name, tensor
        else:
            for layer, one in enumerate(tensor):
                yield f"{_LAYERS}{layer}.{rest}", one


# -- legacy --------------------------------------------------------------------------------------------------------
def _read_legacy(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    ranks: dict[tuple[int, int], Path] = {}
    for entry in path.iterdir():
        if match := _RANK.match(entry.name):
            ranks[int(match[1]), int(match[2] or 0)] = entry / "model_optim_rng.pt"
    arguments = _arguments(_load(ranks[min(ranks)]), path)
    tp, pp = (int(arguments[f"{kind}_model_parallel_size"]) for kind in ("tensor", "pipeline"))
    missing = [(t, p) for p in range(pp) for t in range(tp) if (t, p) not in ranks]
    if missing or len(ranks) != tp * pp:
        raise SnipError(
            f"{path}: holds {len(ranks)} mp_rank_… folders for tensor parallel {tp} times pipeline parallel {pp}"
        )
    stages = [[_chunks(_load(ranks[t, p])) for t in range(tp)] for p in range(pp)]
    tensors: dict[str, torch.Tensor] = {}
    first = 0
    for chunk in range(len(stages[0][0])):
        for stage in stages:
            first += _add_chunk(tensors, [rank[chunk] for rank in stage], first, gated=bool(arguments.get("swiglu")))
    return arguments, tensors


def _chunks(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The model chunks of one rank. There are several under a virtual pipeline."""
    if float(state.get("checkpoint_version", 0)) < 3:
        raise SnipError("the checkpoint's version is older than 3.0: its QKV weights lie in another order")
    if "model" in state:
        return [state["model"]]
    return [state[f"model{i}"] for i in range(sum(re.fullmatch(r"model\d+", key) is not None for key in state))]


def _add_chunk(
    tensors: dict[str, torch.Tensor], shards: Sequence[Mapping[str, Any]], first: int, *, gated: bool
) -> int:
    """Join the tensor parallel ``shards`` of a chunk whose first layer is ``first``. Returns its number of layers."""
    layers = 0
    for name, value in shards[0].items():
        if not isinstance(value, torch.Tensor) or name.endswith("_extra_state") or not name.startswith(_MODEL):
            continue
        kind = name
        if name.startswith(_LAYERS):
            local, kind = name.removeprefix(_LAYERS).split(".", 1)
            layers = max(layers, int(local) + 1)
            name = f"{_LAYERS}{first + int(local)}.{kind}"
        tensors[name] = _joined([shard[_local(name, first)] for shard in shards], kind, gated=gated)
    return layers


def _local(name: str, first: int) -> str:
    if not name.startswith(_LAYERS):
        return name
    layer, kind = name.removeprefix(_LAYERS).split(".", 1)
    return f"{_LAYERS}{int(layer) - first}.{kind}"


def _joined(parts: Sequence[torch.Tensor], kind: str, *, gated: bool) -> torch.Tensor:
    dim = _SPLIT_ON.get(kind)
    if dim is None or len(parts) == 1:
        return parts[0]
    if gated and kind.startswith("mlp.linear_fc1."):  # each rank holds its shard of the gate, then its shard of up
        halves = [part.chunk(2, dim=0) for part in parts]
        return torch.cat([half[which] for which in (0, 1) for half in halves])
    return torch.cat(list(parts), dim=dim)
