"""A plain loop on two ranks: whichever way they are data parallel, they measure and choose together."""

import json
import socket
from pathlib import Path

import numpy as np
from warm_ranks import WarmRanks


def test_ranks_measure_the_whole_batch_and_adopt_one_map(warm: WarmRanks, tmp_path: Path) -> None:
    process = warm.succeed(2, [str(tmp_path)], module="wrapped_loops", tmp=tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    alone = ranks[0]["alone"]
    for way in ("ddp after", "ddp before", "fully_shard"):
        first, second = (rank[way] for rank in ranks)
        assert first["map"] == second["map"], way
        assert first["map"]
        assert first["tokens"] == alone["tokens"]
        for column, values in alone["columns"].items():
            np.testing.assert_allclose(first["columns"][column], values, rtol=2e-3, err_msg=f"{way}: {column}")
    host = socket.gethostname()
    difference = f"ranks differ: on rank 1 ({host}) {{}} is 1, on rank 0 ({host}) 0"
    assert [rank["unlike"] for rank in ranks] == [{"error": difference.format("seed="), "exit_code": 19}] * 2
    assert process.stderr.count(difference.format("--snip-seed")) == 1
    assert [rank["library"] for rank in ranks] == ["cuBLASLt"] * 2
    said = f"snip: DeepGEMM is switched off on all ranks, because its check failed on rank 1 ({host})"
    assert process.stdout.splitlines().count(said) == 1
    assert ranks[0]["ddp before"] == ranks[0]["ddp after"]
    assert ranks[0]["fully_shard"]["map"] == ranks[0]["ddp after"]["map"]
