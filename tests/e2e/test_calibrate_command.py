"""``snip calibrate`` as a user runs it, on a CPU: a table that cost models read, and one line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from snip_megatron.cli import main
from snip_megatron.commands import calibrate
from snip_megatron.errors import SnipError, cut
from snip_megatron.precision import Format, Gemm
from snip_megatron.timing.calibration import collectives
from snip_megatron.timing.loading import load_cost_model
from snip_megatron.timing.shapes import LinearShape
from snip_megatron.timing.table import Launching, TimingTable


def snip(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "snip_megatron.cli", "calibrate", "--device", "cpu", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def test_a_table_of_this_cpu(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    done = snip("--out", out, "--formats", "fp8,fp4", "--commit", "abc")
    assert done.returncode == 0, done.stderr
    assert "cpu, reference, 8 shapes" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.json"]
    body = json.loads(out.read_text())
    assert (body["device"], body["backend"], body["commit"], body["complete"]) == ("cpu", "reference", "abc", True)
    assert body["command"].startswith("snip calibrate --device cpu")
    launching = body["launching"]  # of Megatron's own layers
    assert launching["layers"] in ("local", "transformer_engine")
    assert set(launching["layer"]) == {"bf16", "fp8", "fp4"}
    assert min(launching["microbatch"], launching["step"], *launching["layer"].values()) > 0
    model = load_cost_model(out)
    assert model.formats == (Format.BF16, Format.FP8, Format.FP4)
    assert model.seconds(LinearShape(64, 128, 128), Gemm.WGRAD, Format.FP4) > 0


def test_a_models_own_shapes_on_standard_output(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "vocab_size": 64,
            }
        )
    )
    done = snip("--shapes", config, "--tp", 2, "--tokens", "16,32", "--formats", "fp8")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)  # without the lines that Megatron and SNIP print while the host is measured
    assert "launching" in body
    assert "collectives" not in body
    rows = [(row["tokens"], row["n"], row["k"]) for row in body["gemms"]]
    weights = ((96, 64), (64, 32), (64, 48))  # linear_qkv and linear_fc1 are alike
    assert sorted(rows) == sorted((m, *weight) for m in (16, 32) for weight in weights)


def small_table(device: str) -> str:
    """The least that a table may hold."""
    gemms = [{"tokens": 8, "n": 8, "k": 8, "seconds": {"bf16": [1e-5, 1e-5, 1e-5]}}]
    return json.dumps(
        {"schema": "snip.timings/1", "device": device, "backend": "reference", "formats": ["bf16"], "gemms": gemms}
    )


def test_collectives_are_added_to_a_table(tmp_path: Path) -> None:
    table, out = tmp_path / "cpu.json", tmp_path / "with.json"
    table.write_text(small_table("cpu"))
    done = snip("--ranks", 2, "--no-host", "--add-to", table, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "snip calibrate: cpu, 10 collectives"
    before, after = TimingTable.load(table), TimingTable.load(out)
    assert len(after.collectives) == 10
    assert replace(after, collectives={}) == before


def test_the_hosts_of_tensor_parallel_ranks_are_added_to_a_table(tmp_path: Path) -> None:
    table, out = tmp_path / "cpu.json", tmp_path / "with.json"
    table.write_text(small_table("cpu"))
    done = snip("--ranks", 2, "--add-to", table, "--out", out, "--commit", "c0ffee")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "snip calibrate: cpu, 10 collectives, the hosts of 2 ranks"
    after = TimingTable.load(out)
    assert after.launching is None
    assert set(after.launching_over_ranks) == {2}
    found = after.launching_over_ranks[2]
    assert min(found.microbatch, found.step, *found.layer.values()) > 0
    *_, note = after.about["notes"]
    assert note.startswith("launching over 2 ranks: measured on ")
    assert note.endswith("at commit c0ffee")


def test_the_host_is_added_to_a_table(tmp_path: Path) -> None:
    """The times of a GPU serve all machines that have it, those of the host only its own."""
    table, out = tmp_path / "cpu.json", tmp_path / "with.json"
    body = json.loads(small_table("cpu"))
    body["formats"], body["notes"], both = ["bf16", "fp8"], ["kept"], {"fp8": [1e-5, 1e-5, 1e-5]}
    body["gemms"][0]["seconds"] |= both
    body["activations"] = [{"tokens": 8, "features": 8, "input": both, "gradient": both}]
    body["weights"] = [{"n": 8, "k": 8, "seconds": {"fp8": 1e-5}}]
    table.write_text(json.dumps(body))
    for source in (table, out):  # what is measured again replaces what the table has
        done = snip("--add-to", source, "--out", out, "--commit", "c0ffee")
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1] == "snip calibrate: cpu, the host"
    before, after = TimingTable.load(table), TimingTable.load(out)
    assert after.launching is not None
    assert set(after.launching.layer) == {"bf16", "fp8"}
    kept, *_, note = after.about["notes"]  # a note about noise may stand between them
    assert (kept, note[-16:]) == ("kept", "at commit c0ffee")
    assert replace(after, launching=None, about=before.about) == before


def test_what_is_wrong_with_host_seconds_is_noted_until_they_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Launching("local", {Format.BF16: 1e-9, Format.FP8: 2e-3}, microbatch=1e-3, step=1e-3)
    table = tmp_path / "cpu.json"
    table.write_text(small_table("cpu"))
    for said, expected in (("lost in noise", ["launching: lost in noise"]), (None, [])):
        monkeypatch.setattr(calibrate, "measured_launching", lambda *_, said=said: (found, said))
        assert main(["calibrate", "--device", "cpu", "--add-to", str(table), "--out", str(table)]) == 0
        notes = [note for note in TimingTable.load(table).about["notes"] if "measured on" not in note]
        assert notes == expected


def test_the_host_is_measured_with_the_gemms_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its seconds of GEMMs and of launching are added up to one step."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    measured = []

    def launching(_: object, ranks: int, gemm: str, *__: object) -> tuple[Launching, None]:
        measured.append(gemm)
        return Launching("local", {Format.BF16: 1e-3}, microbatch=1e-3, step=1e-3), None

    monkeypatch.setattr(calibrate, "measured_launching", launching)
    table = tmp_path / "cpu.json"
    command = ["calibrate", "--device", "cpu", "--add-to", str(table), "--out", str(tmp_path / "with.json")]
    table.write_text(small_table("cpu"))
    assert main(command) == main([*command, "--gemm", "reference"]) == 0
    assert measured == ["reference", "reference"]
    capsys.readouterr()
    assert main([*command, "--gemm", "emulated"]) == 2
    assert capsys.readouterr().err == (
        f"snip calibrate: --gemm emulated: --add-to {cut(table)} has the times of reference; leave out --gemm\n"
    )
    table.write_text(small_table("cpu").replace('"reference"', '"hopper"'))
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"snip calibrate: --add-to {cut(table)}: has the times of hopper, which does not run here ("
    )
    assert error.count("\n") == 1
    assert len(measured) == 2


def test_a_table_of_another_device_is_not_added_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "other.json"
    table.write_text(small_table("Another"))
    common = ["calibrate", "--device", "cpu", "--add-to", str(table)]
    assert main([*common, "--ranks", "2"]) == 2
    assert "were measured on Another, this is cpu" in capsys.readouterr().err
    assert main(common) == 2
    assert "were measured on Another, this is cpu" in capsys.readouterr().err
    table.write_text(small_table("cpu"))
    assert main([*common, "--no-host"]) == 2
    assert "--no-host: nothing is left to measure; give --ranks" in capsys.readouterr().err


def test_too_many_ranks_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise minutes of measurements would be lost."""
    monkeypatch.setattr(calibrate, "_device", lambda _: torch.device("cuda"))
    assert main(["calibrate", "--ranks", "999"]) == 2
    assert "snip calibrate: --ranks 999: this machine has" in capsys.readouterr().err


