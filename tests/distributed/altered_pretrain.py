"""The training entry, altered: module of warm ranks, which have imported Megatron.

A variable whose name is that of a function below (``SPIKES=16,19`` of :func:`spikes`) has it called before the
training, ``ALTER=mask,…`` those that need no value, and ``TWICE`` has the entry's ``main`` called again. The last
lines say what is left of process groups and of solver processes. Other programs follow: ``altered_pretrain:plain``.
"""

import atexit
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import types
import zlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_process import replace_target
from timings import RATES

from snip_megatron import pretrain_gpt
from snip_megatron.megatron.startup import prepare
from snip_megatron.precision import DENSE_LAYER, Format
from snip_megatron.runtime import solving

NAMED = ("frozen", "spikes", "low", "tight", "replicas", "trace", "crash")
SUMMED = ((1, torch.float32), (130, torch.float32), (384, torch.float32), (2048, torch.float32), (130, torch.bfloat16))


def main() -> int:
    for name in (*filter(None, os.environ.get("ALTER", "").split(",")), *NAMED):
        if name in NAMED and name.upper() not in os.environ:
            continue
        globals()[name]()
    code = pretrain_gpt.main()
    if "TWICE" in os.environ and not code:
        from megatron.training import inprocess_restart

        inprocess_restart.destroy_state()
        code = pretrain_gpt.main()
    solvers = getattr(solving.subprocess.Popen, "started", [])  # warm_ranks.ForkedSolver
    print("process groups left:", dist.is_initialized())
    print("solver processes left:", [solver.pid for solver in solvers if solver.poll() is None], "of", len(solvers))
    return code


def frozen() -> None:
    """Parameters whose name holds one of the parts <a>,<b>,… are not trained."""

    def freeze(name: str, parameter: torch.nn.Parameter) -> None:
        if any(part in name for part in os.environ["FROZEN"].split(",")):
            parameter.requires_grad_(False)

    _change_parameters(freeze)


def one_expert() -> None:
    """Weights drawn by name, and an expert's names and numbers those of the dense MLP in its place.

    So a decoder of mixtures of one expert is the dense decoder, down to the random signs of the drift and of
    stochastic rounding.
    """
    from snip_megatron.layers.context import LinearHandle

    def draw_by_name(name: str, parameter: torch.nn.Parameter) -> None:
        if parameter.dim() > 1:  # norms keep theirs
            seed = zlib.crc32(name.replace("mlp.experts.local_experts.0.", "mlp.").encode())
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.copy_(0.02 * drawn)

    def dense_index(handle: Any) -> int:
        kinds = len(DENSE_LAYER)
        return int(handle.id.layer * kinds + DENSE_LAYER.index(handle.id.path.replace(".experts.", ".")))

    LinearHandle.index = property(dense_index)  # type: ignore[assignment,method-assign]
    _change_parameters(draw_by_name)


def _change_parameters(change: Any) -> None:
    """Change the parameters of the built model before SNIP sees it."""
    from snip_megatron.megatron import setup

    hook = setup.SnipRun.pre_wrap_hook

    def changed(snip_run: Any, chunks: list[Any]) -> list[Any]:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                change(name, parameter)
        return hook(snip_run, chunks)

    setup.SnipRun.pre_wrap_hook = changed  # type: ignore[method-assign]


