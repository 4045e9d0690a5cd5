"""Ranks with different configurations do not start: one line on all, and one exit code."""

import importlib.metadata
import re
import socket
import subprocess
from pathlib import Path

import pytest
from launch import error_lines, losses, run_ranks, tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron import __version__ as VERSION
from snip_megatron.runtime.run_data import read_config

SNIP = ("--snip", "--snip-first-update", "1", "--snip-lag", "1", "--snip-update-interval", "3", "--snip-wait", "60")
HOST = socket.gethostname()
_EXIT_CODE = re.compile(r"rank (\d+) ends with (\d+)")


def start(warm: WarmRanks, tmp: Path, *unlike: str, snip: tuple[str, ...] = SNIP, ranks: int = 2) -> tuple[str, str]:
    """Return the one error line of ranks that differ, and the exit codes of all ranks."""
    args = tiny_llama_args(*snip, "--global-batch-size", str(2 * ranks), iters=4)
    process = warm.run(ranks, args, tmp=tmp, module="unlike_pretrain", env={"UNLIKE": "\n".join(unlike)}, timeout=120)
    assert losses(process) == {}
    return only_line(process), " ".join(code for _, code in sorted(_EXIT_CODE.findall(process.stdout)))


def only_line(process: subprocess.CompletedProcess[str]) -> str:
    (line,) = error_lines(process) or [process.stderr]
    return line.removeprefix("pretrain_gpt: ")


@pytest.mark.parametrize(
    ("unlike", "field", "value", "expected"),
    [
        ("argument=--clip-grad 2", "--clip-grad", "2.0", "1.0"),
        ("commit=0123456789ab\n1:node=", "snip_megatron", f"{VERSION} 0123456789ab", f"{VERSION} abcdef"),
    ],
)
def test_a_rank_that_differs_ends_the_start(
    unlike: str, field: str, value: str, expected: str, warm: WarmRanks, tmp_path: Path
) -> None:
    snip = (*SNIP, "--snip-formats", "fp8,fp4", "--snip-budget", "fp4=0.75")
    line, codes = start(warm, tmp_path, "all:commit=abcdef", f"1:{unlike}", snip=snip)
    assert line == f"ranks differ: on rank 1 ({HOST}) {field} is {value}, on rank 0 ({HOST}) {expected}"
    assert codes == "19 19"


def test_differences_of_many_ranks_are_one_line(warm: WarmRanks, tmp_path: Path) -> None:
    unlike = [f"{rank}:argument=--snip-schedule auto --snip-seed {rank} --snip-lag 2" for rank in (1, 2)]
    snip = (*SNIP, "--snip-schedule", "static")
    line, codes = start(warm, tmp_path, *unlike, "2:release=megatron.core==0.19.9", snip=snip, ranks=3)
    assert line == (
        f"ranks differ: on rank 1 ({HOST}) --snip-schedule is auto, on rank 0 ({HOST}) static; --snip-lag, --snip-seed"
        f" differ too; differences on 1 other rank too ({HOST})"
    )
    assert codes == "19 19 19"


def test_a_rank_without_snip_ends_the_start(warm: WarmRanks, tmp_path: Path) -> None:
    """The line names ``--snip`` alone, since a rank without SNIP has no other field of the configuration."""
    process = warm.run(
        2, tiny_llama_args(), tmp=tmp_path, module="unlike_pretrain", env={"UNLIKE": "0:argument=--snip"}
    )
    assert only_line(process).startswith(f"ranks differ: on rank 1 ({HOST}) --snip is no, on rank 0 ({HOST}) yes")


