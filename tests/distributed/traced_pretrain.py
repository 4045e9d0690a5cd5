"""The training entry, recording every step bit for bit: module of warm ranks, with ``TRACE=<folder>``.

Each rank writes ``rank<k>.json``: ``losses`` and ``grad_norms`` (step from 1 -> float.hex(); losses only on the last
pipeline stage) and ``weights`` (SHA-256 of all parameters at the end).

Latent attention, and ``TORCH_ATTENTION=1``: torch's attention in local layers, since Megatron's needs heads of one size
and documents that are not packed. Conversations are read by a stand-in for the package datasets, where that is missing.
"""

import hashlib
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

from snip_megatron import pretrain_gpt


class Recorder:
    """Wraps Megatron's train_step."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = {"losses": {}, "grad_norms": {}}
        self.model: list[torch.nn.Module] = []

    def wrap(self, train_step: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            number = kwargs["iteration"] + 1
            self.model = args[2]
            result = train_step(*args, **kwargs)
            if result[0]:
                self.body["losses"][number] = float(result[0]["lm loss"]).hex()
            self.body["grad_norms"][number] = float(result[5]).hex()
            return result

        return step

    def write(self, folder: Path) -> None:
        digest = hashlib.sha256()
        for chunk in self.model:
            getattr(chunk, "synchronize_param_gather", lambda: None)()  # Megatron-FSDP puts each rank's share back
        for parameter in (parameter for chunk in self.model for parameter in chunk.parameters()):
            parameter = getattr(parameter, "_local_tensor", parameter)
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
        self.body["weights"] = digest.hexdigest()
        (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(self.body))


def _load_dataset(kind: str, data_files: str, split: str) -> list[Any]:
    assert (kind, split) == ("json", "all")
    return [json.loads(line) for line in Path(data_files).read_text().splitlines()]


def traced(warm: Any, ranks: int, args: list[str], folder: Path, **variables: str) -> list[dict[str, Any]]:
    """What each of the warm ranks recorded of a training in ``folder``."""
    env = {"TRACE": str(folder / "trace"), **variables}
    warm.succeed(ranks, args, module="traced_pretrain", tmp=folder, env=env)
    return read_traces(folder / "trace")


def read_traces(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote, in order of rank; steps are ints."""
    traces = []
    for rank in range(len(list(folder.glob("rank*.json")))):
        body = json.loads((folder / f"rank{rank}.json").read_text())
        for name in ("losses", "grad_norms"):
            body[name] = {int(step): value for step, value in body[name].items()}
        traces.append(body)
    return traces


def main() -> int:
    from snip_megatron.megatron import compat

    if "TORCH_ATTENTION" in os.environ or "--multi-latent-attention" in sys.argv:
        from megatron.core.models import backends
        from megatron.core.models.gpt import gpt_layer_specs
        from torch_attention import TorchAttention

        from snip_megatron.megatron import datasets

        datasets.ENGINES_OF_PACKED.append("local")
        if importlib.util.find_spec("datasets") is None:
            sys.modules["datasets"] = stand_in = types.ModuleType("datasets")
            stand_in.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
            stand_in.load_dataset = _load_dataset  # type: ignore[attr-defined]
        backends.DotProductAttention = gpt_layer_specs.DotProductAttention = TorchAttention
    recorder = Recorder()
    compat.wrap_train_step(recorder.wrap)
    folder = Path(os.environ["TRACE"])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return pretrain_gpt.main()
    finally:
        recorder.write(folder)
