"""How the entry reports an error: the first rank that has it prints it, unless the launcher ends it before."""

from typing import Any, NoReturn

import pytest

from snip_megatron import pretrain_gpt
from snip_megatron.megatron import startup
from snip_megatron.precision.errors import SnipError


@pytest.mark.parametrize(
    ("rank", "local", "printed", "waits"),
    [
        ("0", "0", "pretrain_gpt: wrong\n", []),
        ("8", "0", "pretrain_gpt: [rank 8] wrong\n", [20.0]),  # of a file that the other nodes have
        ("9", "1", "pretrain_gpt: [rank 9] wrong\n", [40.0]),
    ],
)
def test_one_line(
    rank: str,
    local: str,
    printed: str,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: Any) -> NoReturn:
        raise SnipError("wrong", exit_code=7)

    waited: list[float] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt"])
    monkeypatch.setattr(pretrain_gpt, "prepare", fail)
    monkeypatch.setattr(startup.time, "sleep", waited.append)
    assert pretrain_gpt.main() == 7
    assert capsys.readouterr().err == printed
    # Leaving at once would have the launcher kill rank 0 before it has printed.
    assert waited == waits
