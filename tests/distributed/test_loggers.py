"""Figures of a real run in Megatron's own wandb run and TensorBoard log, read back from their files."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from launch import tiny_llama_args
from wandb_file import history
from warm_ranks import WarmRanks

from snip_megatron.precision import DENSE_LAYER, Formats, PrecisionMap, split_option_id
from snip_megatron.runtime.run_data import read_events, read_maps, read_metrics, read_scores

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")

SNIP = shlex.split(
    "--snip --snip-first-update 2 --snip-update-interval 100 --snip-lag 2 --snip-wait 120"
    " --snip-settings probe_tokens=64"
)


@pytest.fixture(scope="module")
def recorded(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pipeline stages: both loggers live on the last rank, the run directory on the first."""
    tmp = tmp_path_factory.mktemp("loggers")
    wandb = ("--wandb-project", "snip", "--wandb-exp-name", "run", "--wandb-save-dir", str(tmp / "wandb"))
    logs = (*wandb, "--tensorboard-dir", str(tmp / "tensorboard"), "--pipeline-model-parallel-size", "2")
    warm.succeed(
        2, tiny_llama_args(*SNIP, "--snip-dir", str(tmp / "run"), *logs, iters=6), tmp=tmp / "ranks", timeout=300
    )
    return tmp


def the_map(run: Path) -> tuple[int, PrecisionMap, list[list[str]]]:
    """Return the step of the only adoption, its map, and the map's rows by layer."""
    ((step, precision_map),) = read_maps(run).items()
    rows = []
    for layer in sorted({linear.layer for linear in precision_map.linears()}):
        formats = [precision_map.formats_of(f"decoder.layers.{layer}.{path}") for path in DENSE_LAYER]
        rows.append([str(layer), *(f if f == g == h else f"{f} {g} {h}" for f, g, h in [values(x) for x in formats])])
    return step, precision_map, rows


def values(formats: Formats) -> list[str]:
    return [fmt.value for fmt in formats]


def harms(run: Path) -> dict[str, float]:
    """ΔL of each linear in its costliest format, by its name among Megatron's tensor metrics."""
    (scores,) = read_scores(run).values()
    result: dict[str, float] = {}
    for option, by_format in scores["scores"].items():
        linear = split_option_id(option)[0]
        name = f"tensor-metrics/snip-delta-loss/{linear}"
        result[name] = result.get(name, 0.0) + max(figures["delta_loss"] for figures in by_format.values())
    return result


def adoption(run: Path) -> dict[str, Any]:
    return next(event for event in read_events(run) if event["event"] == "adopt")


def test_wandb(recorded: Path) -> None:
    (file,) = (recorded / "wandb").rglob("*.wandb")  # never a second run
    rows = {row["_step"]: row for row in history(file)}
    step, precision_map, table = the_map(recorded / "run")
    shares = {metric["step"] + 1: metric["fp4_fraction"] for metric in read_metrics(recorded / "run")}
    logged = {at: row["snip/fp4_fraction"] for at, row in rows.items() if "snip/fp4_fraction" in row}
    # The last step's figures come when Megatron has finished its run.
    assert len(logged) == len(shares) - 1
    assert {shares[at] for at in logged} == set(logged.values())
    assert {at for at, row in rows.items() if "lm loss" in row} >= set(range(1, 7))
    assert rows[step]["snip-map/achieved_per_stage/1"] == adoption(recorded / "run")["achieved_per_stage"]["1"]
    assert "snip-updates/probe/statistics/seconds" in rows[2]
    expected = harms(recorded / "run")
    assert len(expected) == len(precision_map.linears())
    assert {name: rows[2][name] for name in expected} == pytest.approx(expected)
    bits = {name: value for name, value in rows[step].items() if name.startswith("snip-bits/")}
    assert bits == {
        f"snip-bits/{each.path}/{each.layer:03}": sum(f.bits for f in precision_map.formats_of(str(each))) / 3
        for each in precision_map.linears()
    }
    (media,) = (recorded / "wandb").rglob("media/table/snip-map/*.json")
    content = json.loads(media.read_text())
    assert content["columns"] == ["layer", *DENSE_LAYER]
    assert content["data"] == table


def test_tensorboard(recorded: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(recorded / "tensorboard")).Reload()
    step, precision_map, table = the_map(recorded / "run")
    shares = {m["step"] + 1: m["fp4_fraction"] for m in read_metrics(recorded / "run")}
    logged = {e.step: e.value for e in log.Scalars("snip/fp4_fraction")}
    assert logged == pytest.approx({at: share for at, share in shares.items() if at < 6})
    (share,) = log.Scalars("snip-map/achieved_per_stage/1")
    assert (share.step, share.value) == (step, pytest.approx(adoption(recorded / "run")["achieved_per_stage"]["1"]))
    (solve,) = log.Scalars("snip-map/solve_seconds")
    assert solve.value == pytest.approx(precision_map.solve_seconds)
    assert [e.step for e in log.Scalars("lm loss")] == list(range(1, 7))  # beside Megatron's own
    for name, harm in harms(recorded / "run").items():
        assert [(e.step, e.value) for e in log.Scalars(name)] == [(2, pytest.approx(harm))]
    assert {name.partition("/")[0] for name in log.Tags()["scalars"] if name.startswith("snip")} == {
        "snip", "snip-map", "snip-updates", "snip-bits"
    }  # fmt: skip
    (text,) = log.Tensors("snip-map/by_layer/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert lines[0] == f"| layer | {' | '.join(DENSE_LAYER)} |"
    assert lines[2:] == [f"| {' | '.join(row)} |" for row in table]
