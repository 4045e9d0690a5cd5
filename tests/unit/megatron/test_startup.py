"""What is decided before torch and Megatron are imported, and how the entry reports an error; Megatron's names."""

import os
from typing import Any, NoReturn

import pytest
import torch

from snip_megatron import pretrain_gpt
from snip_megatron.megatron import startup
from snip_megatron.megatron.compat.versions import check_names, check_signature
from snip_megatron.megatron.startup import SUPPORTED, check_version
from snip_megatron.precision.errors import SnipError


def test_unknown_compat_name_lists_the_known_ones() -> None:
    assert startup.check_compat_names(["cpu", "dataset-helpers"]) == {"cpu", "dataset-helpers"}
    with pytest.raises(SnipError, match="nonsense: unknown; choose one of cpu, dataset-helpers"):
        startup.check_compat_names(["cpu", "nonsense"])


@pytest.mark.parametrize("options", [["--yaml-cfg", "run.yaml"], ["--yaml-cfg=run.yaml"]])
def test_arguments_of_a_file_are_refused(options: list[str]) -> None:
    with pytest.raises(SnipError, match=r"^--yaml-cfg is not supported: .* give its arguments on the command line$"):
        startup.prepare(["--snip", *options], [])
    startup.check_sources(["--snip", "--snip-dir", "yaml-cfg", "--te-precision-config-file", "run.yaml"])


def test_fsdp_keeps_its_own_queue_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron asserts one hardware queue, and the opposite for FSDP; what the user set stays."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "8")
    assert startup.prepare([], []) == startup.Startup(on_cpu=False, disabled=frozenset())
    assert os.environ[name] == "8"
    for argv, value in ((["--use-megatron-fsdp"], None), (["--use-torch-fsdp2"], None), ([], "1")):
        monkeypatch.delenv(name, raising=False)
        startup.prepare(argv, ["cpu"])
        assert os.environ.get(name) == value


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


@pytest.mark.parametrize("text", ["0.18.2", "0.19.1", "0.19", "core"])
def test_unsupported(text: str) -> None:
    with pytest.raises(SnipError, match=SUPPORTED):
        check_version(text)


def test_signatures_and_names_that_we_rely_on_are_checked() -> None:
    def function(a: Any, b: Any, c: Any = None) -> None:
        check_version("0.19.2")

    check_signature(function, "a", "b")
    with pytest.raises(SnipError, match=r"function takes \(a, b, c\), expected"):
        check_signature(function, "a", "b", "c", "d")
    check_names(function, "check_version")
    for owner in (function, pytest):
        with pytest.raises(SnipError, match=r"(function|pytest) has no tomorrow, yesterday"):
            check_names(owner, "tomorrow", "yesterday")