def offload() -> None:
    """Megatron's optimizer runs on the host, and takes the parameters' shards for tensors of a GPU."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    split, on_cpu = HybridDeviceOptimizer._get_sub_optimizer_param_groups, torch.Tensor.is_cuda

    def split_as_on_a_gpu(self: Any, fraction: float) -> Any:
        shards = {id(shard) for group in self.param_groups for shard in group["params"]}
        torch.Tensor.is_cuda = property(lambda tensor: id(tensor) in shards)  # type: ignore[assignment,method-assign]
        try:
            return split(self, fraction)
        finally:
            torch.Tensor.is_cuda = on_cpu  # type: ignore[method-assign]

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = split_as_on_a_gpu


def mask() -> None:
    """The loss mask leaves out the first three quarters of every sequence, as it leaves out a prompt."""
    from snip_megatron.megatron import entry

    genuine = entry.loss_function

    def masked(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
        counted = torch.arange(loss_mask.shape[1]) >= 3 * loss_mask.shape[1] // 4
        return genuine(loss_mask * counted, output)

    entry.loss_function = masked


def spikes() -> None:
    """A loss that is eight times too large in the steps <first>,<beyond> (from 0)."""
    from megatron.training import get_args

    from snip_megatron.megatron import entry

    first, beyond = (int(step) for step in os.environ["SPIKES"].split(","))
    genuine = entry.loss_function

    def spiking(*args: Any) -> Any:
        loss, tokens, reported = genuine(*args)
        factor = 8.0 if first <= get_args().curr_iteration < beyond else 1.0
        return loss * factor, tokens, {name: v * v.new_tensor([factor, 1.0]) for name, v in reported.items()}

    entry.loss_function = spiking


def low() -> None:
    """Statistics that predict <factor> times the rise of the loss."""
    from snip_megatron.runtime.probe import ProbeRunner

    measure = ProbeRunner.measure

    def scaled(*args: Any) -> Any:
        result = measure(*args)
        result.table.arrays["by_format.c2"] *= float(os.environ["LOW"])  # type: ignore[union-attr]
        return result

    ProbeRunner.measure = scaled  # type: ignore[method-assign]


def tight() -> None:
    """A rank whose device tells how much memory is free: <rank>,<bytes>,<bytes>,….

    That rank has so much at its first probe, its second and so on, and all others have plenty.
    """
    from snip_megatron.runtime import probe_memory as memory

    rank, *free = (int(number) for number in os.environ["TIGHT"].split(","))

    def device_memory(device: torch.device) -> memory.FreeMemory:
        return memory.FreeMemory(free.pop(0) if dist.get_rank() == rank else 2.0**40, 0.0, 2.0**24)

    memory.device_memory = device_memory


def fail() -> None:
    """Functions that raise an exception once: ``FAIL=[[step, rank, "module:Class.name", "RuntimeError"], …]``."""
    from snip_megatron.runtime.controller import Controller

    begin, current_step, errors = Controller.before_step, [-1], {"OutOfMemoryError": torch.OutOfMemoryError}

    def before_step(controller: Controller, step: int, *args: Any) -> None:
        current_step[0] = step
        begin(controller, step, *args)

    def make(planned: dict[int, str], genuine: Any) -> Any:
        def failing(*args: Any, **named: Any) -> Any:
            error = planned.pop(current_step[0], None)
            if error is not None:
                raise errors.get(error, RuntimeError)(f"injected into {genuine.__name__}")
            return genuine(*args, **named)

        return failing

    Controller.before_step = before_step  # type: ignore[method-assign]
    targets: dict[str, dict[int, str]] = {}
    for step, rank, target, error in json.loads(os.environ["FAIL"]):
        if rank == int(os.environ["RANK"]):
            targets.setdefault(target, {})[step] = error
    for target, planned in targets.items():
        replace_target(target, functools.partial(make, planned))


def replicas() -> None:
    """Each rank writes <folder>/rank<k>.pt after every step: gradients by name of what tensor parallel ranks share."""
    from snip_megatron.megatron.setup import SnipRun

    around_step = SnipRun.around_step

    def around_step_and_write(self: SnipRun, train_step: Any, call: Any) -> Any:
        result = around_step(self, train_step, call)
        parameters = call.model[0].named_parameters()
        actual = {name: p.main_grad for name, p in parameters if not getattr(p, "tensor_model_parallel", False)}
        torch.save(actual, Path(os.environ["REPLICAS"]) / f"rank{dist.get_rank()}.pt")
        return result

    SnipRun.around_step = around_step_and_write  # type: ignore[method-assign]


def rates() -> None:
    """GEMMs timed by a clock that knows the rate of every format."""
    from snip_megatron.megatron import setup, times, validate

    times.clock_for = lambda device: RateClock(RATES)
    for module in (setup, validate):
        module.check_measurable = lambda config, backend: None


class RateClock:
    """Runs each call once. It takes as long as the rate of its format says."""

    device = torch.device("cpu")

    def __init__(self, rates: Mapping[Format, float]) -> None:
        self.rates = rates

    def seconds[Key: Hashable](self, calls: Mapping[Key, Any]) -> dict[Key, float]:
        def of(key: Any) -> Format:
            return next(part for part in key if isinstance(part, Format))

        for call in calls.values():
            call(0)
        return {k: 1e-3 / self.rates[of(k)] if isinstance(k, tuple) and len(k) == 2 else 1e-5 for k in calls}


def blackwell() -> None:
    """A Blackwell card, whose Transformer Engine is emulated: its GEMMs by torch, its linears by SNIP's own."""
    from snip_megatron.megatron import attachment, conversion, setup, times, validate
    from snip_megatron.numerics.products import selection
    from tests.unit.numerics.products.emulated_te import gemms

    torch.cuda.get_device_capability = lambda *_: (10, 0)
    torch.cuda.get_device_name = lambda *_: "Some Blackwell"
    selection.on_blackwell = lambda: True
    selection.why_not_transformer_engine = selection._te_fault = lambda formats: None
    resolve, native = selection.resolve_gemm, selection.native_backend
    conversion.resolve_gemm = lambda name, formats, te_linears: resolve(name, formats, te_linears=True)
    attachment.native_backend = lambda name, te_linears: native(name, te_linears=True)
    conversion.ColumnParallelLinear = conversion.RowParallelLinear = type("NotOfMegatron", (), {})
    validate.check_measurable = lambda config, backend: None  # it refuses a CPU
    setup.transformer_engine_gemms = gemms
    times.clock_for = lambda device: RateClock({Format.BF16: 1.0, Format.MXFP8: 1.6, Format.NVFP4: 2.4})


