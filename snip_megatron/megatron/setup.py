"""Adds SNIP to a Megatron run: checks the configuration, converts the model and wraps the training step."""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from megatron.training import get_tensorboard_writer, get_wandb_writer

from snip_megatron.layers import LinearRegistry
from snip_megatron.layers.registry import check_map_fits, describe_left_out, load_map
from snip_megatron.megatron import compat, validate
from snip_megatron.megatron.blame import guard_blame, host_job, map_of_job, run_blame, snip_job
from snip_megatron.megatron.compat.checkpoints import KEY as SNIP_STATE_KEY
from snip_megatron.megatron.compat.checkpoints import SnipState
from snip_megatron.megatron.conversion import convert_model, what_stays, with_resolved_gemm
from snip_megatron.megatron.evaluation import Evaluation, main_loss
from snip_megatron.megatron.graphs import GraphedRun
from snip_megatron.megatron.host import MegatronStep, StepCall, make_host
from snip_megatron.megatron.model_linears import ModelLinears
from snip_megatron.megatron.run_record import open_run_directory
from snip_megatron.megatron.startup import say
from snip_megatron.megatron.times import MeasuredTimes, check_measurable, timeline_of
from snip_megatron.megatron.validate import cut_tiles
from snip_megatron.numerics.products import EMULATIONS
from snip_megatron.numerics.products.transformer_engine import transformer_engine_gemms
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels.launch import share_cache
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.reporting.end_of_run import finish
from snip_megatron.reporting.sinks import Sinks
from snip_megatron.runtime.agreement import on_rank_zero
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.controller import Controller, OnAdopt
from snip_megatron.runtime.coordinator import RankZeroCoordinator
from snip_megatron.runtime.exchange import Failure, UpdateBrokenError
from snip_megatron.runtime.host import Host, ProbeResult
from snip_megatron.runtime.probe import ProbeRunner
from snip_megatron.runtime.rise import Rise
from snip_megatron.runtime.state import ControllerState
from snip_megatron.runtime.warmup import WarmUp
from snip_megatron.sensitivity.policies import needs_forward_noise
from snip_megatron.sensitivity.problem import check_reachable
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.times import OptionTimes

_SHOULD_EXIT, _GRAD_NORM = 3, 5  # indices in the result of train_step


