"""SNIP in Megatron Bridge 0.6 and 0.7: a callback for its ``pretrain`` and a hook for its model providers.

    with SnipCallback(dir="run") as snip:
        snip.attach(config)
        pretrain(config, forward_step, callbacks=[snip])

A probe needs the batches and the schedule, which Bridge does not pass to callbacks. SNIP therefore replaces the global
``train_step`` of Bridge's training module by a wrapper, as ``megatron/setup.py`` does in Megatron.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

try:
    from megatron.bridge.training.callbacks import Callback

    from snip_megatron.megatron.compat import bridge as bridge_compat
except ImportError as missing:
    from snip_megatron.precision.errors import SnipError

    raise SnipError(
        f"snip_megatron.bridge needs megatron-bridge 0.6 or 0.7, which cannot be imported here: {missing}"
    ) from missing
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from snip_megatron.layers import LinearRegistry
from snip_megatron.megatron.attachment import terms_of
from snip_megatron.megatron.evaluation import main_loss, mean_over_ranks
from snip_megatron.megatron.host import StepCall
from snip_megatron.megatron.setup import SnipRun
from snip_megatron.megatron.startup import Startup, say
from snip_megatron.numerics.products.selection import native_backend
from snip_megatron.numerics.quantize.kernels.launch import share_cache
from snip_megatron.precision.errors import SnipError
from snip_megatron.reporting.sinks import Sinks
from snip_megatron.runtime.agreement import Terms, of_group, together
from snip_megatron.runtime.config import SnipConfig, dominated, resolve
from snip_megatron.runtime.controller import OnAdopt


class SnipCallback(Callback):  # type: ignore[misc]  # Bridge has no types here
    """Adds SNIP to one training run. Leaving it as a context manager stops the sidecar and writes the last files.

    Raises SnipError if the signature of Bridge's ``train_step`` is not that of these versions, or an option is wrong.

    Args:
        snip: A complete configuration. None if ``options`` are given.
        on_adopt: Called on every rank as that of :func:`snip_megatron.attach.attach`.
        options: Fields of :class:`snip_megatron.runtime.config.SnipConfig`. ``--snip`` alone gives the other fields.
    """

    def __init__(self, snip: SnipConfig | None = None, *, on_adopt: OnAdopt | None = None, **options: Any) -> None:
        bridge_compat.check_interface()
        if snip is not None and options:
            raise SnipError(f"SnipCallback takes a SnipConfig or options, not both: {', '.join(sorted(options))}")
        native = native_backend(options.get("gemm", SnipConfig.gemm) if snip is None else snip.gemm, te_linears=True)
        self._snip = resolve(options, native, has_end=True) if snip is None else snip
        self._said = dominated(self._snip.budget, self._snip.formats, native) if self._snip.updates else None
        self._on_adopt = on_adopt
        self._run: _BridgeRun | None = None
        self._container: Any = None
        self._undo = ExitStack()

    def __enter__(self) -> SnipCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
        if self._run is not None:
            self._run.leave(kind, error, trace)
            self._run = None

    def attach(self, container: Any) -> SnipCallback:
        """Register SNIP's hook with the model of Bridge's ``ConfigContainer``, before ``pretrain``.

        Raises SnipError if this callback was attached before, or if the model has no pre-wrap hooks.
        """
        if not self._snip.enabled:
            return self
        if self._container is not None:
            raise SnipError("SnipCallback.attach() was called before: one callback serves one training run")
        self._container = container
        if torch.cuda.is_available():
            share_cache()
        model = container.model
        bridge_compat.let_snip_choose(container)
        if hasattr(model, "register_pre_wrap_hook"):  # a provider
            model.register_pre_wrap_hook(self.pre_wrap_hook)
        elif hasattr(model, "pre_wrap_hooks"):  # Megatron's own model configuration
            model.pre_wrap_hooks.append(self.pre_wrap_hook)
        else:
            raise SnipError(f"{type(model).__name__} has no pre-wrap hooks: SNIP cannot reach its linears")
        self._undo.callback(bridge_compat.wrap_train_step(self._wrap))
        return self

    def pre_wrap_hook(self, model_chunks: list[Any]) -> list[Any]:
        """Convert the linears in place. Bridge calls this hook after it builds the model and before it wraps it.

        All ranks raise SnipError if the configuration of one differs, or cannot be combined with SNIP under Bridge.
        """

        def prepare() -> tuple[_BridgeRun, Terms]:
            args = bridge_arguments(self._container)
            run = _BridgeRun(self._snip, args, self._on_adopt)
            return run, terms_of(run.config, args, run.use_library)

        self._run = together(prepare, of_group())
        if self._said is not None:
            say(self._said)
        return self._run.pre_wrap_hook(model_chunks)

    # -- Bridge's events -------------------------------------------------------------------------------------------
    def on_eval_start(self, context: Any) -> None:
        """Run the validation without CUDA graphs."""
        if self._run is not None:
            self._run.without_graphs.enter_context(self._run.graphs.bypassed(context.model))

    def on_eval_end(self, context: Any) -> None:
        """Record the validation loss."""
        if self._run is not None:
            self._run.without_graphs.close()
            self._run.evaluated(context.total_loss_dict, context.model)

    on_test_start = on_eval_start

    def on_test_end(self, context: Any) -> None:
        """Run the next steps with CUDA graphs again."""
        if self._run is not None:
            self._run.without_graphs.close()

    # -- the step --------------------------------------------------------------------------------------------------
    def _wrap(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def step_with_snip(*positional: Any, **named: Any) -> Any:
            if self._run is None:
                raise SnipError("Bridge built its model without SNIP's pre-wrap hook: did attach() get its container?")
            forward_step, data_iterator, model, optimizer, scheduler, state, _, schedule, *_ = positional
            self._run.state, self._run.scheduler = state, scheduler
            # In Bridge the chunks of a virtual pipeline share an iterator, whose microbatches it distributes itself.
            iterators = data_iterator if len(model) == 1 else [data_iterator] * len(model)
            config = get_model_config(model[0])
            call = StepCall(state.train_state.step, forward_step, iterators, model, optimizer, config, schedule)
            return self._run.run_step(functools.partial(train_step, **named), call, positional, schedule_at=7)

        return step_with_snip


def prepare(startup: Startup) -> None:
    """Apply and print the patches that let Bridge start with Megatron's wheel or without a CUDA device.

    ``startup`` is the result of :func:`snip_megatron.megatron.startup.prepare`, which precedes the import of Megatron.
    """
    bridge_compat.apply(startup)


class _BridgeRun(SnipRun):
    """A run that takes its loop, loggers and arguments from Bridge."""

    state: Any = None

    def __init__(self, config: SnipConfig, args: argparse.Namespace, on_adopt: OnAdopt | None) -> None:
        if config.eval == "both":
            raise SnipError("--snip-eval both is not supported under Megatron Bridge; use map or bf16")
        if args.use_torch_fsdp2:
            raise SnipError("--use-torch-fsdp2 is not supported under Megatron Bridge; use --use-megatron-fsdp")
        super().__init__(config, args, on_adopt)
        self.without_graphs = ExitStack()  # during a validation

    def evaluated(self, losses: dict[str, Any] | None, model: list[Any]) -> None:
        """Record the validation loss of the last pipeline stage on all ranks. Collective."""
        loss = mean_over_ranks(main_loss(losses), next(model[0].parameters()).device)
        if loss is not None:
            self._validated({"bf16" if self.config.eval == "bf16" else "map": loss})

    def _watch_evaluation(self, registry: LinearRegistry) -> None:
        return None  # SnipCallback.on_eval_end reports the loss

    def _sinks(self) -> Sinks:
        return Sinks(wandb=self.state.wandb_logger, tensorboard=self.state.tensorboard_logger)


# -- arguments -----------------------------------------------------------------------------------------------------
def bridge_arguments(container: Any) -> argparse.Namespace:
    """Return the arguments of Megatron that SNIP reads, given Bridge's validated ``ConfigContainer``.

    Most fields of Bridge's configurations have the names of Megatron's arguments. The others are set one by one.
    """
    model = container.model
    transformer = model if isinstance(model, TransformerConfig) else model.transformer
    fields: dict[str, Any] = {}
    for part in (transformer, model, container.optimizer, container.ddp, container.train, container.validation):
        fields |= {field.name: getattr(part, field.name, None) for field in dataclasses.fields(part)}
    checkpoint, dist = container.checkpoint, container.dist
    fields |= {
        **{name: getattr(checkpoint, name, None) for name in ("load", "save", "finetune", "ckpt_step")},
        **{name: getattr(dist, name, None) for name in ("use_megatron_fsdp", "use_torch_fsdp2")},
        "bf16": transformer.bf16,
        "fp16": transformer.fp16,
        "data_parallel_size": container.data_parallel_size,
        "swiglu": transformer.gated_linear_unit,
        "group_query_attention": transformer.num_query_groups != transformer.num_attention_heads,
        "num_experts": transformer.num_moe_experts,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "padded_vocab_size": padded_vocabulary(model, transformer),
        "accumulate_allreduce_grads_in_fp32": container.ddp.grad_reduce_in_fp32,
        "grad_reduce_in_bf16": not container.ddp.grad_reduce_in_fp32,
        "full_validation": False,
        "multiple_validation_sets": False,
    }
    return argparse.Namespace(**fields)


def padded_vocabulary(model: Any, transformer: Any) -> int:
    """Return the rows of the word embedding over all tensor parallel ranks, with the padding that Bridge adds."""
    if not getattr(model, "should_pad_vocab", False):
        return int(model.vocab_size)
    from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size

    divisor, ranks = model.make_vocab_size_divisible_by, transformer.tensor_model_parallel_size
    return int(calculate_padded_vocab_size(model.vocab_size, divisor, ranks))