@pytest.mark.parametrize(
    ("unlike", "line", "code"),
    [
        ("1:argument=--snip-lag soon", "rank 1 (HOST): argument --snip-lag: invalid int value: 'soon'", 2),
        (  # at rank 0's run directory, after the process group is there
            "0:broken=snip_megatron.megatron.setup:open_run_directory",
            "rank 0 (HOST): PermissionError: [Errno 13] Permission denied: '/home/user'",
            1,
        ),
    ],
)
def test_an_error_on_one_rank_ends_all(unlike: str, line: str, code: int, warm: WarmRanks, tmp_path: Path) -> None:
    args = tiny_llama_args(*SNIP, iters=4)
    process = warm.run(2, args, tmp=tmp_path, module="unlike_pretrain", env={"UNLIKE": unlike}, timeout=120)
    codes = re.findall(r"ends with (\d+)", process.stdout)
    assert len([each for each in process.stderr.splitlines() if each.endswith(line.replace("HOST", HOST))]) == 1
    assert process.stderr.count("Traceback") == (code == 1)
    assert codes == [str(code)] * 2


def test_a_rank_without_triton_ends_the_start(warm: WarmRanks, tmp_path: Path) -> None:
    """The other rank would have native GEMMs, another budget and other formats."""
    unlike = "all:hopper=DeepGEMM", "1:missing=triton", "1:hopper=DeepGEMM"
    line, codes = start(warm, tmp_path, *unlike, snip=(*SNIP, "--snip-budget", "fp4=0.75"))
    version = importlib.metadata.version("triton")
    assert line.startswith(
        f"ranks differ: on rank 1 ({HOST}) triton is none, on rank 0 ({HOST}) {version}; GEMM backend, GEMM library d"
    )
    assert codes == "19 19"


def test_a_library_that_one_rank_lacks_is_switched_off_on_all(warm: WarmRanks, tmp_path: Path) -> None:
    """The second rank of a node does not run git, which would read a shared file system. Its paths differ."""
    snip = (*SNIP, "--snip-budget", "fp4=0.75", "--snip-dir", "run")
    unlike = "all:hopper=DeepGEMM\n1:hopper=cuBLASLt\n1:broken=snip_megatron.runtime.agreement:commit"
    unlike += "\n1:argument=--snip-dir elsewhere --tensorboard-dir logs"  # paths may differ
    process = warm.succeed(
        2, tiny_llama_args(*snip, iters=3), tmp=tmp_path, module="unlike_pretrain", env={"UNLIKE": unlike}
    )
    said = [line for line in process.stdout.splitlines() if "DeepGEMM" in line or "GEMMs by" in line]
    assert said == [
        f"snip: DeepGEMM is switched off on all ranks, because rank 1 ({HOST}) cannot load it: cuBLASLt multiplies",
        "snip: GEMMs by hopper (NVIDIA H100; cuBLASLt)",
    ]
    assert read_config(tmp_path / "run")["config"]["gemm_library"] == "auto"  # what a resume must repeat


def test_torchrun_shows_the_line_once_and_leaves_nobody_waiting(tmp_path: Path) -> None:
    args = tiny_llama_args(*SNIP, iters=4)
    process = run_ranks(2, args, module="unlike_pretrain", env={"UNLIKE": "1:argument=--snip-seed 7"}, tmp=tmp_path)
    assert process.returncode == 1  # of torchrun, for any code
    line = f"pretrain_gpt: ranks differ: on rank 1 ({HOST}) --snip-seed is 7, on rank 0 ({HOST}) 1234"
    assert process.stderr.count("ranks differ") == 1
    assert line in process.stderr.splitlines()


def test_the_doctor_says_which_ranks_differ(warm: WarmRanks, tmp_path: Path) -> None:
    environment = {"ENTRY": "snip_megatron.tools.cli", "UNLIKE": "all:commit=abcdef\n1:commit=0123456789ab\n1:node="}
    process = warm.run(2, ["doctor", "--ranks"], module="unlike_pretrain", env=environment, tmp=tmp_path)
    assert {
        f"snip_megatron {VERSION} abcdef on {HOST} (rank 0)",
        f"snip_megatron {VERSION} 0123456789ab on {HOST} (rank 1)",
        "--snip-lag 10",
    } <= rows_of(process)
    assert sorted(_EXIT_CODE.findall(process.stdout)) == [("0", "19"), ("1", "19")]


def rows_of(process: subprocess.CompletedProcess[str]) -> set[str]:
    return {" ".join(line.split()) for line in process.stdout.splitlines()}
