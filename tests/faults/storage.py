"""JSON files by rename: a campaign that is killed keeps what it has."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, body: Any) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(body, indent=1) + "\n")
    os.replace(partial, path)
