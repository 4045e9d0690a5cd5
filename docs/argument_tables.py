"""Writes the tables of ``docs/arguments.md`` from the code: ``python docs/argument_tables.py``.

A table stands below ``<!-- arguments: a b -->``, which names fields of ``SnipConfig``, below ``<!-- arguments: rest
-->``, which stands for those that no other table has, or below ``<!-- settings -->``.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from snip_megatron.runtime.config import SnipConfig, add_arguments
from snip_megatron.runtime.options import is_option

PAGE = Path(__file__).with_name("arguments.md")
_TABLE = re.compile(r"<!-- (?:arguments: (.*?)|settings) -->\n\n?(?:\|.*\n)*")


def filled(text: str) -> str:
    """Return the text of the page with its tables as the code has them."""
    actions = add_arguments(argparse.ArgumentParser(add_help=False))._actions
    known = {
        action.option_strings[0].removeprefix("--").removeprefix("snip-").replace("-", "_"): action
        for action in actions
    }
    placed = " ".join(found[1] for found in _TABLE.finditer(text) if found[1]).split()
    if unknown := set(placed) - {"rest", *known}:
        raise SystemExit(f"{PAGE}: no such field of SnipConfig: {', '.join(sorted(unknown))}")

    def table(found: re.Match[str]) -> str:
        if found[1] is None:
            rows = _settings()
        else:
            names = [name for name in known if name not in placed] if found[1] == "rest" else found[1].split()
            rows = (_row(known[name]) for name in names)
        head = "setting" if found[1] is None else "argument"
        lines = [f"| {head} | default | meaning |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
        return found[0].partition("\n")[0] + "\n\n" + "".join(f"{line}\n" for line in lines)

    return _TABLE.sub(table, text)


def _row(action: argparse.Action) -> tuple[str, str, str]:
    text, _, default = str(action.help).partition("; default: ")
    name = f"{action.option_strings[0]} {action.metavar or ''}".strip()
    return _code(name), _code(default) if default and " " not in default else _escaped(default), _escaped(text)


def _settings() -> Iterable[tuple[str, str, str]]:
    for field in dataclasses.fields(SnipConfig)[1:]:
        if not is_option(field):
            yield _code(field.name), _code(json.dumps(field.default)), _escaped(str(field.metadata["help"]))


def _code(text: str) -> str:
    return f"<code>{_escaped(text)}</code>" if "|" in text else f"`{text}`"


def _escaped(text: str) -> str:
    """Return a text that no Markdown viewer takes for HTML, for emphasis or for the end of a cell."""
    return html.escape(text, quote=False).replace("|", "&#124;").replace("*", "&#42;")


def main() -> int:
    """Write the tables, or with ``--check`` return 1 if they are not those of the code."""
    text = PAGE.read_text(encoding="utf-8")
    new = filled(text)
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(new, encoding="utf-8")
    elif text != new:
        print(f"{PAGE} is not what the code says: run python docs/argument_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
