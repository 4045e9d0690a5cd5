"""``snip calibrate`` as a user runs it, on a CPU: a table that cost models read, and one line for every mistake."""

import json
from pathlib import Path

import pytest
from snip_command import refused, snip_alone

from snip_megatron.precision import Format, Gemm
from snip_megatron.timing.cost_model import LinearShape, load_cost_model


def test_a_table_of_this_cpu(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    process = snip_alone("calibrate", "--out", out, "--formats", "fp8,fp4", OMP_NUM_THREADS="1", SNIP_COMMIT="abc")
    assert process.returncode == 0, process.stderr
    assert "cpu, reference, 8 shapes" in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.json"]
    body = json.loads(out.read_text())
    assert (body["device"], body["backend"], body["commit"], body["complete"]) == ("cpu", "reference", "abc", True)
    assert body["command"].startswith("snip calibrate --out")
    model = load_cost_model(out)
    assert model.formats == (Format.BF16, Format.FP8, Format.FP4)
    assert model.seconds(LinearShape(64, 128, 128), Gemm.WGRAD, Format.FP4) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "fp9"], "--formats fp9: give distinct names among fp8, fp4"),
        (["--out", "/nowhere/t.json"], "--out /nowhere/t.json: there is no folder /nowhere"),
        (["--gemm", "hopper"], "--gemm hopper: needs a Hopper GPU (sm_90) and there is no CUDA device here; use --"),
    ],
)
def test_refusals(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refused("calibrate", *arguments).startswith(message)
