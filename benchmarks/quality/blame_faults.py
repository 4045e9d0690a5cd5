"""The planted faults of :mod:`benchmarks.quality.blame`: rounding, bugs, and healthy steps.

A fault is planted from outside, in the process of a rank before its training entry runs: functions of the package, of
Megatron and of torch are replaced, weights of the loaded checkpoint are changed, or the map gives a GEMM a narrower
format. The package itself has no hook for any of this.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Plant = Callable[["Site"], None]
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}
ROWWISE = {("fprop", "x"): True, ("fprop", "w"): True, ("dgrad", "g"): True}
"""Operands that the quantiser makes rowwise; the others are columnwise."""
BUG, ROUNDING, HEALTHY = "bug", "rounding", "not_precision"


@dataclass(frozen=True)
class Site:
    """Where a fault is planted.

    Attributes:
        linear: Name of the linear.
        gemm: The GEMM. None stands for all three.
        expert: Index of the expert.
        rank: The rank with the fault. None stands for all.
        seed: Seed of what is drawn.
    """

    linear: str
    gemm: str | None = None
    expert: int | None = None
    rank: int | None = None
    seed: int = 0

    @property
    def here(self) -> bool:
        """Whether this rank has the fault."""
        return self.rank in (None, dist.get_rank() if dist.is_initialized() else 0)

    def hits(self, gemm: str) -> bool:
        return self.gemm in (None, gemm)


@dataclass(frozen=True)
class Case:
    """A planted fault, or a healthy step.

    Attributes:
        family: What is planted.
        verdict: The right verdict.
        site: The culprit. None in a healthy step.
        formats: Pattern of GEMMs → format, the last match applies, as of ``--snip-pin``.
        layout: ``one``, ``tp``, ``sp``, ``dp`` or ``experts``.
        gemms: GEMMs that are a right answer. Empty if the fault is in no GEMM.
        linears: Names that are a right answer beside the site's.
        microbatches: Number of microbatches of a step.
        step: Number of steps behind the checkpoint.
        again: Number of earlier cases with the same family and site.
        unseen: Whether cases of this kind had no part in setting the limits of ``--snip-blame``.
    """

    family: str
    verdict: str
    site: Site | None
    formats: Mapping[str, str]
    plant: Plant | None = None
    layout: str = "one"
    gemms: Sequence[str] = GEMMS
    linears: Sequence[str] = ()
    microbatches: int = 1
    step: int = 0
    again: int = 0
    unseen: bool = False

    @property
    def name(self) -> str:
        if self.site is None:
            return f"{self.family}-{self.layout}-{self.step}"
        layer, _, path = self.site.linear.removeprefix("decoder.layers.").partition(".")
        parts = [self.family, layer, path.rpartition(".")[2].removeprefix("linear_"), self.site.gemm]
        return "-".join([part for part in parts if part] + [str(self.again + 1)] * bool(self.again))


# -- what runs at present ----------------------------------------------------------------------------------------------
class _Now(NamedTuple):
    linear: str
    expert: int | None
    is_forward: bool


_now: list[_Now] = []
_job_backends: list[Any] = []


def install() -> None:
    """Note which linear runs. Give a job on the CPU another backend than the reference: bf16 operands, in torch.

    C++, which repeats calls of a backend, would repeat a fault in every linear, so that Python launches the kernels.
    """
    from snip_megatron.megatron import conversion
    from snip_megatron.runtime import warmup

    warmup.launch_from_cpp = lambda *_: "Python launches kernels"  # type: ignore[assignment]
    note_linears()
    select = conversion.select_backend

    def select_and_note(*arguments: Any, **options: Any) -> Any:
        selection = select(*arguments, **options)
        if not torch.cuda.is_available():
            from snip_megatron.numerics.products.emulated import EmulatedBackend
            from snip_megatron.numerics.quantize.operands import quantize_exact

            selection = replace(selection, backend=EmulatedBackend(quantize_exact))
        _job_backends.append(selection.backend)
        for change in _changes:
            change(selection.backend)
        return selection

    conversion.select_backend = select_and_note


def note_linears() -> None:
    """Note which linear runs."""
    from snip_megatron.layers.autograd import QuantizedLinear
    from snip_megatron.layers.grouped import GroupedLinear

    for function in (QuantizedLinear, GroupedLinear):
        for name in ("forward", "backward"):
            setattr(function, name, staticmethod(_noting(getattr(function, name), name == "forward")))


_changes: list[Callable[[Any], None]] = []


def _noting(function: Callable[..., Any], is_forward: bool) -> Callable[..., Any]:
    def run(ctx: Any, *arguments: Any) -> Any:
        calls = (each for each in arguments if hasattr(each, "has_backward") or hasattr(each, "linear"))
        call = next(calls) if is_forward else ctx.call
        handle = getattr(call, "handle", None) or call.linear.handle
        _now.append(_Now(handle.name, handle.expert, is_forward))
        try:
            return function(ctx, *arguments)
        finally:
            _now.pop()

    return run


def _running(site: Site) -> bool:
    if not _now or not site.here or not _now[-1].linear.startswith(site.linear):
        return False
    return site.expert is None or _now[-1].expert in (None, site.expert)


def _operand_of(spec: Any) -> str:
    """Return which matrix of the running linear is quantised."""
    return "w" if spec.weight else "x" if _now[-1].is_forward else "g"


def _is_plain(operand: Any) -> bool:
    """Whether an operand is one of a GEMM in bf16."""
    return getattr(getattr(operand, "format", None), "value", None) == "bf16"


# -- faults of the job's backend -----------------------------------------------------------------------------------
Product = Callable[..., torch.Tensor]


def _in_multiply(change: Callable[[Product, Any, Any, Any, torch.dtype, Any], torch.Tensor]) -> Plant:
    """Return what replaces the products of a site in the job's own backend."""

    def plant(site: Site) -> None:
        def of_backend(backend: Any) -> None:
            multiply = backend.multiply

            def faulty(gemm: Any, a: Any, b: Any, dtype: torch.dtype, out: Any = None) -> torch.Tensor:
                if _running(site) and site.hits(gemm.value) and not _is_plain(a):
                    return change(multiply, gemm, a, b, dtype, out)
                return multiply(gemm, a, b, dtype, out)

            backend.multiply = faulty

        _changes.append(of_backend)

    return plant


