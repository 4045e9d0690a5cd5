"""Synthetic statistics tables are those of the sensitivity tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
