"""Whether chosen maps protect what NVIDIA's list for mixtures protects: attention, the last 15 % of the blocks, and of
other mixers the output projection.

    python -m benchmarks.quality.protected RESULT.json … --runs WORK/runs [--out F.json]

A result is one of ``compare``, and WORK its folder. For each run with a map that stays, the result has the share of the
FLOPs kept out of four bits that the list keeps too. Beside it stands the list's share of all FLOPs, which chance would
give. It also has the protected share of each kind of GEMM.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import header, write
from benchmarks.quality.results import load_results
from snip_megatron.precision import Gemm, PrecisionMap, split_option_id
from snip_megatron.runtime.run_data import step_files
from snip_megatron.sensitivity.policies import tail_blocks
from snip_megatron.solver import Problem


def figures(chosen: PrecisionMap, cost: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of one map, of FLOPs ``cost`` by option."""
    options = {option: split_option_id(option) for option in cost}
    blocks = 1 + max(linear.layer for linear, _ in options.values())
    last = blocks - tail_blocks(blocks)
    listed = {o for o, (linear, _) in options.items() if linear.layer >= last or _mixes(linear.path)}
    protected = {option for option in cost if chosen.choices[option].bits > 4}

    def flops(some: set[str]) -> float:
        return sum(cost[option] for option in some)

    of_gemm = {gemm: {o for o, (_, of_kind) in options.items() if of_kind is gemm} for gemm in Gemm}
    return {
        "protected": flops(protected) / flops(set(cost)),
        "listed": flops(listed) / flops(set(cost)),
        "protected_that_is_listed": flops(protected & listed) / flops(protected),
    } | {gemm.value: flops(protected & of_kind) / flops(of_kind) for gemm, of_kind in of_gemm.items()}


def _mixes(path: str) -> bool:
    """Return whether the list protects a linear in any block. It leaves input projections of gated DeltaNet out."""
    return "self_attention" in path and not path.endswith("in_proj")


def main() -> int:
    """Run the command. Returns 0."""
    parser = argparse.ArgumentParser(description="Maps beside NVIDIA's list")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run directories")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for path in arguments.results:
        for identity, run in load_results(path).runs.items():
            maps, problems = (
                list(step_files(arguments.runs / identity, kind).values()) for kind in ("maps", "problems")
            )
            if run["budget"] is None or len(maps) != 1 or not problems:
                continue
            items = Problem.from_json(problems[0].read_bytes(), where=str(problems[0])).items
            chosen = PrecisionMap.from_json(maps[0].read_text())
            named = {"experiment": path.stem} | {name: run[name] for name in ("label", "budget", "seed")}
            rows.append(named | figures(chosen, {item.id: item.cost for item in items}))
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}))
    write(arguments.out, header(arguments.commit) | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