def _in_quantize(change: Callable[[torch.Tensor, Any, Callable[..., Any]], Any], operand: str) -> Plant:
    """Return what replaces the quantisation of an operand of a site in the job's own backend."""

    def plant(site: Site) -> None:
        def of_backend(backend: Any) -> None:
            quantize = backend.quantize

            def faulty(x: torch.Tensor, spec: Any, cached: Any = None) -> Any:
                formats = {getattr(fmt, "value", None) for fmt in spec.formats} - {None, "bf16"}
                if formats and cached is None and _running(site) and operand == _operand_of(spec):
                    return change(x, spec, quantize)
                return quantize(x, spec, cached)

            backend.quantize = faulty

        _changes.append(of_backend)

    return plant


def _in_result(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Return what changes the products of a site in the job's own backend."""

    def multiply_wrongly(
        multiply: Product, gemm: Any, a: Any, b: Any, dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        y = change(multiply(gemm, a, b, dtype))
        return y if out is None else out.add_(y.to(out.dtype))

    return _in_multiply(multiply_wrongly)


def _drop_rows(y: torch.Tensor) -> torch.Tensor:
    """A kernel leaves out the last rows, which fill no whole tile."""
    y[-max(1, len(y) % 128 or 16) :] = 0
    return y


def _repeat_columns(y: torch.Tensor) -> torch.Tensor:
    """A kernel repeats a block of columns where the next one should be."""
    width = min(64, y.shape[1] // 2)
    y[:, -width:] = y[:, -2 * width : -width].clone()
    return y


def _one_nan(y: torch.Tensor) -> torch.Tensor:
    """A kernel reads one number beyond its memory."""
    y[len(y) // 2, y.shape[1] // 3] = torch.nan
    return y


def _halve_depth(y: torch.Tensor) -> torch.Tensor:
    """A split along the reduction adds one of its parts twice, which makes some tiles of the result too large."""
    y[:64, :64] *= 1.25
    return y


def _overwrite(multiply: Product, gemm: Any, a: Any, b: Any, dtype: torch.dtype, out: Any) -> torch.Tensor:
    """A weight gradient overwrites that of earlier microbatches."""
    return multiply(gemm, a, b, dtype, None if out is None else out.zero_())


def _in_scales(change: Callable[[torch.Tensor], torch.Tensor], operand: str) -> Plant:
    """Return what changes the scales of an operand of a site."""

    def quantize_wrongly(x: torch.Tensor, spec: Any, quantize: Callable[..., Any]) -> Any:
        def changed(side: Any) -> Any:
            scale = getattr(side, "scale", None)
            return side if scale is None else side._replace(scale=change(scale.clone()))

        return tuple(changed(side) for side in quantize(x, spec))

    return _in_quantize(quantize_wrongly, operand)


def _transpose(scale: torch.Tensor) -> torch.Tensor:
    """The scales of tiles are read in the order of columns instead of rows."""
    return scale if scale.dim() != 2 or 1 in scale.shape else scale.copy_(scale.t().clone().reshape(scale.shape))


def _double_first(scale: torch.Tensor) -> torch.Tensor:
    """One scale is off by a factor of two."""
    scale[(0,) * scale.dim()] *= 2
    return scale


def _wrong_axis(x: torch.Tensor, spec: Any, quantize: Callable[..., Any]) -> Any:
    """Tiles run along the dimension that the GEMM does not reduce over."""
    from snip_megatron.numerics.quantize.reference import fake_quantize

    sides = []
    for side, fmt in enumerate(spec.formats):
        turned = x if fmt is None else fake_quantize(x, "fp8", axis=side).to(x.dtype)
        sides.append(quantize(turned, spec)[side])
    return tuple(sides)


def _in_weight_cache(change: Callable[[Site, torch.Tensor], None]) -> Plant:
    """Return what lets the job's cache quantise weights of a site that were changed, and are as before afterwards."""

    def plant(site: Site) -> None:
        from snip_megatron.layers.weights import WeightCache

        get = WeightCache.get

        def get_wrongly(
            cache: Any, backend: Any, weights: Sequence[torch.Tensor], formats: Any, quantize: Callable[[], Any]
        ) -> Any:
            is_job = getattr(backend, "inner", backend) in _job_backends and {f.value for f in formats} != {"bf16"}
            if not is_job or not _running(site):
                return get(cache, backend, weights, formats, quantize)
            before = [weight.detach().clone() for weight in weights]
            for weight in weights:
                change(site, weight.data)
            pair = get(cache, backend, weights, formats, quantize)
            for weight, values in zip(weights, before, strict=True):
                weight.data.copy_(values)
            return pair

        WeightCache.get = get_wrongly  # type: ignore[method-assign]

    return plant


def _step_back(site: Site, weight: torch.Tensor) -> None:
    """A weight is that of an earlier step: each number is a learning rate away."""
    generator = torch.Generator().manual_seed(site.seed)
    signs = torch.randint(0, 2, weight.shape, generator=generator).to(weight.device) * 2 - 1
    weight.add_(1e-3 * signs)


def _take_neighbour(site: Site, weight: torch.Tensor) -> None:
    """An expert multiplies the weight of its neighbour, for which other rows of its own stand."""
    weight.copy_(weight.roll(1, 0))


# -- further faults of the job's backend, which no limit was set on ----------------------------------------------------
def _shift(scale: torch.Tensor) -> torch.Tensor:
    """The scales of tiles are read from one row further on."""
    return scale.roll(1, 0)


def _nan_tile(scale: torch.Tensor) -> torch.Tensor:
    """The scale of the last tile is NaN."""
    scale[(-1,) * scale.dim()] = torch.nan
    return scale


def _saturated(x: torch.Tensor, spec: Any, quantize: Callable[..., Any]) -> Any:
    """A scale leaves room for a quarter of the largest numbers."""
    limit = x.abs().max() / 4
    return quantize(torch.minimum(torch.maximum(x, -limit), limit), spec)


def _truncated(x: torch.Tensor, spec: Any, quantize: Callable[..., Any]) -> Any:
    """Numbers are rounded towards zero, so that they are half a step too small on average."""
    return quantize(x * (1 - 2.0**-5), spec)


def _second_dropped(multiply: Product, gemm: Any, a: Any, b: Any, dtype: torch.dtype, out: Any) -> torch.Tensor:
    """The weight gradient of a microbatch is not added to that of the earlier ones."""
    if out is not None and bool(out.any()):
        return out  # type: ignore[no-any-return]
    return multiply(gemm, a, b, dtype, out)


def _late_read() -> Callable[..., torch.Tensor]:
    """A kernel reads the first rows of an operand before those of the microbatch have been written."""
    earlier: list[Any] = []

    def change(multiply: Product, gemm: Any, a: Any, b: Any, dtype: torch.dtype, out: Any) -> torch.Tensor:
        y = multiply(gemm, a, b, dtype, out)
        rows = len(y) // 8
        before, earlier[:] = list(earlier), [y[:rows].clone()]
        if before:
            y[:rows] = before[0]
        return y

    return change


def _stock_rows(site: Site) -> None:
    """Megatron's own product of a linear in bf16 leaves out the last rows."""
    from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication as Stock

    forward, weights = Stock.forward, list[torch.Tensor]()
    on_load(lambda loaded: weights.append(loaded.parameters[f"{site.linear}.weight"]), main=False)

    def faulty(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        y: torch.Tensor = forward(ctx, x, weight, *others)
        if weights and weight is weights[0]:
            y[-2:] = 0
        return y

    Stock.forward = staticmethod(faulty)


def _added_twice(site: Site) -> None:
    """The output of a row-parallel linear is summed over ranks twice."""
    runs = _while_module_runs(site)

    def twice(collective: Callable[..., Any], tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        work = collective(tensor, *arguments, **options)
        return collective(tensor, *arguments, **options) if runs() else work

    _replace_collective("all_reduce", twice)


def _broken_attention(site: Site) -> None:
    """Attention leaves out the last head, in any format."""

    def cut(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., -(output.shape[-1] // 8) :] = 0
        return output

    def change(loaded: Loaded) -> None:
        loaded.modules["decoder.layers.1.self_attention.core_attention"].register_forward_hook(cut)

    on_load(change, main=False)


# -- faults of rounding, in the reference and in kernels -------------------------------------------------------------
def _of_spec(change: Callable[[Site, str, Any], Any]) -> Plant:
    """Return what changes how operands of a site are quantised, by all backends."""

    def plant(site: Site) -> None:
        from snip_megatron.layers.context import LinearHandle

        spec_of = LinearHandle.spec

        def spec(handle: Any, name: str, *arguments: Any, **options: Any) -> Any:
            result = spec_of(handle, name, *arguments, **options)
            if handle.name != site.linear or not site.here:
                return result
            return change(site, name, result)

        LinearHandle.spec = spec  # type: ignore[method-assign]

    return plant


def _e5m2(site: Site, name: str, spec: Any) -> Any:
    """X and G of a GEMM are cast to E5M2 without a scale: two bits of mantissa are left, and small numbers vanish.

    W stays, whose two operands may be one.
    """
    from snip_megatron.numerics.quantize.operands import OperandSpec

    class Coarse(OperandSpec):
        def quantizer_arguments(self, x: torch.Tensor, axis: int) -> Any:
            if name != "w" and any(
                site.hits(gemm) and name in OPERANDS[gemm] and ROWWISE.get((gemm, name), False) == (axis == 1)
                for gemm in GEMMS
            ):
                x = x.to(torch.float8_e5m2).to(x.dtype)
            return super().quantizer_arguments(x, axis)

    return Coarse(*spec)


def _flushed(site: Site, name: str, spec: Any) -> Any:
    """Gradients below a hundredth of the largest one vanish."""
    from snip_megatron.numerics.quantize.operands import OperandSpec

    class Flushed(OperandSpec):
        def quantizer_arguments(self, x: torch.Tensor, axis: int) -> Any:
            if any(site.hits(gemm) and ROWWISE.get((gemm, "g"), False) == (axis == 1) for gemm in ("dgrad", "wgrad")):
                x = torch.where(x.abs() < x.abs().max() / 100, torch.zeros_like(x), x)
            return super().quantizer_arguments(x, axis)

    return Flushed(*spec) if name == "g" else spec


def _to_nearest(site: Site, name: str, spec: Any) -> Any:
    """Gradients in a four-bit format lose their stochastic rounding."""
    return spec._replace(keys=None) if name == "g" else spec


def _stale_amax(operand: str, factor: float) -> Plant:
    """The scale of a whole tensor is that of a step in which it was ``factor`` times as large."""

    def change(site: Site, name: str, spec: Any) -> Any:
        if name != operand or spec.amax is None:
            return spec
        return spec._replace(amax=spec.amax * factor)

    def plant(site: Site) -> None:
        from snip_megatron.layers.context import WHOLE_TENSOR, LinearHandle, amax_of

        shared = LinearHandle.shared_amax

        def shared_amax(handle: Any, name: str, x: torch.Tensor, formats: Any) -> Any:
            amax, formats = shared(handle, name, x, tuple(formats)), tuple(formats)
            if amax is None and handle.name == site.linear and not WHOLE_TENSOR.isdisjoint(formats):
                amax = amax_of(x)
            return amax

        LinearHandle.shared_amax = shared_amax  # type: ignore[method-assign]
        _of_spec(change)(site)

    return plant


# -- faults of parameters --------------------------------------------------------------------------------------------
class Loaded(NamedTuple):
    """Parameters and modules of the loaded model by name."""

    parameters: Mapping[str, torch.nn.Parameter]
    modules: Mapping[str, torch.nn.Module]


def on_load(change: Callable[[Loaded], None], *, main: bool = True) -> None:
    """Call ``change`` when the checkpoint has been loaded.

    With ``main`` the optimizer's parameters are set to the changed ones.
    """
    from megatron.training import training

    load = training.load_checkpoint

    def by_name[T](pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
        return {name.removeprefix("module.").removeprefix("module."): each for name, each in pairs}

    def load_and_change(model: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        result = load(model, optimizer, *arguments, **options)
        parameters = by_name(pair for chunk in model for pair in chunk.named_parameters())
        modules = by_name(pair for chunk in model for pair in chunk.named_modules())
        with torch.no_grad():
            change(Loaded(parameters, modules))
        if main:
            optimizer.reload_model_params()
        return result

    training.load_checkpoint = load_and_change


def _in_weight(change: Callable[[Site, torch.Tensor], Any], *, main: bool = False) -> Plant:
    """Return what changes the weight of a site on its rank."""

    def plant(site: Site) -> None:
        def change_here(loaded: Loaded) -> None:
            if site.here:
                change(site, loaded.parameters[f"{site.linear}.weight"].data)

        on_load(change_here, main=main)

    return plant


def _norm_of(linear: str) -> str:
    layer, _, path = linear.removeprefix("decoder.layers.").partition(".")
    norm = "input_layernorm" if path.startswith("self_attention") else "pre_mlp_layernorm"
    return f"decoder.layers.{layer}.{norm}.weight"


def _norm_and_weight(loaded: Loaded, linear: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of the norm before a linear and that of the linear, of Megatron's or Transformer Engine's."""
    parameters = loaded.parameters
    norm = parameters.get(f"{linear}.layer_norm_weight")
    return (parameters[_norm_of(linear)] if norm is None else norm).data, parameters[f"{linear}.weight"].data


def _outlier_channel(exponent: int) -> Plant:
    """A channel of X is 2^exponent times as large, and its weights as much smaller: in bf16 the same function."""

    def plant(site: Site) -> None:
        def change(loaded: Loaded) -> None:
            norm, weight = _norm_and_weight(loaded, site.linear)
            channels = random.Random(site.seed).sample(range(len(norm)), max(2, len(norm) // 128))
            norm[channels] *= 2.0**exponent
            weight[:, channels] *= 2.0**-exponent

        on_load(change)

    return plant


def _huge_tiles(exponent: int) -> Plant:
    """One weight in each block is huge, in a channel that the norm has switched off."""

    def plant(site: Site) -> None:
        def change(loaded: Loaded) -> None:
            norm, weight = _norm_and_weight(loaded, site.linear)
            generator = random.Random(site.seed)
            for first in range(0, len(norm), 128):
                channel = min(first + generator.randrange(128), len(norm) - 1)
                norm[channel] = 0
                weight[::128, channel] = 2.0**exponent

        on_load(change)

    return plant


def _gather_late(site: Site, weight: torch.Tensor) -> None:
    """Part of a weight is that of the step before: the gather of parameters had not ended."""
    _step_back(site, weight[-len(weight) // 4 :])


def _transpose_shard(site: Site, weight: torch.Tensor) -> None:
    """A rank reads its shard of a weight in the order of columns."""
    weight.copy_(weight.t().reshape(weight.shape).clone())


_late_gather = _in_weight(_gather_late)
_transposed_shard = _in_weight(_transpose_shard)
_stale_norm = _in_weight(lambda site, weight: weight.mul_(0.97))
"""The gathered weight of a norm is that of an earlier step."""
_unequal_replicas = _in_weight(lambda site, weight: weight.mul_(1.25), main=True)
"""A parameter that all ranks hold has drifted on one."""


def _large_weights(site: Site) -> None:
    """The weights have grown under a learning rate that is too high: the loss is high in bf16 too."""

    def change(loaded: Loaded) -> None:
        for name, parameter in loaded.parameters.items():
            if "linear" in name and parameter.dim() == 2:
                parameter.data.mul_(2.0)

    on_load(change)


def _broken_norm(site: Site) -> None:
    """A weight is NaN, so that bf16 is too."""

    def change(loaded: Loaded) -> None:
        loaded.parameters["decoder.final_layernorm.weight"].data[7] = torch.nan

    on_load(change)


def _noise_for_text(site: Site) -> None:
    """A shard of the text is damaged: its tokens are random."""
    from snip_megatron.megatron import entry

    get = entry.get_batch

    def get_batch(args: Any, data_iterator: Any, **options: Any) -> Any:
        batch = get(args, data_iterator, **options)
        for name in ("tokens", "labels"):
            if batch.get(name) is not None:
                generator = torch.Generator().manual_seed(site.seed)
                drawn = torch.randint(0, 255, batch[name].shape, generator=generator)
                batch[name] = drawn.to(batch[name].device)
        return batch

    entry.get_batch = get_batch


# -- faults of communication -----------------------------------------------------------------------------------------
def _while_module_runs(site: Site) -> Callable[[], bool]:
    """Return a function that says whether the forward of the site's module runs on this rank."""
    inside: list[int] = [0]

    def enter(*_: Any) -> None:
        inside[0] += 1

    def leave(*_: Any) -> None:
        inside[0] -= 1

    def change(loaded: Loaded) -> None:
        if site.linear in loaded.modules:
            loaded.modules[site.linear].register_forward_pre_hook(enter)
            loaded.modules[site.linear].register_forward_hook(leave)

    on_load(change, main=False)
    return lambda: inside[0] > 0


def _replace_collective(name: str, faulty: Callable[..., Any]) -> None:
    """Let Megatron call ``faulty`` in place of a collective, which is its first argument."""
    from megatron.core.tensor_parallel import layers, mappings

    replacement = partial(faulty, getattr(dist, name))
    setattr(dist, name, replacement)
    for module in (layers, mappings):  # which have names of their own
        for alias in ("dist_all_gather_func", "dist_reduce_scatter_func"):
            if getattr(module, alias, None) is replacement.args[0]:
                setattr(module, alias, replacement)


def _lost_shard(site: Site, *, backward: bool = False) -> None:
    """A rank's part is missing in the sum of a row-parallel linear, or of a column-parallel one in the backward."""
    forward_runs = _while_module_runs(site)

    def is_lost() -> bool:
        backward_runs = bool(_now and not _now[-1].is_forward and _running(site))
        return site.here and (backward_runs if backward else forward_runs())

    def reduce(collective: Callable[..., Any], tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return collective(tensor.zero_() if is_lost() else tensor, *arguments, **options)

    def scatter(
        collective: Callable[..., Any], out: torch.Tensor, tensor: torch.Tensor, *arguments: Any, **options: Any
    ) -> Any:
        return collective(out, torch.zeros_like(tensor) if is_lost() else tensor, *arguments, **options)

    _replace_collective("all_reduce", reduce)
    _replace_collective("reduce_scatter_tensor", scatter)


_lost_gradient = partial(_lost_shard, backward=True)


def _racing_gather(site: Site) -> None:
    """A GEMM reads the gathered tokens before those of the last rank have arrived."""
    runs = _while_module_runs(site)

    def gather(
        collective: Callable[..., Any], out: torch.Tensor, tensor: torch.Tensor, *arguments: Any, **options: Any
    ) -> Any:
        work = collective(out, tensor, *arguments, **options)
        if runs() and site.here:
            if work is not None:
                work.wait()
            out[-len(tensor) // 2 :] = 0
        return work

    _replace_collective("all_gather_into_tensor", gather)


def _wrong_offset(site: Site) -> None:
    """The first row of an expert is given to the expert before it."""

    def shift(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, counts, *others = arguments
        counts = counts.clone() if isinstance(counts, torch.Tensor) else list(counts)
        expert = site.expert or 0
        if int(counts[expert + 1]) > 0:
            moved = max(1, int(counts[expert + 1]) // 8)
            counts[expert] += moved
            counts[expert + 1] -= moved
        return rows, counts, *others

    on_load(lambda loaded: loaded.modules[site.linear].register_forward_pre_hook(shift), main=False)


# -- the catalogue ---------------------------------------------------------------------------------------------------
ALL = "*"


@dataclass
class Catalogue:
    """Draws the sites of the cases.

    ``layers`` is the number of layers of the dense model, ``expert_layers`` and ``experts`` are those of the mixture,
    whose first layer is dense.
    """

    layers: int
    seed: int
    expert_layers: int = 4
    experts: int = 8
    cases: list[Case] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._linears = cycle(self._draw.sample(LINEARS, len(LINEARS)))
        self._gemms = cycle(self._draw.sample(GEMMS, len(GEMMS)))
        self._on_gpu = False

    def site(self, linears: Sequence[str] = LINEARS, gemm: str | None = None, rank: int | None = None) -> Site:
        path = next(path for path in self._linears if path in linears)
        layer = self._draw.randrange(self.layers)
        return Site(f"decoder.layers.{layer}.{path}", gemm, rank=rank, seed=self._draw.randrange(2**31))

    def site_of(self, operand: str, gemm: str | None = None) -> Site:
        """Draw a linear whose ``operand`` ("x", "w", "g") is quantised by the backend's own function.

        On a GPU, SwiGLU's kernels quantise the input of fc2 and the gradient of fc1, which no plant reaches.
        """
        fused = {"x": "mlp.linear_fc2", "g": "mlp.linear_fc1"}.get(operand) if self._on_gpu else None
        return self.site([path for path in LINEARS if path != fused], gemm)

    def _names(self) -> list[str]:
        return [f"decoder.layers.{layer}.{path}" for layer in range(self.layers) for path in LINEARS]

    def add(
        self, family: str, verdict: str, site: Site | None, plant: Plant | None, base: str = "fp8", **more: Any
    ) -> None:
        formats = {ALL: base, **more.pop("formats", {})}
        more.setdefault("gemms", GEMMS if site is None or site.gemm is None else (site.gemm,))
        same = [case.site for case in self.cases if case.family == family and case.site is not None]
        again = 0 if site is None else sum((each.linear, each.gemm) == (site.linear, site.gemm) for each in same)
        self.cases.append(Case(family, verdict, site, formats, plant, again=again, **more))

    def build(self, *, ranks: bool, experts: bool) -> list[Case]:
        """Return the cases: with several ranks and with experts only if the machine has them."""
        self._on_gpu = not ranks
        self._rounding()
        self._bugs()
        if ranks:
            self._bugs_of_ranks()
        if experts:
            self._bugs_of_experts()
        self._healthy(ranks=ranks, experts=experts)
        seen = len(self.cases)
        self._unseen(ranks=ranks, experts=experts)
        cases = self.cases[:seen] + [replace(case, unseen=True) for case in self.cases[seen:]]
        # Kernels of a GPU do not call the quantiser of torch that these change.
        return cases if ranks else [case for case in cases if case.family not in ("e5m2-g", "e5m2-x", "flushed")]

    def _rounding(self) -> None:
        reads = ("self_attention.linear_qkv", "mlp.linear_fc1")
        for gemm in (None, None, None, "fprop", "fprop", "wgrad", "dgrad"):
            site = self.site(gemm=gemm)
            self.add("fp4", ROUNDING, site, None, formats={_pattern(site): "fp4"})
        for gemm in ("dgrad", "wgrad", None, None):
            site = self.site_of("g", gemm)
            formats = {f"{site.linear}:{each}": "fp4" for each in ("dgrad", "wgrad") if site.hits(each)}
            gemms = [each for each in ("dgrad", "wgrad") if site.hits(each)]
            self.add("nearest", ROUNDING, site, _of_spec(_to_nearest), formats=formats, gemms=gemms)
        for gemm in ("dgrad", "wgrad", "dgrad"):
            self.add("e5m2-g", ROUNDING, self.site(gemm=gemm), _of_spec(_e5m2))
        for gemm in ("fprop", None):
            self.add("e5m2-x", ROUNDING, self.site(gemm=gemm), _of_spec(_e5m2))
        for base in ("fp8_tensor", "fp8_tensor", "fp8", "fp8"):
            self.add("outlier-channel", ROUNDING, self.site(reads), _outlier_channel(19), base=base)
        for base in ("fp8_tensor", "fp8_tensor", "fp8"):
            self.add("huge-tile", ROUNDING, self.site(reads), _huge_tiles(15), base=base)
        for operand in ("g", "x"):
            gemms = [gemm for gemm in GEMMS if operand in OPERANDS[gemm]]
            plant = _stale_amax(operand, 2.0**-5)
            self.add(f"clipped-{operand}", ROUNDING, self.site_of(operand), plant, base="fp8_tensor", gemms=gemms)
        for operand in ("g", "g", "g", "x", "x", "w", "w"):
            gemms = [gemm for gemm in GEMMS if operand in OPERANDS[gemm]]
            plant = _stale_amax(operand, 2.0**16)
            self.add(f"stale-amax-{operand}", ROUNDING, self.site_of(operand), plant, base="fp8_tensor", gemms=gemms)

    def _bugs(self) -> None:
        for _ in range(4):
            self.add("stale-weight", BUG, self.site(), _in_weight_cache(_step_back), gemms=("fprop", "dgrad"))
        for operand, gemms in (("x", ("fprop", "wgrad")), ("w", ("fprop", "dgrad")), ("g", ("dgrad", "wgrad"))):
            self.add("transposed-scale", BUG, self.site_of(operand), _in_scales(_transpose, operand), gemms=gemms)
            self.add("wrong-axis", BUG, self.site_of(operand), _in_quantize(_wrong_axis, operand), gemms=gemms)
            self.add("wrong-scale", BUG, self.site_of(operand), _in_scales(_double_first, operand), gemms=gemms)
        for gemm in GEMMS:
            self.add("dropped-rows", BUG, self.site(gemm=gemm), _in_result(_drop_rows))
            self.add("repeated-columns", BUG, self.site(gemm=gemm), _in_result(_repeat_columns))
        for gemm in ("fprop", "wgrad"):
            self.add("one-nan", BUG, self.site(gemm=gemm), _in_result(_one_nan))
        self.add("split-twice", BUG, self.site(gemm="fprop"), _in_result(_halve_depth), base="fp8_tensor")
        self.add("split-twice", BUG, self.site(gemm="wgrad"), _in_result(_halve_depth))
        self.add("overwritten", BUG, self.site(gemm="wgrad"), _in_multiply(_overwrite), microbatches=2)
        self.add("late-gather", BUG, self.site(), _late_gather, gemms=())

    def _bugs_of_ranks(self) -> None:
        rows = ("self_attention.linear_proj", "mlp.linear_fc2")
        columns = ("self_attention.linear_qkv", "mlp.linear_fc1")
        for layout in ("tp", "tp", "sp"):
            self.add("lost-shard", BUG, self.site(rows, rank=1), _lost_shard, layout=layout, gemms=())
        for _ in range(3):
            self.add("racing-gather", BUG, self.site(columns, rank=1), _racing_gather, layout="sp", gemms=())
        for layout in ("tp", "sp"):
            self.add("lost-gradient", BUG, self.site(columns, rank=1), _lost_gradient, layout=layout, gemms=("dgrad",))
        self.add("rows-on-a-rank", BUG, self.site(gemm="fprop", rank=1), _in_result(_drop_rows), layout="tp")
        self.add("late-gather", BUG, self.site(rank=1), _late_gather, layout="tp", gemms=())
        site = self.site(columns, rank=1)
        norm = Site(_norm_of(site.linear).removesuffix(".weight"), rank=1, seed=site.seed)
        self.add("unequal-norm", BUG, norm, _unequal_replicas, layout="tp", gemms=())
        self.add("unequal-weight", BUG, self.site(rank=1), _unequal_replicas, layout="dp", gemms=())

    def _bugs_of_experts(self) -> None:
        for _ in range(3):
            layer, expert = self._draw.randrange(1, self.expert_layers), self._draw.randrange(self.experts - 1)
            name = f"decoder.layers.{layer}.mlp.experts"
            site = Site(name, expert=expert, seed=self._draw.randrange(2**31))
            linears = (f"{name}.linear_fc1", f"{name}.linear_fc2")
            self.add("wrong-offset", BUG, site, _wrong_offset, layout="experts", gemms=(), linears=linears)

    def _healthy(self, *, ranks: bool, experts: bool) -> None:
        bases = ["fp8", "fp8_tensor", "mxfp8", "fp8", "fp8_tensor", "fp8", "fp8_tensor", "mxfp8"]
        for step, base in enumerate(bases):
            self.add(f"healthy-{base}", HEALTHY, None, None, base=base, step=step)
        for step in range(4):
            formats = {linear: self._draw.choice(("fp8", "fp8_tensor", "bf16")) for linear in self._names()}
            self.add("healthy-mixed", HEALTHY, None, None, formats=formats, step=step)
        self.add("healthy-bf16", HEALTHY, None, None, base="bf16")
        backward = {f"{linear}:{gemm}": "fp4" for linear in self._names() for gemm in GEMMS[1:]}
        self.add("healthy-fp4-backward", HEALTHY, None, None, formats=backward)
        half = len(self._names()) // 2  # a single GEMM in four bits would be a fault
        some = {f"{linear}:{gemm}": "fp4" for gemm in GEMMS for linear in self._draw.sample(self._names(), half)}
        self.add("healthy-fp4-some", HEALTHY, None, None, formats=some)
        self.add("healthy-microbatches", HEALTHY, None, None, microbatches=2)
        layouts = (("tp", "sp", "dp") if ranks else ()) + (("experts",) if experts else ())
        for layout in layouts or ("one",):
            self.add("healthy-fp8", HEALTHY, None, None, layout=layout, step=9)
            self.add("healthy-fp8_tensor", HEALTHY, None, None, base="fp8_tensor", layout=layout, step=10)
        anywhere = partial(Site, "decoder", seed=self._draw.randrange(2**31))
        self.add("noise-for-text", HEALTHY, anywhere(), _noise_for_text, gemms=())
        self.add("large-weights", HEALTHY, anywhere(), _large_weights, gemms=())
        self.add("nan-in-bf16", HEALTHY, anywhere(), _broken_norm, gemms=())

    def _unseen(self, *, ranks: bool, experts: bool) -> None:
        x, w, g = ("fprop", "wgrad"), ("fprop", "dgrad"), ("dgrad", "wgrad")
        for operand, gemms in (("x", x), ("w", w)):
            self.add("shifted-scale", BUG, self.site_of(operand), _in_scales(_shift, operand), gemms=gemms)
        self.add("nan-tile", BUG, self.site_of("g"), _in_scales(_nan_tile, "g"), gemms=g)
        self.add("saturated", BUG, self.site_of("x"), _in_quantize(_saturated, "x"), gemms=x)
        self.add("truncated", BUG, self.site(), _in_quantize(_truncated, "w"), gemms=w)
        self.add("truncated", BUG, self.site_of("g"), _in_quantize(_truncated, "g"), gemms=g, base="fp8_tensor")
        site = self.site(gemm="wgrad")
        self.add("dropped-microbatch", BUG, site, _in_multiply(_second_dropped), microbatches=2)
        self.add("late-read", BUG, self.site(gemm="fprop"), _in_multiply(_late_read()), microbatches=2)
        site = self.site(gemm="fprop")
        self.add("stock-rows", BUG, site, _stock_rows, formats={site.linear: "bf16"})
        for gemm in ("dgrad", "wgrad"):
            self.add("flushed", ROUNDING, self.site(gemm=gemm), _of_spec(_flushed))
        plant = _stale_amax("w", 2.0**-4)
        self.add("clipped-w", ROUNDING, self.site(), plant, base="fp8_tensor", gemms=w)
        anywhere = Site("decoder", seed=self._draw.randrange(2**31))
        self.add("broken-attention", HEALTHY, anywhere, _broken_attention, gemms=())
        if ranks:
            rows, columns = ("self_attention.linear_proj", "mlp.linear_fc2"), ("mlp.linear_fc1",)
            self.add("transposed-shard", BUG, self.site(rank=1), _transposed_shard, layout="tp", gemms=())
            self.add("added-twice", BUG, self.site(rows), _added_twice, layout="tp", gemms=())
            norm = Site(_norm_of(self.site(columns).linear).removesuffix(".weight"), rank=1)
            self.add("stale-norm", BUG, norm, _stale_norm, layout="dp", gemms=())
        if experts:
            layer, expert = self._draw.randrange(1, self.expert_layers), self._draw.randrange(self.experts - 1)
            name = f"decoder.layers.{layer}.mlp.experts"
            linears = (f"{name}.linear_fc1", f"{name}.linear_fc2")
            site = Site(name, expert=expert)
            plant = _in_weight_cache(_take_neighbour)
            self.add("swapped-experts", BUG, site, plant, layout="experts", gemms=w, linears=linears)


def _pattern(site: Site) -> str:
    return site.linear if site.gemm is None else f"{site.linear}:{site.gemm}"


def choices(case: Case, names: Sequence[str]) -> dict[str, str]:
    """Return the map of a case: GEMM → format, for the linears of the model."""
    format_of: dict[str, str] = {}
    for key in _keys(names):
        for pattern, fmt in case.formats.items():
            if pattern in (ALL, key, key.rpartition(":")[0]):
                format_of[key] = fmt
    return format_of


def _keys(names: Sequence[str]) -> Iterator[str]:
    return (f"{name}:{gemm}" for name in names for gemm in GEMMS)
