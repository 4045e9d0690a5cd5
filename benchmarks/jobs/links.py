"""Gradients reduced in FP8 over links as slow as between nodes: bandwidth, step time and loss of two GPUs.

    python -m benchmarks.jobs.links --out results/jobs/F.json [--links sockets]

NCCL takes NVLink, the host's memory (``NCCL_P2P_DISABLE=1``), or sockets (``NCCL_SHM_DISABLE=1`` too). Over each link
two data parallel ranks train one contender after the other: Megatron in bf16 with gradients in FP32 and in bf16, and
SNIP with all linears in fp8 and gradients in FP32 and in FP8. Every row is written at once, and the command continues
after the rows of its file. ``--device cpu`` runs a tiny model over gloo, where all links are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, header, step_times, write
from benchmarks.jobs.multi_gpu_runs import LAYOUTS, SIZES, Runs, torchrun

_HOST = {"NCCL_P2P_DISABLE": "1"}
LINKS: dict[str, dict[str, str]] = {
    "nvlink": {},
    "host memory": _HOST,
    "sockets": {**_HOST, "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
}
_FP8 = "--snip --snip-policy uniform-fp8"
LAYOUT = "dp2"
CONTENDERS = {
    "bf16": "",
    "bf16, gradients bf16": "--grad-reduce-in-bf16",
    "fp8": _FP8,
    "fp8, gradients fp8": f"{_FP8} --snip-gradient-reduction fp8",
}
_LOSS = re.compile(r"lm loss: ([0-9.E+-]+)")
_MEBIBYTES, _CALLS = 256, 10


def measure_bandwidth(device: str) -> None:
    """Print the GB that an all-reduce of two ranks sums in a second. Run it under torchrun."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    tensor = torch.ones(_MEBIBYTES * 2**18, device=device)
    seconds = []
    for _ in range(_CALLS):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(f"GB/s: {tensor.numel() * 4 / statistics.median(seconds[2:]) / 1e9:.3f}")
    dist.destroy_process_group()


class Links:
    """The trainings of all links. ``folder`` holds their run directories."""

    def __init__(self, device: str, folder: Path, steps: int, megatron: Sequence[str]) -> None:
        self._device, self._folder, self._steps = device, folder, steps
        self._size = SIZES["gpu" if device == "cuda" else "tiny"]
        self._megatron = megatron

    def bandwidth(self, link: str) -> float:
        """Return the GB/s of an all-reduce over a link. Raises RuntimeError if it fails."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "benchmarks.jobs.links", "--measure", "--device", self._device]
        environment = {**os.environ, **LINKS[link]}
        process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        printed = re.search(r"GB/s: ([0-9.]+)", process.stdout)
        if process.returncode or printed is None:
            raise RuntimeError(f"bandwidth over {link}: exit code {process.returncode}: {process.stderr[-800:]}")
        return float(printed[1])

    def row(self, link: str, name: str) -> dict[str, Any]:
        """Train a contender. Returns its median step time over the second half and its losses, or why it failed."""
        os.environ.update(LINKS[link])
        try:
            folder = self._folder / f"{link} {name}".replace(" ", "_").replace(",", "")
            runs = Runs(torchrun, folder, self._size, self._megatron)
            contender = shlex.split(CONTENDERS[name])
            contender += ["--snip-dir", str(folder / "run")] if contender and contender[0] == "--snip" else []
            printed = runs.train("run", LAYOUTS[LAYOUT], self._steps, *self._size.timed, *contender)
        except RuntimeError as error:
            return {"failed": str(error)[-800:]}
        finally:
            for variable in LINKS[link]:
                os.environ.pop(variable, None)
        ms = step_times(printed)
        losses = [float(loss) for loss in _LOSS.findall(printed)]
        return {"ms": statistics.median(ms[len(ms) // 2 :]), "steps_ms": ms, "losses": losses}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Gradients reduced in FP8 over slow links")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--links", default=",".join(LINKS), help="comma separated")
    parser.add_argument("--steps", type=int, default=12, help="steps of a training, of which the second half counts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds after which no training begins any more")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    parser.add_argument("megatron", nargs="*", help="arguments for Megatron, after --")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.links.split(",")) - set(LINKS):
        parser.error(f"--links {unknown.pop()}: unknown; choose among {', '.join(LINKS)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if a row failed or is missing."""
    arguments = parse(argv)
    if arguments.measure:
        measure_bandwidth(arguments.device)
        return 0
    began = time.monotonic()
    result = header(arguments.commit) | {"gpus": 2, "links": {}}
    if arguments.out is not None and arguments.out.is_file():
        result["links"] = json.loads(arguments.out.read_text())["links"]
    missing = 0
    with tempfile.TemporaryDirectory() as folder:
        links = Links(arguments.device, Path(folder), arguments.steps, arguments.megatron)
        for link in arguments.links.split(","):
            rows = result["links"].setdefault(link, {"variables": LINKS[link]})
            if "all_reduce_gb_s" not in rows:
                rows["all_reduce_gb_s"] = links.bandwidth(link)
            trained = rows.setdefault(LAYOUT, {})
            for name in CONTENDERS:
                if "ms" not in trained.get(name, {}):
                    if time.monotonic() - began > arguments.limit:
                        missing += 1
                        continue
                    trained[name] = links.row(link, name)
                    write(arguments.out, result)
                row = trained[name]
                missing += "ms" not in row
                figures = row.get("failed") or f"{row['ms']:.0f} ms, loss {row['losses'][-1]:.4f}"
                print(f"{link} ({rows['all_reduce_gb_s']:.1f} GB/s), {name}: {figures}", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