class SnipRun:
    """Holds SNIP's state in this process from the construction of the model to the end of training.

    Raises SnipError if the configuration cannot work with Megatron's arguments.
    """

    def __init__(self, config: SnipConfig, args: argparse.Namespace, on_adopt: OnAdopt | None = None) -> None:
        self.config = config = with_resolved_gemm(config, args)
        validate.check(config, args)
        self._on_adopt = on_adopt
        self._library = config.gemm_library
        self._args = args
        self._registry: LinearRegistry  # of the model that was built last
        self._linears: ModelLinears
        self._controller: Controller | None = None
        self._coordinator: RankZeroCoordinator | None = None
        self._host: Host  # from the first step on
        self._probes: ProbeRunner | None = None
        self._unmeasured: MeasuredTimes | None = None  # on rank 0 if the first update must measure times
        self.scheduler: Any = None  # of the learning rate, from the first step on
        self._checkpoint: SnipState
        self.undo = ExitStack()
        self._undo_model = self.undo.enter_context(ExitStack())  # closed when an in-process restart builds a new model
        self.graphs = GraphedRun(args)
        self.undo.callback(self.graphs.close)

    def use_library(self, library: str) -> None:
        """Use this ``gemm_library``, before the model is converted, because some rank cannot load a faster one."""
        self._library = library

    @contextmanager
    def around(self, model_config: Any) -> Iterator[None]:
        """Run Megatron's training inside this context under SNIP. ``model_config`` gets the hook that converts it."""
        if torch.cuda.is_available():
            share_cache()
        with ExitStack() as stack:
            stack.push(self.leave)
            self.undo.callback(compat.wrap_train_step(self.wrap))
            if self.config.gradient_reduction != "fp32":
                self.undo.enter_context(compat.gradients_reduced_in_fp8(self._args))
            model_config.pre_wrap_hooks.append(self.pre_wrap_hook)
            yield

    def pre_wrap_hook(self, model_chunks: list[Any]) -> list[Any]:
        """Convert the linears in place. Megatron calls this hook after it builds the model and before it wraps it."""
        self._undo_model.close()  # what belongs to an earlier model, which an in-process restart replaces
        if self._controller is not None:
            self._controller.close(together=False)  # ranks of the previous start may have died
        self._controller = self._coordinator = self._probes = None
        self._registry = convert_model(model_chunks, dataclasses.replace(self.config, gemm_library=self._library))
        self._linears = ModelLinears(self._registry.rows, self._registry.uncovered)
        context = self._registry.context
        validate.check_model(self.config, self._args, self._linears)
        check_measurable(self.config, context.gemm_backend)
        context.bf16_eval = self.config.eval == "bf16"
        context.fsdp_sharded = validate.sharding(self._args) is not None
        self._watch_evaluation(self._registry)
        if cut := cut_tiles(self._args, self._linears):
            say(
                f"not multiples of {TILE} on a rank: {', '.join(cut)}: quantisation tiles are cut there, so that"
                " statistics and maps differ slightly from those of another layout"
            )
        if getattr(self._args, "tp_comm_overlap", False):
            say("--tp-comm-overlap: linears gather and scatter beside their GEMMs only where all three are bf16")
        self._checkpoint = model_chunks[0].snip_state = SnipState(
            lambda: None if self._controller is None else self._controller.state_to_save(), self._checkpoint_has_state
        )
        self._undo_model.enter_context(compat.state_beside_model(self._checkpoint.content, self._loaded))
        return model_chunks

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End SNIP's part of the run: write the last metrics and files, stop the sidecar and draw the report.

        This is an ``__exit__`` callback. It never suppresses the exception that ended training.
        """
        self.undo.close()
        if self._controller is None:
            return
        # Megatron leaves at --exit-interval by SystemExit on all ranks. After another exception ranks may be gone.
        try:
            self._controller.close(together=kind is None or issubclass(kind, SystemExit))
        except Exception as close_error:  # training has ended, and no record is worth its exit code
            print(f"snip: the end of the run failed: {Failure.of('end', close_error)}", file=sys.stderr, flush=True)

    # -- overridden where another training loop than Megatron's runs the step -----------------------------------
    def _watch_evaluation(self, registry: LinearRegistry) -> None:
        evaluation = Evaluation(self.config.eval, self._args, registry.context, self._validated, self.graphs)
        self._undo_model.callback(compat.wrap_evaluate(evaluation.wrap))
        self._undo_model.enter_context(compat.evaluations_watched(evaluation.begin))

    def _sinks(self) -> Sinks:
        return Sinks(wandb=get_wandb_writer(), tensorboard=get_tensorboard_writer())

    def _validated(self, losses: dict[str, float], **which: str) -> None:
        if self._controller is not None:
            self._controller.record_losses(losses, **which)

    # -- checkpoint --------------------------------------------------------------------------------------------
    def _checkpoint_has_state(self) -> bool:
        """Return whether the checkpoint being loaded has SNIP's state."""
        if self._args.finetune or not self._args.load:
            return False
        return self._has_state(compat.checkpoint_has(self._args, SNIP_STATE_KEY))

    def _has_state(self, has_state: bool) -> bool:
        """Print a notice if a checkpoint has no state of SNIP. Under a fixed map none is needed."""
        if self.config.updates and not has_state:
            say("the checkpoint holds no SNIP state: linears start in bf16, the next update brings a map")
        return has_state

    def _loaded(self, content: bytes | None) -> None:
        """Store the state of a checkpoint in which it is an entry beside the model."""
        if not self._args.finetune:
            self._checkpoint.loaded = content
            self._has_state(content is not None)

    def _restored_state(self) -> ControllerState | None:
        if self._checkpoint.loaded is None:
            return None
        state = ControllerState.from_bytes(self._checkpoint.loaded)
        if state.precision_map is not None:
            check_map_fits(state.precision_map, self._registry.names, "SNIP state in the checkpoint")
        return state

    # -- the step ----------------------------------------------------------------------------------------------
    def wrap(self, train_step: compat.TrainStep) -> compat.TrainStep:
        """Return ``train_step`` wrapped by :meth:`run_step`."""

        def step_with_snip(*positional: Any, iteration: int, **named: Any) -> Any:
            forward_step, data_iterator, model, optimizer, self.scheduler, config, schedule, *_ = positional
            call = StepCall(iteration, forward_step, data_iterator, model, optimizer, config, schedule)
            step = functools.partial(train_step, iteration=iteration, **named)
            return self.run_step(step, call, positional, schedule_at=6)

        return step_with_snip

    def run_step(
        self, train_step: compat.TrainStep, call: StepCall, arguments: Sequence[Any], *, schedule_at: int
    ) -> Any:
        """Run :meth:`around_step` with ``train_step`` and its positional arguments.

        The first argument is the forward step, and the one at the index ``schedule_at`` the schedule. Both are wrapped.
        """
        if not hasattr(self, "_registry"):
            raise SnipError("the model was built without SNIP's pre-wrap hook: did the script pass its configuration?")

        def step() -> Any:
            forward_step, schedule = self.graphs.training(call.forward_step_func, call.forward_backward_func)
            schedule = self.repeatable(schedule, call.step)
            return train_step(forward_step, *arguments[1:schedule_at], schedule, *arguments[schedule_at + 1 :])

        # The backward runs in this thread. A switch to autograd's device thread and back costs as much host time as the
        # Python code of a small linear, and with one device a rank this thread would only wait.
        with torch.autograd.set_multithreading_enabled(False):
            return self.around_step(step, call)

    def repeatable(self, schedule: Callable[..., Any], step: int) -> Callable[..., Any]:
        """Return the schedule of ``step``, whose stochastic rounding is the same in each call.

        Megatron's rerun machine repeats a step with a suspect result, and takes a different result for a fault of the
        GPU.
        """
        repeats = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal repeats
            if repeats:
                self._registry.start_step(step)
            repeats = True
            if self._probes is not None and not self._probes.has_trained:
                return self._probes.first_pass(functools.partial(schedule, *args, **kwargs))
            return schedule(*args, **kwargs)

        return run

    def around_step(self, train_step: Callable[[], Any], call: StepCall) -> Any:
        """Run the controller before the step, the step itself, and the controller after it.

        The result of ``train_step`` is returned. It has the losses at index 0, whether Megatron exits instead of
        completing the step at index 3, and the gradient norm at index 5.
        """
        if self.config.blame is not None:
            self._blame(call)
        with _between_steps(call.step, "start"):
            controller = self._controller or self._build(call)

        def probe(clip: float) -> ProbeResult:
            assert self._probes is not None
            if not torch.cuda.is_available():
                say(f"step {call.step}: an update begins with a probe, which takes a while on a CPU")
            return self._probes.measure(self._step_without_graphs(call), clip, controller.state.sequences)

        def measure(maps: Sequence[PrecisionMap]) -> list[Rise]:
            assert self._probes is not None
            return self._probes.measure_maps(self._step_without_graphs(call), maps, controller.state.sequences)

        with _between_steps(call.step, "adoption"):
            diagnose = None
            if self.config.guard_blame:
                job = self.config, self._args, self._host, self._registry
                diagnose = functools.partial(guard_blame, *job, call, self._step_without_graphs)
                count = self.config.probed_microbatches(call.num_microbatches, self._host.pass_group)
                compat.keep_microbatches(call.data_iterator, call.step, count)
            controller.before_step(call.step, probe, measure, diagnose)
            self.graphs.recapture(call.step)
        started = time.perf_counter()
        try:
            result = train_step()
        except compat.RecaptureError as error:
            raise _broken(call.step, "recapture", error.__cause__ or error) from error
        if result[_SHOULD_EXIT]:  # no weight has changed, and a resumed job runs the step again
            return result
        if self._probes is not None:
            self._probes.has_trained = True
        captures = self.graphs.take_captures()
        if captures is not None:
            controller.record_capture(call.step, *captures)
        elif self._coordinator is not None:
            self._coordinator.record_step_time(call.step, time.perf_counter() - started)
        interval = getattr(self._args, "log_interval", None)
        if self._coordinator is not None and interval and (call.step + 1) % interval == 0:
            self._coordinator.print_line(call.step)
        with _between_steps(call.step, "figures"):
            controller.after_step(call.step, main_loss(result[0]), result[_GRAD_NORM])
        return result

    # -- construction at the first step ------------------------------------------------------------------------
    def _step_without_graphs(self, call: StepCall) -> MegatronStep:
        """Return the step whose passes run outside of CUDA graphs."""
        around = functools.partial(self.graphs.bypassed, call.model)
        schedule = compat.schedule_without_graph(call.forward_backward_func)
        call = dataclasses.replace(call, forward_backward_func=schedule)
        return MegatronStep(call, self._args, self._host.groups, around)

    def _make_host(self, call: StepCall) -> Host:
        """Make the host, and tell linears their places in its groups."""
        self._host = host = make_host(self._args, call.model, self._registry)
        groups, context = host.groups, self._registry.context
        context.dp_rank, context.dp_size = groups.dp_rank, groups.dp_size
        if groups.experts is not None:
            context.expert_dp_rank, context.expert_dp_size = groups.experts.dp_rank, groups.experts.dp_size
        return host

    def _blame(self, call: StepCall) -> NoReturn:
        """Run ``--snip-blame`` in place of the training, and exit."""
        host, registry = self._make_host(call), self._registry
        self.graphs.attach(registry, call.model)
        recipe = getattr(self._args, "snip_host_recipe", None)
        if recipe is not None:
            job = host_job(recipe, self._args, registry)
        else:
            restored = self._restored_state()
            saved = None if restored is None else restored.precision_map
            in_force = map_of_job(self.config, registry, host.device, saved)
            registry.adopt(in_force)
            job = snip_job(in_force, registry)
        run_blame(self.config, self._args, host, registry, call, job, self._step_without_graphs)

    def _build(self, call: StepCall) -> Controller:
        args, config, registry = self._args, self.config, self._registry
        model, step = call.model, call.step
        if config.gradient_reduction != "fp32":
            compat.check_reduced_models(model)
        host = self._make_host(call)
        compat.report_expert_gradients(model)
        compat.fuse_copies(call.optimizer)
        compat.lighten_buckets(model)
        linears = self._linears
        request = validate.solve_request(config, args, linears)
        self.graphs.attach(registry, model)
        self._probes = ProbeRunner(host, registry, config, weighs_updates=needs_forward_noise(request))
        self._probes.check_optimizer(self._step_without_graphs(call))
        self._coordinator = on_rank_zero(lambda: self._make_coordinator(registry, request, step))
        rehearse = None if self._unmeasured is None else self._unmeasured.rehearse
        self._controller = Controller(
            config,
            registry,
            host.device,
            self._coordinator,
            self._sinks(),
            clip_grad=args.clip_grad,
            restored=self._restored_state(),
            unquantised=sum(linears.uncovered_flops.values()),
            kernels=WarmUp(registry, config, request, host, rehearse),
            timeline=timeline_of(config, args, request, linears, self.scheduler, step),
            on_adopt=self._on_adopt,
        )
        return self._controller

    def _make_coordinator(self, registry: LinearRegistry, request: SolveRequest, step: int) -> RankZeroCoordinator:
        args, config, linears, backend = self._args, self.config, self._linears, registry.context.gemm_backend
        static_map = load_map(config.map, registry.names) if config.map is not None else None
        if static_map is not None and (line := describe_left_out(static_map, registry.names)):
            say(f"--snip-map {config.map}: {line}")
        run = open_run_directory(config, args, step, request, linears, backend, what_stays(registry.stock))
        times: MeasuredTimes | None = None
        measure: Callable[[], OptionTimes] | None = None
        if config.budget.timed and config.updates and request.times is None:
            timed = transformer_engine_gemms() if registry.context.use_te_recipe else registry.context.backend
            folder = None if run is None else run.path
            times = MeasuredTimes(config, args, linears.covered, timed, folder, self._host.device)
            if run is not None:
                times.store = run.writer.replace
            request = dataclasses.replace(request, times=times.stored())
            if request.times is not None:
                check_reachable(linears.covered, request)
                if run is not None:
                    run.set_fact("request", request.as_dict())
            times.watch(registry)
            if request.times is None or times.spans:
                measure = times.renew
        self._unmeasured = times if request.times is None else None
        tokens = args.global_batch_size * args.seq_length
        unjudged = "batch size grows" if compat.batch_size_ramp(args) is not None else None
        unjudged = "emulated" if backend in EMULATIONS else unjudged
        return RankZeroCoordinator(
            config, request, linears.covered, static_map, run, tokens, finish, unjudged=unjudged, times=measure
        )


@contextmanager
def _between_steps(step: int, part: str) -> Iterator[None]:
    """End the job in one line if an exception leaves SNIP's own work between two steps."""
    try:
        yield
    except SnipError:
        raise
    except Exception as error:
        raise _broken(step, part, error) from error


def _broken(step: int, part: str, error: BaseException) -> UpdateBrokenError:
    return UpdateBrokenError(step, Failure.of(part, error), error, "SNIP's work")