def test_collectives_that_fail_cost_no_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*_: object) -> None:
        raise SnipError("--ranks 2: the collectives cannot be measured: no network")

    monkeypatch.setattr(collectives, "measure_collectives", failed)
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: pytest.fail("GEMMs were measured before"))
    assert main(["calibrate", "--device", "cpu", "--no-host", "--ranks", "2"]) == 2
    assert "no network" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0: must be a whole number of 1 or more"),
        (["--ranks", "100000"], "--ranks 100000: a CPU takes at most 64"),
        (["--formats", "fp9"], "--formats fp9: give distinct names among fp8, fp4"),
        (["--formats", ""], "--formats : give distinct names"),
        (["--shapes", "900b"], "model 900b: unknown"),
        (["--shapes", "8b", "--tokens", "many"], "--tokens many: give whole numbers"),
        (["--time", "0"], "--time 0.0: must be a number of seconds above 0"),
        (["--time", "soon"], "argument --time: invalid float value: 'soon'"),
        (["--out", "/nowhere/t.json"], "--out /nowhere/t.json: there is no folder /nowhere"),
        (["--gemm", "hopper"], "--snip-gemm hopper: needs a Hopper GPU"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["calibrate", "--device", "cpu", *arguments])
    except SystemExit as end:  # argparse
        code = end.code
    output, error = capsys.readouterr()
    assert (code, output) == (2, "")
    assert error.count("\n") == 1
    assert error.startswith(f"snip calibrate: {message}")
