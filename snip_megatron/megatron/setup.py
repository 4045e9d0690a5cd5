"""Puts SNIP into a Megatron run: checks the configuration, converts the model, wraps the training step."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

from snip_megatron import __version__
from snip_megatron.adoption import MapChannel
from snip_megatron.config import SnipConfig
from snip_megatron.controller import Controller, Unmeasured
from snip_megatron.controller_state import ControllerState
from snip_megatron.coordinator import RankZeroCoordinator
from snip_megatron.errors import SnipError
from snip_megatron.layers import LinearRegistry, convert_model
from snip_megatron.layers.registry import check_map_fits
from snip_megatron.megatron import compat, validate
from snip_megatron.megatron.checkpoint_state import KEY as SNIP_STATE_KEY
from snip_megatron.megatron.checkpoint_state import SnipState
from snip_megatron.megatron.evaluation import Evaluation, check_evaluation
from snip_megatron.megatron.gradient_norms import GradientNorms
from snip_megatron.megatron.layer_spec import transformer_engine_layer_spec
from snip_megatron.megatron.model_linears import gemm_flops, model_linears, unquantised_flops
from snip_megatron.megatron.probes import LoopShape, ProbeResult, ProbeRunner, StepCall
from snip_megatron.megatron.shards import cut_tiles
from snip_megatron.megatron.startup import is_rank_zero
from snip_megatron.megatron.step_costs import linear_shapes
from snip_megatron.pace import Pace
from snip_megatron.quantization.formats import TILE
from snip_megatron.reporting.run_directory import RunDirectory
from snip_megatron.reporting.sinks import Sinks
from snip_megatron.reporting.tensorboard_sink import TensorBoardSink
from snip_megatron.reporting.wandb_sink import WandbSink
from snip_megatron.sensitivity.policies import needs_forward_noise, needs_hessian, pinned_gemms
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.statistics.reduction import ProbeGroups
from snip_megatron.statistics.table import LinearRow
from snip_megatron.step_report import StepReport

_GRAD_NORM = 5  # index in what train_step returns
_LOSS = "lm loss"


def install(config: SnipConfig, *, args: argparse.Namespace) -> SnipRun:
    """Check everything that can be checked without communication, then wrap Megatron's ``train_step``.

    Args:
        config: SNIP's configuration.
        args: Megatron's validated arguments.

    Returns:
        The run's hooks: call ``prepare_model``, push ``leave`` on an ExitStack around training.

    Raises:
        SnipError: a configuration that cannot work, in one line.
    """
    validate.check(config, args)
    check_evaluation(config.eval, args)
    run = SnipRun(config, args)
    run.undo.callback(compat.wrap_train_step(run.wrap))
    return run


class SnipRun:
    """SNIP's state in this process, from the model's construction to the end of training."""

    def __init__(self, config: SnipConfig, args: argparse.Namespace) -> None:
        self._config = config
        self._args = args
        self._registry: LinearRegistry | None = None
        self._controller: Controller | None = None
        self._coordinator: RankZeroCoordinator | None = None
        self._probes: ProbeRunner | None = None
        self._norms: GradientNorms | None = None
        self._checkpoint: SnipState | None = None
        self.undo = ExitStack()
        self._undo_evaluation = self.undo.enter_context(ExitStack())  # of this start's model

    def prepare_model(self, model_config: Any) -> None:
        """Add our hooks to Megatron's model configuration: a layer of our spec under Transformer Engine, conversion."""
        if self._args.transformer_impl == "transformer_engine":
            if model_config.transformer_layer_spec is not None:
                raise SnipError(
                    "--spec cannot be combined with --snip under --transformer-impl transformer_engine: SNIP brings its"
                    " own layer; use --transformer-impl local"
                )
            model_config.transformer_layer_spec = transformer_engine_layer_spec
        model_config.pre_wrap_hooks.append(self.pre_wrap_hook)

    def pre_wrap_hook(self, model_chunks: list[Any]) -> list[Any]:
        """Megatron's hook between building the model and wrapping it: convert the linears in place."""
        self._leave_earlier_start()
        self._registry = convert_model(model_chunks, self._config)
        if self._registry.frozen and self._config.updates:
            raise SnipError(
                f"{self._registry.frozen[0]} is frozen: --snip measures every decoder linear through its gradient;"
                " give a fixed map (--snip-map) or train without --snip"
            )
        self._registry.context.bf16_eval = self._config.eval == "bf16"
        self._watch_evaluation(self._registry)
        self._say_what_is_cut()
        model_chunks[0].snip_state = self._checkpoint = SnipState(self._state_to_save, self._checkpoint_has_state)
        return model_chunks

    def _say_what_is_cut(self) -> None:
        cut = cut_tiles(self._args)
        if cut and is_rank_zero():
            print(
                f"snip: not multiples of {TILE} on a rank: {', '.join(cut)}: quantisation tiles are cut there, so that"
                " statistics and maps are slightly other ones than another layout's",
                flush=True,
            )

    def _leave_earlier_start(self) -> None:
        """An in-process restart builds the model anew: what belongs to the old one ends here, its peers may be gone."""
        self._undo_evaluation.close()
        if self._controller is not None:
            self._controller.close(together=False)
        self._controller = self._coordinator = self._probes = None

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """The end of training: last figures, sidecar, files, report. Never hides an error on its way up."""
        self.undo.close()
        if self._controller is not None:
            # Megatron ends a run at --exit-interval by SystemExit, on all ranks; after anything else peers may be gone.
            self._controller.close(together=kind is None or issubclass(kind, SystemExit))
            self._controller = None

    # -- the host's own, which another one than Megatron's loop answers otherwise ------------------------------
    def _watch_evaluation(self, registry: LinearRegistry) -> None:
        evaluation = Evaluation(self._config.eval, self._args, registry.context, self._validated)
        self._undo_evaluation.callback(compat.wrap_evaluate(evaluation.wrap))

    def _current_arguments(self) -> argparse.Namespace:
        # Not those given to us: 0.17 parses the command line again, and only its own know the padded vocabulary.
        args: argparse.Namespace = get_args()
        return args

    def _sinks(self) -> Sinks:
        return Sinks(WandbSink(get_wandb_writer()), TensorBoardSink(get_tensorboard_writer()))

    def _validated(self, losses: dict[str, float]) -> None:
        if self._controller is not None:
            self._controller.validated(losses)

    # -- checkpoint --------------------------------------------------------------------------------------------
    def _state_to_save(self) -> bytes | None:
        return None if self._controller is None else self._controller.state_to_save()

    def _checkpoint_has_state(self) -> bool:
        """Asked while a checkpoint is loaded. One that SNIP did not write trains on in bf16 until the next update."""
        if self._args.finetune or not self._args.load:
            return False
        found = compat.checkpoint_holds(self._args, SNIP_STATE_KEY)
        if not found and is_rank_zero():
            print(
                "snip: the checkpoint holds no SNIP state: linears start in bf16, the next update brings a map",
                flush=True,
            )
        return found

    def _restored_state(self) -> ControllerState | None:
        if self._checkpoint is None or self._checkpoint.loaded is None:
            return None
        state = ControllerState.from_bytes(self._checkpoint.loaded)
        if state.precision_map is not None and self._registry is not None:
            check_map_fits(state.precision_map, self._registry.names, "SNIP state in the checkpoint")
        return state

    # -- the step ----------------------------------------------------------------------------------------------
    def wrap(self, train_step: compat.TrainStep) -> compat.TrainStep:
        """The wrapped ``train_step``: the controller before it, its figures after it."""

        def step_with_snip(
            forward_step_func: Any,
            data_iterator: Any,
            model: Any,
            optimizer: Any,
            opt_param_scheduler: Any,
            config: Any,
            forward_backward_func: Any,
            iteration: int,
            **kwargs: Any,
        ) -> Any:
            def step() -> Any:
                return train_step(
                    forward_step_func,
                    data_iterator,
                    model,
                    optimizer,
                    opt_param_scheduler,
                    config,
                    forward_backward_func,
                    iteration=iteration,
                    **kwargs,
                )

            call = StepCall(
                step=iteration,
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                optimizer=optimizer,
                config=config,
                forward_backward_func=forward_backward_func,
                num_microbatches=get_num_microbatches(),
                clip=1.0,
            )
            return self.around_step(step, call)

        return step_with_snip

    def around_step(self, train_step: Callable[[], Any], call: StepCall) -> Any:
        """The controller, ``train_step()``, its figures. Returns its result: losses first, gradient norm at index 5.

        Args:
            call: what the step is called with; ``clip`` and ``measured`` are filled in here.
        """
        # Backwards run in this thread: each hand-over to the engine's own and back costs the host as much as the Python
        # code of a small linear (gemm/README.md), and a rank has one device, whose thread this one would wait for.
        with torch.autograd.set_multithreading_enabled(False):
            return self._controlled(train_step, call)

    def _controlled(self, train_step: Callable[[], Any], call: StepCall) -> Any:
        controller = self._controller or self._build(call.model, call.optimizer, call.step)

        def probe(clip: float) -> ProbeResult | Unmeasured:
            assert self._probes is not None
            asked = replace(call, clip=clip, measured=controller.state.measured)
            refusal = self._probes.shortage(asked)
            if refusal is not None and is_rank_zero():
                print(f"snip: the update of step {call.step} is left out: {refusal.reason}", flush=True)
            return refusal or self._probes.run(asked)

        controller.before_step(call.step, probe)
        started = time.perf_counter()
        result = train_step()
        if self._probes is not None:
            self._probes.has_trained = True
        if self._coordinator is not None:
            self._coordinator.step_took(call.step, time.perf_counter() - started)
        losses = result[0]
        norms = None if self._norms is None else functools.partial(self._norms.share, call.optimizer)
        controller.after_step(call.step, losses.get(_LOSS) if losses else None, result[_GRAD_NORM], norms)
        return result

    # -- construction at the first step ------------------------------------------------------------------------
    def _build(self, model: Sequence[torch.nn.Module], optimizer: Any, step: int) -> Controller:
        assert self._registry is not None, "the model was built without SNIP's pre-wrap hook"
        args, config, registry = self._current_arguments(), self._config, self._registry
        process_groups = compat.process_groups(model[0])
        groups = ProbeGroups(tp=process_groups.tp, dp=process_groups.dp_cp, experts=_expert_groups(process_groups))
        device = next(model[0].parameters()).device
        registry.context.dp_rank, registry.context.dp_size = groups.dp_rank, groups.dp_size
        if groups.experts is not None:
            registry.context.expert_dp_rank = groups.experts.dp_rank
            registry.context.expert_dp_size = groups.experts.dp_size
        request = validate.solve_request(config, args)
        linears = model_linears(args)
        sharded = bool(args.use_distributed_optimizer) or bool(
            getattr(args, "use_layer_wise_distributed_optimizer", False)
        )
        self._norms = GradientNorms(registry, groups, optimizer_sharded=sharded) if config.trigger > 0 else None
        self._probes = ProbeRunner(
            registry,
            config,
            LoopShape(
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                padded_vocab_size=args.padded_vocab_size,
                virtual_stages=args.virtual_pipeline_model_parallel_size,
                optimizer_sharded=sharded,
                context_parallel=args.context_parallel_size,
            ),
            groups,
            model,
            with_drift=needs_forward_noise(request),
            with_hessian=needs_hessian(request),
            measures=needs_forward_noise(request) and request.estimator == "measured",
            pinned=pinned_gemms(registry.names, request),
        )
        if is_rank_zero():
            static_map = validate.load_map(config.map, registry.names) if config.map is not None else None
            run = self._run_directory(step, request, linears)
            tokens = args.global_batch_size * args.seq_length
            pace = None if registry.context.backend.name == "reference" else Pace()
            self._coordinator = RankZeroCoordinator(config, request, linears, static_map, run, tokens, pace)
        restored = self._restored_state()
        self._controller = Controller(
            config,
            registry,
            MapChannel(registry.names, device),
            StepReport(device, arrived=None if restored is None else restored.in_flight),
            gemm_flops(linears),
            self._coordinator,
            self._sinks(),
            clip_grad=args.clip_grad,
            restored=restored,
            unquantised=sum(unquantised_flops(args).values()),
        )
        return self._controller

    def _run_directory(self, step: int, request: SolveRequest, linears: tuple[LinearRow, ...]) -> RunDirectory | None:
        """``--snip-dir``, else ``<save>/snip``; without either the run keeps no record."""
        config, args = self._config, self._args
        if config.dir is None and not args.save:
            print("snip: no run directory: give --snip-dir (or --save) to keep events, maps and a report", flush=True)
            return None
        path = Path(config.dir) if config.dir is not None else Path(args.save) / "snip"
        # Where the record is written and whether it may replace another are not what makes two runs the same.
        identity = replace(config, dir=None, overwrite=False, no_compat=()).as_dict()
        identity |= {
            name: getattr(args, name)
            for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length")
        }
        facts = {
            "version": __version__,
            "world_size": dist.get_world_size(),
            "tensor_parallel": args.tensor_model_parallel_size,
            "pipeline_parallel": args.pipeline_model_parallel_size,
            "data_parallel": args.data_parallel_size,
            "global_batch_size": args.global_batch_size,
            "micro_batch_size": args.micro_batch_size,
            "sequence_parallel": args.sequence_parallel,
            "request": request.as_dict(),  # what `snip solve RUN` starts from
            "unquantised_flops": {str(stage): flops for stage, flops in unquantised_flops(args).items()},
            "linear_shapes": {name: asdict(s) for name, s in linear_shapes(args, linears).items()},
        }
        resume = step if args.load or step > 0 else None
        return RunDirectory(path, identity, overwrite=config.overwrite, resume_step=resume, facts=facts)


def _expert_groups(groups: compat.ProcessGroups) -> ProbeGroups | None:
    if groups.expt_tp is None or groups.expt_dp is None:
        return None
    return ProbeGroups(tp=groups.expt_tp, dp=groups.expt_dp)
