"""The training entry, recording every step bit for bit: ``python -m traced_pretrain`` with ``TRACE=<folder>``.

Each rank writes ``rank<k>.json``: ``losses`` and ``grad_norms`` (step from 1 -> float.hex(); losses only on the last
pipeline stage), ``weights`` (SHA-256 of all parameters at the end), ``norm_grads`` (of the first step, by global name),
``shards`` (the optimizer state of each parameter on this rank, before and after the first step) and ``groups`` (sizes).

``PROBE_STEP=<n>``: before that step, a pass over its first microbatches that must leave nothing behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments


class Recorder:
    """Wraps Megatron's train_step."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = {"losses": {}, "grad_norms": {}}
        self.model: list[torch.nn.Module] = []

    def wrap(self, train_step: Any) -> Any:
        from megatron.training import get_args

        from snip_megatron.megatron import compat

        def step(*args: Any, **kwargs: Any) -> Any:
            number = kwargs["iteration"] + 1
            self.model, optimizer = args[2], args[3]
            if not self.body.get("groups"):
                self.body["groups"] = {k: g and g.size() for k, g in vars(compat.process_groups(args[2][0])).items()}
            before = _shards(self.model, optimizer, get_args().bf16) if number == 1 else {}
            if number == int(os.environ.get("PROBE_STEP", "0")):
                self.body["probe_losses"] = _probe(*args)
            result = train_step(*args, **kwargs)
            if number == 1:
                after = _shards(self.model, optimizer, get_args().bf16)
                self.body["shards"] = {name: {"before": before[name], "after": after[name]} for name in after}
                self.body["norm_grads"] = _norm_grads(self.model)
            if result[0]:
                self.body["losses"][number] = float(result[0]["lm loss"]).hex()
            self.body["grad_norms"][number] = float(result[5]).hex()
            return result

        return step

    def write(self, folder: Path) -> None:
        digest = hashlib.sha256()
        for _, parameter in _named_parameters(self.model):
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
        self.body["weights"] = digest.hexdigest()
        (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(self.body))


def _named_parameters(model: list[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    """With layers numbered over the whole model, whatever the pipeline."""
    found = []
    for chunk in model:
        layers = {id(m): m.layer_number - 1 for m in chunk.modules() if hasattr(m, "layer_number")}
        prefix = {
            name: f"decoder.layers.{layers[id(m)]}"
            for name, m in chunk.named_modules()
            if id(m) in layers and name.split(".")[-1].isdigit()
        }
        for name, parameter in chunk.named_parameters():
            outer = next((p for p in prefix if name.startswith(p + ".")), None)
            found.append((name if outer is None else prefix[outer] + name[len(outer) :], parameter))
    return found


def _norm_grads(model: list[torch.nn.Module]) -> dict[str, list[float]]:
    return {name: p.main_grad.tolist() for name, p in _named_parameters(model) if "layernorm" in name}


def _shards(model: list[torch.nn.Module], optimizer: Any, bf16: bool) -> dict[str, dict[str, Any] | None]:
    """Of each parameter: range, step, and whether the values are those of the parameter and of its gradient."""
    from snip_megatron.megatron import compat

    found: dict[str, dict[str, Any] | None] = {}
    for name, parameter in _named_parameters(model):
        held = compat.held_state(optimizer, parameter)
        if held is None:
            found[name] = None
            continue
        state: Any = compat.update_of(optimizer, parameter, steps=0)
        part = slice(held.start, held.end)
        main = held.main.detach().reshape(-1)
        main = main.bfloat16() if bf16 else main
        entry = {
            "numel": parameter.numel(),
            "range": (held.start, held.end),
            "step": 0 if state is None else state.step,
            "hyper": (*held.group["betas"], held.group["eps"], held.group["weight_decay"]),
            "main_is_param": bool(torch.equal(main, parameter.detach().view(-1)[part])),
            "has_moments": state is not None,
        }
        if state is not None:
            gradient = parameter.main_grad.view(-1)[part]
            first, second = (1 - state.beta1) * gradient, (1 - state.beta2) * gradient.square()
            entry["moments_are_gradient"] = bool(
                torch.allclose(state.exp_avg, first, rtol=1e-4, atol=1e-9)
                and torch.allclose(state.exp_avg_sq, second, rtol=1e-4, atol=1e-12)
                and gradient.abs().sum() > 0
            )
        found[name] = entry
    return found


def _probe(
    forward_step: Any, data_iterator: Any, model: Any, optimizer: Any, scheduler: Any, config: Any, schedule: Any
) -> list[float]:
    """A pass over the step's first microbatches, twice the same, and draws from every generator."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.training import get_args

    from snip_megatron.megatron import compat

    args = get_args()
    count = 4 if isinstance(data_iterator, list) else 1
    states = compat.rng_state()
    batches = compat.peek(data_iterator, count)
    seen = []
    with compat.rerun_disabled(), compat.quiet_schedule(config):
        for _ in range(2):
            compat.set_rng_state(states)
            with ExitStack() as stack:
                for chunk in model:
                    chunk.zero_grad_buffer()
                    stack.enter_context(chunk.no_sync())
                losses = schedule(
                    forward_step_func=forward_step,
                    data_iterator=batches.iterator(),
                    model=model,
                    num_microbatches=count,
                    seq_length=args.seq_length,
                    micro_batch_size=args.micro_batch_size,
                    forward_only=False,
                )
            seen.append(float(sum(loss["lm loss"][0] for loss in losses)) if losses else 0.0)
        _ = random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002 - the global state
        with get_cuda_rng_tracker().fork():
            torch.rand(1, device="cuda")
    for chunk in model:
        chunk.zero_grad_buffer()
    compat.set_rng_state(states)
    return seen


def read_traces(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote, in order of rank; steps are ints."""
    traces = []
    for rank in range(len(list(folder.glob("rank*.json")))):
        body = json.loads((folder / f"rank{rank}.json").read_text())
        for name in ("losses", "grad_norms"):
            body[name] = {int(step): value for step, value in body[name].items()}
        traces.append(body)
    return traces


def main() -> None:
    config = parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], config.no_compat)
    from snip_megatron.megatron import compat
    from snip_megatron.megatron.entry import run

    recorder = Recorder()
    compat.wrap_train_step(recorder.wrap)
    folder = Path(os.environ["TRACE"])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        run(startup)
    finally:
        recorder.write(folder)


if __name__ == "__main__":
    main()
