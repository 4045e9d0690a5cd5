"""Loading of cost models by name: ``flops``, a table of the package, a GPU, or a file."""

import functools
import os
import re
import sys
from pathlib import Path

from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.timing.cost_model import CostModel, FlopsModel
from snip_megatron.timing.table import TimingTable

TIMINGS = Path(__file__).with_name("tables")
"""Folder of the package's tables of measured times, one file ``<name>.json`` for each device."""

_RELATIVES = {"h100": "h100", "h200": "h200", "gh200": "h200"}
"""First word of a GPU's name → the package's table of the nearest card: of NVL, PCIe and Grace Hopper variants too."""


class NoTableError(SnipError):
    """The package has no table of times of this device."""


def load_cost_model(name_or_path: str | Path, device_name: str | None = None) -> CostModel:
    """Load a cost model: ``flops``; the table of the package of a name such as ``h200``, or of a GPU such as ``NVIDIA
    H100 NVL`` or ``h100-nvl``; or the ``snip.timings/1`` file of a path, which ``snip calibrate`` writes.

    A GPU without a table takes that of its nearest relative, with a warning. If ``device_name``, the GPU's name in
    torch, is given, a table of another device is refused, unless they are relatives. Raises NoTableError if the package
    has no table of this GPU, SnipError if there is none, or a bad or another one.
    """
    return FlopsModel() if str(name_or_path) == "flops" else CostModel(load_table(name_or_path, device_name))


def load_table(name_or_path: str | Path, device_name: str | None = None) -> TimingTable:
    """Load a table of times. See :func:`load_cost_model`, whose ``flops`` is none."""
    name, asked = str(name_or_path), device_name
    packaged = {path.stem: path for path in sorted(TIMINGS.glob("*.json"))}
    if name in packaged:
        path = packaged[name]
    elif _nearest(name) is not None and not os.path.lexists(name):
        path, asked = packaged_table(name), device_name or name
    else:
        path = Path(name)
        if not os.path.lexists(path):
            raise SnipError(f"{cut(name)}: neither a file of timings nor one of {', '.join(['flops', *packaged])}")
    table = TimingTable.load(path)
    if asked is not None and asked != table.device:
        if _nearest(asked) is None or _nearest(asked) != _nearest(table.device):
            raise SnipError(
                f"the timings of {name} were measured on {table.device}, this is {asked}:"
                " measure it with snip calibrate --out FILE.json and name that file, or use flops"
            )
        _warn(asked, table.device)
    return table


def packaged_table(device_name: str) -> Path:
    """Return the file of the package's table of a GPU or of its nearest relative. Raises NoTableError."""
    path = TIMINGS / f"{_nearest(device_name)}.json"
    if not path.exists():
        raise NoTableError(
            f"there is no table of timings of {device_name}: measure one with snip calibrate --out FILE.json"
            " and name that file, or use flops"
        )
    return path


def _nearest(device_name: str) -> str | None:
    """Return the name of the package's table of the GPU's nearest relative, which need not exist; None if unknown."""
    words = re.fullmatch(r"(?:nvidia )?(\w+)(?:[ -][\w -]*)?", device_name.lower())
    return None if words is None else _RELATIVES.get(words[1])


@functools.cache
def _warn(device_name: str, measured: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(
            f"snip: warning: the times are those of {measured}, the nearest relative of {device_name}; snip calibrate"
            " measures this card",
            file=sys.stderr,
            flush=True,
        )
