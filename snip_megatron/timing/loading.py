"""Loading of cost models by name: ``flops``, a table of the package, or a file."""

from __future__ import annotations

from pathlib import Path

from snip_megatron.errors import SnipError, cut
from snip_megatron.timing.cost_model import CostModel, FlopsModel
from snip_megatron.timing.table import TimingTable
from snip_megatron.timing.table_model import TimingModel

TIMINGS = Path(__file__).with_name("tables")
"""Folder of the package's tables of measured times, one file ``<name>.json`` for each device."""


class NoTableError(SnipError):
    """The package has no table of times of this device."""


def load_cost_model(name_or_path: str | Path, device_name: str | None = None) -> CostModel:
    """Load a cost model.

    Args:
        name_or_path: ``flops``; ``time`` for the package's table of ``device_name``; the name of a table of the
            package, such as ``h200``; or the path of a ``snip.timings/1`` file, which ``snip calibrate`` writes.
        device_name: the GPU's name in torch, such as ``NVIDIA H200``. If it is not None, a table of another device is
            refused.

    Raises:
        NoTableError: the package has none of this device.
        SnipError: the table does not exist, is invalid, or was measured on another device.
    """
    return FlopsModel() if str(name_or_path) == "flops" else TimingModel(load_table(name_or_path, device_name))


def load_table(name_or_path: str | Path, device_name: str | None = None) -> TimingTable:
    """Load a table of times. See :func:`load_cost_model`, whose ``flops`` is none."""
    table = TimingTable.load(_table_path(str(name_or_path), device_name))
    if device_name is not None and table.device != device_name:
        raise SnipError(
            f"the timings of {name_or_path} were measured on {table.device}, this is {device_name}:"
            " measure it with snip calibrate --out FILE.json and name that file, or use flops"
        )
    return table


def _table_path(name: str, device_name: str | None) -> Path:
    if name == "time":
        if device_name is None:
            raise SnipError("timings of which device? Name a table (such as h200), a file, or flops")
        for path in sorted(TIMINGS.glob("*.json")):
            if TimingTable.load(path).device == device_name:
                return path
        raise NoTableError(
            f"there is no table of timings of {device_name}: measure one with snip calibrate --out FILE.json"
            " and name that file, or use flops"
        )
    packaged = {path.stem: path for path in sorted(TIMINGS.glob("*.json"))}
    path = packaged.get(name, Path(name))
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        known = ", ".join(["flops", "time", *packaged])
        raise SnipError(f"{cut(name)}: neither a file of timings nor one of {known}") from None
    except OSError:  # whoever reads the file says why it cannot be read
        pass
    return path
