"""The training entry on ranks that differ: ``UNLIKE=RANK:CHANGE=VALUE``, a change below on that rank alone.

Its last line is the exit code of the rank.
"""

import importlib.metadata
import os
import sys
from typing import Any

from snip_megatron import pretrain_gpt


def argument(value: str) -> None:
    """Arguments that only this rank has, separated by spaces."""
    sys.argv.extend(value.split())


def version(value: str) -> None:
    """``PACKAGE==VERSION``: the version that a package seems to have."""
    package, _, text = value.partition("==")
    genuine = importlib.metadata.version
    importlib.metadata.version = lambda name: text if name == package else genuine(name)


def release(value: str) -> None:
    """``MODULE==VERSION``: the version that an imported module has."""
    module, _, text = value.partition("==")
    importlib.import_module(module).__version__ = text  # type: ignore[attr-defined]


def commit(value: str) -> None:
    from snip_megatron.runtime import agreement

    agreement.commit = lambda: value


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
    """A Hopper card by name, whose backend is plain torch: it needs Triton."""
    import torch

    from snip_megatron.numerics.products import selection

    del value
    selection.why_not_hopper = lambda: None if selection.has_triton() else "needs triton, which cannot be imported here"
    selection.has_triton.cache_clear()
    selection._card = lambda: "NVIDIA H100"
    selection._hopper = lambda *_, **__: (selection.REFERENCE, "plain torch")
    torch.cuda.get_device_name = lambda *_: "NVIDIA H100"


def main() -> int:
    for unlike in filter(None, os.environ.get("UNLIKE", "").split("\n")):
        rank, _, change = unlike.partition(":")
        if rank in ("all", os.environ["RANK"]):
            name, _, value = change.partition("=")
            globals()[name](value)
    code = pretrain_gpt.main()
    print(f"rank {os.environ['RANK']} ends with {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
