"""The truth about options, without the product's measurement: module of warm ranks, with ``BRUTE=<file>``.

The training entry; before step ``BRUTE_STEP`` (0-based) each option of ``BRUTE_OPTIONS`` (JSON: [[linear, gemm,
format], …]) is put in force by a static map of that one option, and the microbatches of ``BRUTE_MICROBATCHES`` run
forward and backward by the code that trains. Written to the file, by option: the change of the loss, ⟨G, E⟩ from the
linear's own output and its gradient, and Σ ‖u(g') − u(g)‖/‖W‖ over decoder linears, norms and the embedding, u from two
steps of torch's AdamW on float64 copies. For one rank.
"""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from snip_megatron import pretrain_gpt
from snip_megatron.precision import LinearRow

Gradients = dict[str, torch.Tensor]


class Brute:
    """One step's microbatches under maps of one option."""

    def __init__(self, step_arguments: tuple[Any, ...], step: int) -> None:
        from snip_megatron.layers.registry import LinearRegistry

        self.forward_step, self.iterator, (self.model,), self.optimizer, _, self.config, self.schedule = step_arguments
        self.step = step
        handles = [module.snip for module in self.model.modules() if hasattr(module, "snip")]
        # Positions enter the keys of stochastic rounding. Modules come in the order of construction, which is another.
        handles.sort(key=lambda handle: handle.state.position)
        self.registry = LinearRegistry(
            [LinearRow(handle.name, 0, handle.n, handle.k) for handle in handles], handles[0].context
        )
        for handle in handles:
            self.registry.add(handle)
        self.microbatches = json.loads(os.environ["BRUTE_MICROBATCHES"])

    def passed(self, linear: str, choices: dict[str, Any]) -> tuple[float, Gradients, list[torch.Tensor]]:
        """Mean loss, main gradients and the outputs of ``linear`` with their gradients under a map of ``choices``."""
        from megatron.training import get_args

        from snip_megatron.megatron import compat
        from snip_megatron.precision import PrecisionMap

        args, count = get_args(), len(self.microbatches)
        self.registry.adopt(PrecisionMap(choices=choices))
        self.registry.start_step(self.step)
        seen: list[torch.Tensor] = []
        losses: list[float] = []  # of tokens, in float64: the reported sums are float32

        def forward_step(iterator: Any, model: Any) -> Any:
            output, loss_function = self.forward_step(iterator, model)
            losses.append(output.detach().double().mean().item())
            return output, loss_function

        def keep(module: Any, inputs: Any, output: Any) -> None:
            seen.append(output[0])
            output[0].retain_grad()

        with ExitStack() as stack:
            stack.enter_context(compat.rerun_disabled())
            stack.enter_context(compat.quiet_schedule(self.config))
            stack.callback(self.registry[linear].module.register_forward_hook(keep).remove)
            self.model.zero_grad_buffer()
            stack.enter_context(self.model.no_sync())
            self.schedule(
                forward_step_func=forward_step,
                data_iterator=compat.repeated(self.iterator, self.microbatches),
                model=[self.model],
                num_microbatches=count,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=False,
            )
        gradients = {n: p.main_grad.clone() for n, p in self.model.named_parameters() if counts(n)}
        self.model.zero_grad_buffer()
        return sum(losses) / count, gradients, seen

    def drift(self, plain: Gradients, forced: Gradients) -> float:
        total = 0.0
        for name, weight in self.model.named_parameters():
            if counts(name):
                moved = [self._stepped(weight, gradients[name]) for gradients in (plain, forced)]
                total += float((moved[1] - moved[0]).norm() / weight.detach().double().norm())
        return total

    def _stepped(self, weight: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Where torch's AdamW takes the weight at learning rate 1, without decay."""
        from snip_megatron.megatron import compat

        state: Any = compat.update_of(self.optimizer, weight, steps=0)
        assert state is not None
        copy = torch.nn.Parameter(weight.detach().double().clone())
        adamw = torch.optim.AdamW([copy], lr=1.0, betas=(state.beta1, state.beta2), eps=state.eps, weight_decay=0.0)
        adamw.state[copy] = {
            "step": torch.tensor(float(state.step)),
            "exp_avg": state.exp_avg.double().view_as(copy).clone(),
            "exp_avg_sq": state.exp_avg_sq.double().view_as(copy).clone(),
        }
        copy.grad = gradient.double()
        adamw.step()
        return copy.detach()

    def option(self, linear: str, gemm: str, fmt: str) -> dict[str, float]:
        from snip_megatron.precision import Format

        loss, plain, outputs = self.passed(linear, {})
        forced_loss, forced, forced_outputs = self.passed(linear, {f"{linear}:{gemm}": Format(fmt)})
        # The backward began with the mean over the microbatches: so does the gradient of an output.
        first_order = sum(
            float((a.grad.double() * (b.detach().double() - a.detach().double())).sum())
            for a, b in zip(outputs, forced_outputs, strict=True)
            if a.grad is not None
        )
        return {"loss": forced_loss - loss, "first_order": first_order, "drift": self.drift(plain, forced)}


def counts(name: str) -> bool:
    """Decoder linears, norms, the embedding: not the output layer, whose gradient no option moves by itself."""
    return "output_layer" not in name


def main() -> int:
    from snip_megatron.megatron import compat

    found: list[dict[str, float]] = []

    def wrap(train_step: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            if kwargs["iteration"] == int(os.environ["BRUTE_STEP"]):
                brute = Brute(args, kwargs["iteration"])
                found.extend(brute.option(*option) for option in json.loads(os.environ["BRUTE_OPTIONS"]))
                brute.registry.adopt(type(brute.registry.current)(choices={}))
            return train_step(*args, **kwargs)

        return step

    compat.wrap_train_step(wrap)
    try:
        return pretrain_gpt.main()
    finally:
        Path(os.environ["BRUTE"]).write_text(json.dumps(found))
