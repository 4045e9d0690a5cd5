"""SNIP in the ``Trainer`` of transformers, on one process or data parallel by DDP."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from snip_megatron.plain.loop import PlainSnip, convert
from snip_megatron.precision.errors import SnipError


class SnipCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Chooses the formats of the linears of the model that a ``Trainer`` trains.

        Trainer(model, args, train_dataset=data, callbacks=[SnipCallback(budget="fp4=0.75", dir="run")])

    ``options`` are those of :func:`snip_megatron.plain.convert` but ``blocks`` and ``on_adopt``. The model must return
    its loss. The state is part of ``trainer_state.json``; ``restore_callback_states_from_checkpoint=True`` restores it
    with the checkpoint. FSDP, DeepSpeed and several GPUs in one process are refused.

    Attributes:
        snip: the object that chooses the formats. None before the training.
    """

    def __init__(self, **options: Any) -> None:
        for name, value in options.items():
            if callable(value) or name == "blocks":
                raise SnipError(f"SnipCallback: {name}= cannot be kept in trainer_state.json; use snip_megatron.plain")
        self.snip: PlainSnip | None = None
        self.saved: dict[str, Any] | None = None
        self._options, self._losses, self._first = options, list[torch.Tensor](), False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
    ) -> None:
        """Convert the model, and continue from the state of a checkpoint."""
        if args.n_gpu > 1 or args.deepspeed or any(isinstance(p, DTensor) for p in model.parameters()):
            raise SnipError("SnipCallback trains on one GPU a process and whole weights: use torchrun, which gives DDP")
        self._mean_over = args.world_size if args.average_tokens_across_devices else 1
        optimizer, steps = getattr(optimizer, "optimizer", optimizer), {"steps": state.max_steps}
        self.snip = convert(model, optimizer, microbatches=args.gradient_accumulation_steps, **steps | self._options)
        if self.saved is not None:
            self.snip.load_state_dict(self.saved)
        before = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._hooks = before, model.register_forward_hook(self._after_forward, with_kwargs=True)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Make the next forward the first one of a step."""
        self._first = True

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._first and self.snip is not None:
            self._first = False  # the forwards of step() come here too
            # With a number of items the loss would be a sum over this batch divided by those of the whole step.
            inputs = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
            self.snip.step(lambda: model(*args, **inputs)["loss"])
            self._losses.clear()

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if model.training and output["loss"] is not None:
            loss = output["loss"].detach().clone()  # the Trainer scales it in place
            self._is_share = "num_items_in_batch" in kwargs
            self._losses.append(loss)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the loss of the step."""
        if self.snip is not None and self._losses:
            losses = torch.stack(self._losses)
            self.snip.record(losses.sum() * self._mean_over if self._is_share else losses.mean())
            self._losses.clear()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the run: write its summary and report."""
        if self.snip is not None:
            self.snip.close()
            for hook in self._hooks:
                hook.remove()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        saved = self.saved if self.snip is None else self.snip.state_dict()
        return {"args": self._options, "attributes": {"saved": saved}}
