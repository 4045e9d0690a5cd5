"""Reads pickles of torch and Megatron checkpoints without running code that the file chooses.

Only the classes and functions of a short list are imported. Every other name becomes :class:`Inert`, an object that
does nothing. The module can be passed to ``torch.load(..., pickle_module=inert_pickle)``. ``torch.load`` with
``weights_only=True`` does not replace it: its unpickler lacks the opcodes of protocol 4, in which torch writes the
``.metadata`` of a distributed checkpoint.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import torch

UnpicklingError = pickle.UnpicklingError

_METADATA = "torch.distributed.checkpoint.metadata"
_REAL = frozenset(
    {
        ("argparse", "Namespace"),
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            (_METADATA, name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)
"""(module, name) of data classes, and of functions that rebuild a tensor from stored bytes."""


class Inert:
    """Stands in for every other class and function that a pickle names. It accepts any arguments and ignores them."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class Unpickler(pickle.Unpickler):
    """Python's unpickler, which resolves names off the list to :class:`Inert`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REAL:
            return getattr(importlib.import_module(module), name)
        found = getattr(torch, name, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else Inert


def load(file: Any, **kwargs: Any) -> Any:
    """Read one object from ``file``, as ``pickle.load`` does."""
    return Unpickler(file, **kwargs).load()
