"""Faults injected into real trainings: the package needs the folder ``tests`` on PYTHONPATH."""

import os
import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_FOLDERS = [str(folder) for folder in (_TESTS, _TESTS / "distributed", _TESTS.parent)]
sys.path[:0] = [folder for folder in _FOLDERS if folder not in sys.path]
# Ranks and solver processes find this package too.
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
