"""What a rank is told about its device's memory, and updates of a training on a card that is nearly full."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from test_timed_training import TRAINING

from snip_megatron.numerics.products.selection import native_backend
from snip_megatron.runtime.probe_memory import device_memory
from snip_megatron.runtime.run_data import read_events

SIZE = 2**28
FREE = 6 * 10**9
BILLION = shlex.split("""
--num-layers 22 --vocab-size 32000 --micro-batch-size 8 --global-batch-size 16 --transformer-impl transformer_engine
--te-rng-tracker --no-check-for-nan-in-loss-and-grad --train-iters 30 --lr-decay-iters 30 --snip-first-update 14
--snip-update-interval 6 --snip-lag 2
""")
"""With three updates."""
FILLED = 6
"""The step after which the card is filled."""
KINDS = ("times", "submit", "probe", "dropped", "solve_failed", "postpone", "adopt", "recapture")


@pytest.mark.alone
def test_memory_of_graphs_is_not_free() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = device_memory(device)
    graph, source = torch.cuda.CUDAGraph(), torch.zeros(SIZE // 4, device=device)
    with torch.cuda.graph(graph):
        temporary = source + 1.0
        source.copy_(temporary)
    del temporary
    after = device_memory(device)
    assert before is not None
    assert after is not None
    assert before.whole - after.whole >= 1.9 * SIZE  # the source, and what the graph writes
    graph.replay()


def account(folder: Path, code: int) -> str:
    """Return what a training said of its memory and its updates, and the cause of its end."""
    log, trace, run = (folder / "log").read_text(errors="replace"), folder / "rank0.json", folder / "run"
    events = read_events(run) if (run / "events.jsonl").exists() else []
    free = json.loads(trace.read_text())["free"] if trace.exists() else "no trace"
    rows = [event for event in events if event["event"] in KINDS]
    said = [line for line in log.splitlines() if any(word in line for word in ("snip:", "OutOfMemory", "iteration"))]
    cause = log[max(log.find("Traceback"), 0) :][:4000] if code else ""
    lines = [f"exit code {code} (124: its time was over); free after each step: {free}", *map(str, rows), *said[-40:]]
    return "\n".join([*lines, cause])


@pytest.mark.alone
@pytest.mark.skipif(native_backend("auto") != "hopper", reason="needs a card that multiplies FP8")
@pytest.mark.parametrize("graphs", ["transformer_engine", "local"])
def test_a_model_of_1_1_b_with_graphs_and_6_gb_free_updates_every_time(graphs: str, tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine")
    arguments = [*TRAINING, *BILLION, "--cuda-graph-impl", graphs, "--snip-dir", str(tmp_path / "run")]
    (code,) = run_ranks(
        1, "graphed_pretrain", arguments, folder=tmp_path, timeout=200, outputs=[(tmp_path / "log", tmp_path / "log")],
        environment={"TRACE": str(tmp_path), "FILL": f"{FILLED}:{FREE}"},
    )  # fmt: skip
    said = account(tmp_path, code)
    print(said)
    assert code == 0, said
    trace, events = json.loads((tmp_path / "rank0.json").read_text()), list(read_events(tmp_path / "run"))
    free = {int(step): size for step, size in trace["free"].items()}
    submitted = [event["version"] for event in events if event["event"] == "submit"]
    adopted = {event["version"] for event in events if event["event"] == "adopt"}  # phases share one
    assert free[FILLED] <= FREE < free[FILLED - 1], said
    assert trace["replays"][str(FILLED)] > 0, said
    # A probe whose memory was short after all takes half of its sequences at the next try.
    dropped = [event.get("error") for event in events if event["event"] == "dropped"]
    assert dropped in ([], ["OutOfMemoryError"]), said
    assert len(submitted) >= 2, said  # the first waits for its kernels, past the due step of another if they take long
    assert adopted == set(submitted), said
