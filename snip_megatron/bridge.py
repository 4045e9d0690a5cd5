"""SNIP in Megatron Bridge 0.6: a callback for its ``pretrain`` and a hook for its model providers.

    with SnipCallback(SnipConfig(enabled=True, budget="fp4=0.75")) as snip:
        snip.attach(config)
        pretrain(config, forward_step, callbacks=[snip])

Bridge's callbacks see neither the batches nor the schedule that a probe needs, so its ``train_step`` is wrapped as
Megatron's own is (``megatron/setup.py``): the module's global of that name, its signature checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

try:
    from megatron.bridge.training.callbacks import Callback

    from snip_megatron.megatron.compat import bridge as bridge_compat
except ImportError as missing:
    from snip_megatron.errors import SnipError

    raise SnipError(
        f"snip_megatron.bridge needs megatron-bridge 0.6, which cannot be imported here: {missing}"
    ) from missing
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError
from snip_megatron.layers import LinearRegistry
from snip_megatron.megatron import validate
from snip_megatron.megatron.evaluation import share
from snip_megatron.megatron.layer_spec import transformer_engine_layer_spec
from snip_megatron.megatron.probe_call import StepCall
from snip_megatron.megatron.setup import SnipRun
from snip_megatron.megatron.startup import Startup, is_rank_zero
from snip_megatron.reporting.sinks import Sinks
from snip_megatron.reporting.tensorboard_sink import TensorBoardSink
from snip_megatron.reporting.wandb_sink import WandbSink

_LOSS = "lm loss"


class SnipCallback(Callback):  # type: ignore[misc]  # Bridge has no types here
    """SNIP of one training run. A context manager: leaving it ends the sidecar and writes the last files.

    Args:
        snip: the configuration, as the ``--snip-*`` arguments make it.

    Raises:
        SnipError: this Bridge's ``train_step`` is not the one that is known.
    """

    def __init__(self, snip: SnipConfig) -> None:
        bridge_compat.check_interface()
        self._snip = snip
        self._run: _BridgeRun | None = None
        self._container: Any = None
        self._undo: Callable[[], None] | None = None

    def __enter__(self) -> SnipCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
        if self._run is not None:
            self._run.leave(kind, error, trace)
            self._run = None

    def attach(self, container: Any) -> SnipCallback:
        """Add SNIP to Bridge's ``ConfigContainer`` before ``pretrain``: the model's hook and its layer.

        Raises:
            SnipError: the container has SNIP already, or its model cannot take it.
        """
        if not self._snip.enabled:
            return self
        if self._container is not None:
            raise SnipError("SnipCallback.attach() was called before: one callback serves one training run")
        self._container = container
        model = container.model
        if hasattr(model, "register_pre_wrap_hook"):  # a provider
            if model.transformer_impl == "transformer_engine":
                model.transformer_layer_spec = _provider_layer_spec
            model.register_pre_wrap_hook(self.pre_wrap_hook)
        elif hasattr(model, "pre_wrap_hooks"):  # Megatron's own model configuration
            if model.transformer.transformer_impl == "transformer_engine":
                model.transformer_layer_spec = transformer_engine_layer_spec
            model.pre_wrap_hooks.append(self.pre_wrap_hook)
        else:
            raise SnipError(f"{type(model).__name__} has no pre-wrap hooks: SNIP cannot reach its linears")
        self._undo = bridge_compat.wrap_train_step(self._wrapped)
        return self

    def pre_wrap_hook(self, model_chunks: list[Any]) -> list[Any]:
        """Bridge's hook between building the model and wrapping it. Raises SnipError on what cannot work together."""
        args = bridge_arguments(self._container)
        validate.check(self._snip, args)
        if (args.virtual_pipeline_model_parallel_size or 1) > 1:
            raise SnipError(
                "virtual_pipeline_model_parallel_size is not supported under"
                " Megatron Bridge, whose step shares one iterator among model chunks; use None"
            )
        if args.num_experts:
            raise SnipError("num_moe_experts is not supported under Megatron Bridge; use SNIP's own entry")
        if args.context_parallel_size > 1:
            raise SnipError("context_parallel_size is not supported under Megatron Bridge; use SNIP's own entry")
        if self._snip.eval == "both":
            raise SnipError("--snip-eval both is not supported under Megatron Bridge; use map or bf16")
        self._run = _BridgeRun(self._snip, args)
        return self._run.pre_wrap_hook(model_chunks)

    # -- Bridge's events -------------------------------------------------------------------------------------------
    def on_eval_end(self, context: Any) -> None:
        """Validation's loss joins the run's metrics."""
        if self._run is not None:
            self._run.evaluated(context.total_loss_dict or {}, context.model)

    # -- the step --------------------------------------------------------------------------------------------------
    def _wrapped(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def step_with_snip(
            forward_step_func: Any,
            data_iterator: Any,
            model: Any,
            optimizer: Any,
            scheduler: Any,
            global_state: Any,
            pg_collection: Any,
            forward_backward_func: Any,
            *rest: Any,
            **named: Any,
        ) -> Any:
            def step() -> Any:
                return train_step(
                    forward_step_func,
                    data_iterator,
                    model,
                    optimizer,
                    scheduler,
                    global_state,
                    pg_collection,
                    forward_backward_func,
                    *rest,
                    **named,
                )

            if self._run is None:
                raise SnipError(
                    "Bridge built its model without SNIP's pre-wrap hook: was attach() given its container?"
                )
            self._run.state = global_state
            call = StepCall(
                step=global_state.train_state.step,
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                optimizer=optimizer,
                config=get_model_config(model[0]),
                forward_backward_func=forward_backward_func,
                num_microbatches=get_num_microbatches(),
                clip=1.0,
            )
            return self._run.around_step(step, call)

        return step_with_snip


def prepare(startup: Startup) -> None:
    """Let Bridge start where its Megatron is the wheel, and without a CUDA device; says what it patched.

    Args:
        startup: what :func:`snip_megatron.megatron.startup.prepare` returned, before Megatron was imported.
    """
    for line in bridge_compat.apply(startup):
        if is_rank_zero():
            print(f"compat: {line}", flush=True)


class _BridgeRun(SnipRun):
    """A run whose loop, loggers and arguments are Bridge's."""

    state: Any = None

    def evaluated(self, losses: dict[str, Any], model: list[Any]) -> None:
        """Collective: every rank is told; the last pipeline stage has the loss."""
        loss = share(losses.get(_LOSS), next(model[0].parameters()).device)
        if loss is not None:
            self._validated({"bf16" if self._config.eval == "bf16" else "map": loss})

    def _watch_evaluation(self, registry: LinearRegistry) -> None:
        return None  # on_eval_end tells

    def _current_arguments(self) -> argparse.Namespace:
        return self._args

    def _sinks(self) -> Sinks:
        return Sinks(WandbSink(self.state.wandb_logger), TensorBoardSink(self.state.tensorboard_logger))


def _provider_layer_spec(config: Any) -> Any:
    return transformer_engine_layer_spec(argparse.Namespace(transformer=config))


# -- arguments -----------------------------------------------------------------------------------------------------
def bridge_arguments(container: Any) -> argparse.Namespace:
    """What SNIP asks of Megatron's arguments, from Bridge's validated ``ConfigContainer``.

    Fields of the model, optimizer, DDP, training, validation and checkpoint configurations have Megatron's names, but
    for those set here.
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
        "decoder_first_pipeline_num_layers": transformer.num_layers_in_first_pipeline_stage,
        "decoder_last_pipeline_num_layers": transformer.num_layers_in_last_pipeline_stage,
        "pipeline_model_parallel_layout": transformer.pipeline_model_parallel_layout,
        "accumulate_allreduce_grads_in_fp32": container.ddp.grad_reduce_in_fp32,
        "grad_reduce_in_bf16": not container.ddp.grad_reduce_in_fp32,
        "full_validation": False,
        "multiple_validation_sets": False,
    }
    return argparse.Namespace(**fields)


def padded_vocabulary(model: Any, transformer: Any) -> int:
    """Rows of the embedding over all tensor parallel ranks: Bridge pads when it builds the model."""
    if not getattr(model, "should_pad_vocab", False):
        return int(model.vocab_size)
    calculate = importlib.import_module("megatron.bridge.utils.vocab_utils").calculate_padded_vocab_size
    return int(calculate(model.vocab_size, model.make_vocab_size_divisible_by, transformer.tensor_model_parallel_size))