def crash() -> None:
    """The step <number> (from 0) raises, and Megatron's ``pretrain`` is called again in the same process.

    nvidia-resiliency-ext's in-process restart does it so. Solver processes that are left are printed at the end.
    """
    from megatron.training import inprocess_restart

    from snip_megatron.megatron import compat

    faults: list[bool] = []

    class CrashError(RuntimeError):
        """A fault of one step."""

    def crashing(train_step: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            if kwargs["iteration"] == int(os.environ["CRASH"]) and not faults:
                faults.append(True)
                raise CrashError("injected")
            return train_step(*args, **kwargs)

        return step

    def wrap(pretrain: Any) -> tuple[Any, None]:
        def run(**parameters: Any) -> Any:
            try:
                return pretrain(**parameters)
            except CrashError:
                dist.destroy_process_group()
                inprocess_restart.destroy_state()
                return pretrain(**parameters)

        return run, None

    inprocess_restart.maybe_wrap_for_inprocess_restart = wrap
    compat.wrap_train_step(crashing)


def trace() -> None:
    """Each rank writes <folder>/rank<k>.json at its end, bit for bit.

    It holds ``losses`` and ``grad_norms`` (step from 1 -> float.hex(); losses only on the last pipeline stage) and
    ``weights`` (SHA-256 of all parameters).
    """
    from snip_megatron.megatron import compat

    if "TORCH_ATTENTION" in os.environ or "--multi-latent-attention" in sys.argv:
        torch_attention()
    recorder = Recorder()
    compat.wrap_train_step(recorder.wrap)
    folder = Path(os.environ["TRACE"])
    folder.mkdir(parents=True, exist_ok=True)
    atexit.register(recorder.write, folder)


class Recorder:
    """Wraps Megatron's train_step, and records its figures."""

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


def torch_attention() -> None:
    """torch's attention in local layers, since Megatron's needs heads of one size and documents that are not packed.

    A stand-in for the package datasets reads conversations where that is missing.
    """
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from torch_attention import TorchAttention

    from snip_megatron.megatron import datasets

    def load_dataset(kind: str, data_files: str, split: str) -> list[Any]:
        assert (kind, split) == ("json", "all")
        return [json.loads(line) for line in Path(data_files).read_text().splitlines()]

    datasets.ENGINES_OF_PACKED.append("local")
    if importlib.util.find_spec("datasets") is None:
        module: Any = types.ModuleType("datasets")
        module.__spec__, module.load_dataset = importlib.machinery.ModuleSpec("datasets", None), load_dataset
        sys.modules["datasets"] = module
    backends.DotProductAttention = gpt_layer_specs.DotProductAttention = TorchAttention


def traced(warm: Any, ranks: int, args: list[str], folder: Path, **variables: str) -> list[dict[str, Any]]:
    """What each of the warm ranks recorded of a training in ``folder``."""
    env = {"TRACE": str(folder / "trace"), **variables}
    warm.succeed(ranks, args, module="altered_pretrain", tmp=folder, env=env)
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


# -- other programs ----------------------------------------------------------------------------------------


def plain() -> None:
    """Megatron 0.19's ``pretrain`` with nothing of SNIP in it, as its users' own scripts call it.

    Only what lets Megatron run on a CPU at all is ours.
    """
    startup = prepare(sys.argv[1:], [])
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from snip_megatron.megatron import compat
    from snip_megatron.megatron.datasets import dataset_config

    def provide(parser: Any) -> Any:
        compat.set_defaults(parser, startup)
        return parser

    def datasets(samples: Any, vp_stage: int | None = None) -> Any:
        config = dataset_config(get_args())
        return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()

    datasets.is_distributed = True  # type: ignore[attr-defined]

    def loss(mask: torch.Tensor, output: torch.Tensor) -> Any:
        total = (output.reshape(-1).float() * mask.reshape(-1).float()).sum()
        tokens = mask.sum().to(torch.int)
        return total, tokens, {"lm loss": torch.stack((total.detach(), tokens.float()))}

    def forward_step(data: Any, model: Any) -> Any:
        batch = next(data)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, lambda result: loss(batch["loss_mask"], result)

    args = parse_and_validate_args(provide)
    args.snip = False  # an argument of ours, which the patches ask for
    compat.apply(args, startup)
    model = gpt_config_from_args(args)
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(args, model),
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )


