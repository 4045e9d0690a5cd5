"""An example script without its three lines of SNIP, as a team has it: module of warm ranks, with ``SCRIPT=<file>``.

Only what lets Megatron run on a CPU at all is ours.
"""

import os
import re
import sys
from pathlib import Path

from snip_megatron.megatron.startup import prepare


def stripped(text: str) -> str:
    """The text without SNIP's import and ``attach``, and the script's own provider of arguments back."""
    lines = [line for line in text.splitlines() if not line.endswith(("# SNIP 1", "# SNIP 2"))]
    return re.sub(r"snip_arguments\((\w*)\)\)  # SNIP 3", lambda found: f"{found[1] or None})", "\n".join(lines))


def main() -> None:
    startup = prepare(sys.argv[1:], [])
    from megatron.training.arguments import parse_args

    from snip_megatron.megatron import compat

    args = parse_args(ignore_unknown_args=True)
    args.snip = False
    compat.apply(args, startup)
    path = Path(os.environ["SCRIPT"])
    text = stripped(path.read_text())
    assert "snip_megatron.attach" not in text.partition('"""\n\n')[2]
    assert "attach(" not in text
    assert "snip_arguments(" not in text
    exec(compile(text, str(path), "exec"), {"__name__": "__main__"})
