"""The training entry, or the module ``ENTRY``, on ranks that differ.

Each line of ``UNLIKE`` is ``RANK:CHANGE=VALUE``, a change below on that rank, or on all. The last line that a rank
prints is its exit code.
"""

import importlib.metadata
import os
import sys
from typing import Any


def argument(value: str) -> None:
    """Arguments that only this rank has, separated by spaces."""
    sys.argv.extend(value.split())


def release(value: str) -> None:
    """``MODULE==VERSION``: the version that an imported module has."""
    module, _, text = value.partition("==")
    importlib.import_module(module).__version__ = text  # type: ignore[attr-defined]


def commit(value: str) -> None:
    from snip_megatron.runtime import agreement

    agreement.commit = lambda: value


def node(value: str) -> None:
    """This rank is the first one of another node."""
    os.environ["LOCAL_RANK"] = "0"


def missing(value: str) -> None:
    """A package that cannot be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == value]:
        del sys.modules[name]
    sys.modules[value] = None  # type: ignore[assignment]


def broken(value: str) -> None:
    """An attribute, ``MODULE:NAME``, that raises PermissionError when it is called, as an unreadable home does."""
    module, _, name = value.partition(":")

    def fail(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", "/home/user")

    setattr(importlib.import_module(module), name, fail)


def hopper(value: str) -> None:
    """A Hopper card whose products are plain torch. ``value``: the fastest library that can be loaded."""
    import torch

    from snip_megatron.numerics.products import selection

    class Backend(selection.GemmBackend):
        name = "hopper"

    def make(library: str, **_: Any) -> tuple[Any, str]:
        backend = Backend()
        backend.products = {"auto": value, "cublas": "cuBLASLt"}[library]
        return backend, backend.products

    selection.has_triton.cache_clear()
    selection.why_not_hopper = lambda: None if selection.has_triton() else "needs triton, which cannot be imported here"
    selection._card = torch.cuda.get_device_name = lambda *_: "NVIDIA H100"
    selection._hopper = make


def main() -> int:
    for unlike in filter(None, os.environ.get("UNLIKE", "").split("\n")):
        rank, _, change = unlike.partition(":")
        if rank in ("all", os.environ["RANK"]):
            name, _, value = change.partition("=")
            globals()[name](value)
    try:
        code = importlib.import_module(os.environ.get("ENTRY", "snip_megatron.pretrain_gpt")).main()
    except SystemExit as leaving:  # of a script
        code = leaving.code
    print(f"rank {os.environ['RANK']} ends with {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
