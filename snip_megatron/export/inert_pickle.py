"""Reading pickles of torch and Megatron without importing or calling what they name, but for a short list.

Names off the list become objects that do nothing. ``torch.load(..., pickle_module=inert_pickle)`` takes this module.
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
"""Data classes and what rebuilds a tensor from stored bytes: nothing here runs code of a file's choice."""


class Inert:
    """Stands for every other class and function that a pickle names: it takes what it is given and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class Unpickler(pickle.Unpickler):
    """The standard one, but for the names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REAL:
            return getattr(importlib.import_module(module), name)
        found = getattr(torch, name, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else Inert


def load(file: Any, **kwargs: Any) -> Any:
    """As ``pickle.load``."""
    return Unpickler(file, **kwargs).load()
