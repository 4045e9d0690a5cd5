"""How the entry reports an error: once before ranks communicate, and by the rank that has it afterwards."""

from typing import Any, NoReturn

import pytest
import torch

from snip_megatron import pretrain_gpt
from snip_megatron.errors import SnipError
from snip_megatron.megatron import startup


@pytest.mark.parametrize(
    ("rank", "communicating", "printed"),
    [
        ("0", False, "pretrain_gpt: wrong\n"),
        ("1", False, ""),
        ("0", True, "pretrain_gpt: [rank 0] wrong\n"),
        ("1", True, "pretrain_gpt: [rank 1] wrong\n"),
    ],
)
def test_one_line(
    rank: str,
    communicating: bool,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: Any) -> NoReturn:
        raise SnipError("wrong", exit_code=7)

    waits: list[float] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt"])
    monkeypatch.setattr(pretrain_gpt, "prepare", fail)
    monkeypatch.setattr(startup.time, "sleep", waits.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: communicating)
    assert pretrain_gpt.main() == 7
    assert capsys.readouterr().err == printed
    # Leaving at once would have the launcher kill rank 0 before it has printed.
    assert bool(waits) == (rank == "1" and not communicating)
