"""What sets of fprops in fp4 cost beside what SNIP predicts, in the warm run of an experiment.

    python -m benchmarks.quality.forward_sets EXPERIMENT.json --data D --out F.json [--map NAME=MAP.json …]

Trains as the warm run does. At each update, sets of fprops are forced into fp4 while all other GEMMs run in bf16. A
set's *second* is its *raw* rise of the loss less the *first*-order part; *predicted* is the sum of ΔL₂. A CPU shows the
output with ``benchmarks/quality/experiments/nano.json --updates 5 5``.
"""

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import header, write
from benchmarks.quality.additivity import Set, measured, predicted_rises
from benchmarks.quality.experiment import Warm, load_experiment
from benchmarks.quality.models import load_data
from benchmarks.quality.probe_sequences import prepared
from benchmarks.quality.runs import NEVER, fill, training_arguments
from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap, option_id


def sets_of(names: list[str], maps: dict[str, PrecisionMap]) -> list[Set]:
    """Return all, block 0, kinds in later blocks and their halves, maps, and what a map has beyond another one."""
    ids = {name: LinearId.parse(name) for name in names}
    later = [name for name in names if ids[name].layer]
    sets = {"all": list(names), "block 0": [name for name in names if name not in later]}
    for path in dict.fromkeys(ids[name].path for name in later):
        sets[path] = of_path = [name for name in later if ids[name].path == path]
        sets |= {
            f"{path} {half}": [n for n in of_path if ids[n].layer % 2 == i] for i, half in enumerate(("even", "odd"))
        }
    sets["mlp"] = [name for name in later if ids[name].path.startswith("mlp.")]
    fp4 = {m: [n for n in names if maps[m].choices[option_id(n, Gemm.FPROP)] is Format.FP4] for m in maps}
    sets |= fp4 | {f"{a} without {b}": [n for n in fp4[a] if n not in fp4[b]] for a in fp4 for b in fp4}
    return [Set(label, tuple(members)) for label, members in sets.items() if members]


def main() -> int:
    """Run the benchmark. Returns the exit code."""
    parser = argparse.ArgumentParser(description="What sets of fprops in fp4 cost beside ΔL₂")
    parser.add_argument("experiment", type=Path, help="experiment file, of one GPU")
    parser.add_argument("--data", type=Path, required=True, help="folder of snip prepare-data")
    parser.add_argument("--map", action="append", default=[], help="NAME=file of a map whose fprops are a set")
    parser.add_argument("--updates", nargs=2, default=["201", "50"], help="step of the first, and steps to the next")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about, experiment, rows = header(None), load_experiment(options.experiment), list[dict[str, Any]]()
    data, batch = load_data(options.data, experiment.tokenizer), experiment.training
    maps = {name: PrecisionMap.from_json(Path(file).read_text()) for name, file in (m.split("=") for m in options.map)}
    arguments = fill(
        training_arguments(experiment, data, (experiment.warm or Warm(0)).seed), {"data": str(data.folder)}
    )
    arguments += f"""--eval-interval {NEVER} --eval-iters 0 --snip --snip-budget fp4=0.8 --snip-formats fp8,fp4
        --snip-first-update {options.updates[0]} --snip-update-interval {options.updates[1]} --snip-lag 1
        --snip-wait 60""".split()
    begun = prepared(arguments)
    from benchmarks.quality import oracle as room
    from snip_megatron.megatron import entry

    def measure(oracle: room.Oracle, config: Any, step: Any, result: Any) -> None:
        predicted, calls, run = predicted_rises(result.table), list[Any](), room._Call.run
        sets, whole = sets_of(list(predicted), maps), range(batch.global_batch // batch.micro_batch)
        with mock.patch.object(room._Call, "run", lambda call: calls.append(run(call)) or call):
            measured(oracle, step, result, sets, [whole])
        for each, call in zip(sets, calls[1:], strict=True):  # the first call forces nothing
            first, expected = -result.scale.gradient * float(call.first_order), sum(predicted[n] for n in each.names)
            row = {"raw": first + each.rise[0], "first": first, "second": each.rise[0], "predicted": expected}
            rows.append({"step": result.table.step, "set": each.kind, "linears": len(each.names), **row})
            print(f"step {result.table.step} {each.kind}", {k: round(1e3 * v, 3) for k, v in row.items()}, "mnat")
        write(options.out, about | {"sets": rows})

    with room.after_each_probe(measure):
        entry.run(begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