def stripped() -> None:
    """The example ``SCRIPT`` without its three lines of SNIP, as a team has it."""
    startup = prepare(sys.argv[1:], [])
    from megatron.training.arguments import parse_args

    from snip_megatron.megatron import compat

    args = parse_args(ignore_unknown_args=True)
    args.snip = False
    compat.apply(args, startup)
    path = Path(os.environ["SCRIPT"])
    lines = [line for line in path.read_text().splitlines() if not line.endswith(("# SNIP 1", "# SNIP 2"))]
    text = re.sub(r"snip_arguments\((\w*)\)\)  # SNIP 3", lambda match: f"{match[1] or None})", "\n".join(lines))
    assert "snip_megatron.attach" not in text.partition('"""\n\n')[2]
    assert "attach(" not in text
    assert "snip_arguments(" not in text
    exec(compile(text, str(path), "exec"), {"__name__": "__main__"})


def complaining() -> Any:
    """The example with its own loss, whose ``on_adopt`` fails on rank 1 alone after it has printed."""
    from snip_megatron import attach as module

    genuine = module.attach

    def attach(pretrain: Any, *, on_adopt: Any) -> Any:
        def complain(step: int, precision_map: Any) -> None:
            on_adopt(step, precision_map)
            assert dist.get_rank() != 1, "the user's own fault"

        return genuine(pretrain, on_adopt=complain)

    module.attach = attach
    return importlib.import_module("examples.own_model_data_loss").main()


def summed() -> None:
    """Gradients summed as quantised parts.

    Each rank writes ``OUT/rank<k>.pt``: for each of SUMMED, its gradients and its part of the sum.
    """
    prepare([], [])
    from snip_megatron.megatron.compat.gradients import start_gradient_reduction

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    result = []
    for length, dtype in SUMMED:
        generator = torch.Generator().manual_seed(100 * rank + length)
        whole = (torch.randn(ranks * length, generator=generator) * 1e-4).to(dtype)
        if length == 384:
            whole[130] = torch.nan  # in the second tile of rank 0's part
        before, shard = whole.clone(), whole.view(ranks, length)[rank]
        start_gradient_reduction(shard, whole, None)()  # into the part itself, as Megatron has it
        result.append((before, whole.view(ranks, length)[rank].clone()))
    torch.save(result, Path(os.environ["OUT"]) / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
