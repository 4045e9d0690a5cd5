"""Planted bugs: in kernels, quantisers and caches of the job's backend, in parameters, and in what ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.quality.blame_sites import (
    Loaded,
    Plant,
    Site,
    backend_changes,
    job_backends,
    on_load,
    running,
    runs_at,
)


# -- products, quantisers and the weight cache of the job's backend ---------------------------------------------------
def _operand_of(spec: Any) -> str:
    """Return which matrix of the running linear is quantised."""
    return "w" if spec.weight else "x" if running[-1].is_forward else "g"


def _is_plain(operand: Any) -> bool:
    """Whether an operand is one of a GEMM in bf16."""
    return getattr(getattr(operand, "format", None), "value", None) == "bf16"


Product = Callable[..., torch.Tensor]


def in_multiply(change: Callable[[Product, Any, Any, Any, torch.dtype, Any], torch.Tensor]) -> Plant:
    """Return what replaces the products of a site in the job's own backend."""

    def plant(site: Site) -> None:
        def of_backend(backend: Any) -> None:
            multiply = backend.multiply

            def faulty(gemm: Any, a: Any, b: Any, dtype: torch.dtype, out: Any = None) -> torch.Tensor:
                if runs_at(site) and site.hits(gemm.value) and not _is_plain(a):
                    return change(multiply, gemm, a, b, dtype, out)
                return multiply(gemm, a, b, dtype, out)

            backend.multiply = faulty

        backend_changes.append(of_backend)

    return plant


def in_quantize(change: Callable[[torch.Tensor, Any, Callable[..., Any]], Any], operand: str) -> Plant:
    """Return what replaces the quantisation of an operand of a site in the job's own backend."""

    def plant(site: Site) -> None:
        def of_backend(backend: Any) -> None:
            quantize = backend.quantize

            def faulty(x: torch.Tensor, spec: Any, cached: Any = None) -> Any:
                formats = {getattr(fmt, "value", None) for fmt in spec.formats} - {None, "bf16"}
                if formats and cached is None and runs_at(site) and operand == _operand_of(spec):
                    return change(x, spec, quantize)
                return quantize(x, spec, cached)

            backend.quantize = faulty

        backend_changes.append(of_backend)

    return plant


def in_result(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Return what changes the products of a site in the job's own backend."""

    def multiply_wrongly(
        multiply: Product, gemm: Any, a: Any, b: Any, dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        y = change(multiply(gemm, a, b, dtype))
        return y if out is None else out.add_(y.to(out.dtype))

    return in_multiply(multiply_wrongly)


def drop_rows(y: torch.Tensor) -> torch.Tensor:
    """A kernel leaves out the last rows, which fill no whole tile."""
    y[-max(1, len(y) % 128 or 16) :] = 0
    return y


def repeat_columns(y: torch.Tensor) -> torch.Tensor:
    """A kernel repeats a block of columns where the next one should be."""
    width = min(64, y.shape[1] // 2)
    y[:, -width:] = y[:, -2 * width : -width].clone()
    return y


def one_nan(y: torch.Tensor) -> torch.Tensor:
    """A kernel reads one number beyond its memory."""
    y[len(y) // 2, y.shape[1] // 3] = torch.nan
    return y


def halve_depth(y: torch.Tensor) -> torch.Tensor:
    """A split along the reduction adds one of its parts twice, which makes some tiles of the result too large."""
    y[:64, :64] *= 1.25
    return y


def overwrite(multiply: Product, gemm: Any, a: Any, b: Any, dtype: torch.dtype, out: Any) -> torch.Tensor:
    """A weight gradient overwrites that of earlier microbatches."""
    return multiply(gemm, a, b, dtype, None if out is None else out.zero_())


def in_scales(change: Callable[[torch.Tensor], torch.Tensor], operand: str) -> Plant:
    """Return what changes the scales of an operand of a site."""

    def quantize_wrongly(x: torch.Tensor, spec: Any, quantize: Callable[..., Any]) -> Any:
        def changed(side: Any) -> Any:
            scale = getattr(side, "scale", None)
            return side if scale is None else side._replace(scale=change(scale.clone()))

        return tuple(changed(side) for side in quantize(x, spec))

    return in_quantize(quantize_wrongly, operand)


def transpose(scale: torch.Tensor) -> torch.Tensor:
    """The scales of tiles are read in the order of columns instead of rows."""
    return scale if scale.dim() != 2 or 1 in scale.shape else scale.copy_(scale.t().clone().reshape(scale.shape))


def double_first(scale: torch.Tensor) -> torch.Tensor:
    """One scale is off by a factor of two."""
    scale[(0,) * scale.dim()] *= 2
    return scale


def wrong_axis(x: torch.Tensor, spec: Any, quantize: Callable[..., Any]) -> Any:
    """Tiles run along the dimension that the GEMM does not reduce over."""
    from snip_megatron.numerics.quantize.reference import fake_quantize

    sides = []
    for side, fmt in enumerate(spec.formats):
        turned = x if fmt is None else fake_quantize(x, "fp8", axis=side).to(x.dtype)
        sides.append(quantize(turned, spec)[side])
    return tuple(sides)


def in_weight_cache(change: Callable[[Site, torch.Tensor], None]) -> Plant:
    """Return what lets the job's cache quantise weights of a site that were changed, and are as before afterwards."""

    def plant(site: Site) -> None:
        from snip_megatron.layers.weights import WeightCache

        get = WeightCache.get

        def get_wrongly(
            cache: Any, backend: Any, weights: Sequence[torch.Tensor], formats: Any, quantize: Callable[[], Any]
        ) -> Any:
            is_job = getattr(backend, "inner", backend) in job_backends and {f.value for f in formats} != {"bf16"}
            if not is_job or not runs_at(site):
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


def step_back(site: Site, weight: torch.Tensor) -> None:
    """A weight is that of an earlier step: each number is a learning rate away."""
    generator = torch.Generator().manual_seed(site.seed)
    signs = torch.randint(0, 2, weight.shape, generator=generator).to(weight.device) * 2 - 1
    weight.add_(1e-3 * signs)


def take_neighbour(site: Site, weight: torch.Tensor) -> None:
    """An expert multiplies the weight of its neighbour, for which other rows of its own stand."""
    weight.copy_(weight.roll(1, 0))


def shift(scale: torch.Tensor) -> torch.Tensor:
    """The scales of tiles are read from one row further on."""
    return scale.roll(1, 0)


def nan_tile(scale: torch.Tensor) -> torch.Tensor:
    """The scale of the last tile is NaN."""
    scale[(-1,) * scale.dim()] = torch.nan
    return scale


def saturated(x: torch.Tensor, spec: Any, quantize: Callable[..., Any]) -> Any:
    """A scale leaves room for a quarter of the largest numbers."""
    limit = x.abs().max() / 4
    return quantize(torch.minimum(torch.maximum(x, -limit), limit), spec)


def truncated(x: torch.Tensor, spec: Any, quantize: Callable[..., Any]) -> Any:
    """Numbers are rounded towards zero, so that they are half a step too small on average."""
    return quantize(x * (1 - 2.0**-5), spec)


def second_dropped(multiply: Product, gemm: Any, a: Any, b: Any, dtype: torch.dtype, out: Any) -> torch.Tensor:
    """The weight gradient of a microbatch is not added to that of the earlier ones."""
    if out is not None and bool(out.any()):
        return out  # type: ignore[no-any-return]
    return multiply(gemm, a, b, dtype, out)


def late_read() -> Callable[..., torch.Tensor]:
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


# -- Megatron's own products, and parameters ---------------------------------------------------------------------------
def stock_rows(site: Site) -> None:
    """Megatron's own product of a linear in bf16 leaves out the last rows."""
    from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication as Stock

    forward, weights = Stock.forward, list[torch.Tensor]()
    on_load(lambda loaded: weights.append(loaded.parameters[f"{site.linear}.weight"]), main=False)

    def faulty(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
        y: torch.Tensor = forward(ctx, x, weight, *arguments)
        if weights and weight is weights[0]:
            y[-2:] = 0
        return y

    Stock.forward = staticmethod(faulty)


def _in_weight(change: Callable[[Site, torch.Tensor], Any], *, main: bool = False) -> Plant:
    """Return what changes the weight of a site on its rank."""

    def plant(site: Site) -> None:
        def change_on_rank(loaded: Loaded) -> None:
            if site.is_here:
                change(site, loaded.parameters[f"{site.linear}.weight"].data)

        on_load(change_on_rank, main=main)

    return plant


def _gather_late(site: Site, weight: torch.Tensor) -> None:
    """Part of a weight is that of the step before: the gather of parameters had not ended."""
    step_back(site, weight[-len(weight) // 4 :])


def _transpose_shard(site: Site, weight: torch.Tensor) -> None:
    """A rank reads its shard of a weight in the order of columns."""
    weight.copy_(weight.t().reshape(weight.shape).clone())


late_gather = _in_weight(_gather_late)
transposed_shard = _in_weight(_transpose_shard)
stale_norm = _in_weight(lambda site, weight: weight.mul_(0.97))
"""The gathered weight of a norm is that of an earlier step."""
unequal_replicas = _in_weight(lambda site, weight: weight.mul_(1.25), main=True)
"""A parameter that all ranks hold has drifted on one."""


# -- communication, and the rows of experts ----------------------------------------------------------------------------
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


def lost_shard(site: Site, *, backward: bool = False) -> None:
    """A rank's part is missing in the sum of a row-parallel linear, or of a column-parallel one in the backward."""
    forward_runs = _while_module_runs(site)

    def is_lost() -> bool:
        backward_runs = bool(running and not running[-1].is_forward and runs_at(site))
        return site.is_here and (backward_runs if backward else forward_runs())

    def reduce(collective: Callable[..., Any], tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return collective(tensor.zero_() if is_lost() else tensor, *arguments, **options)

    def scatter(
        collective: Callable[..., Any], out: torch.Tensor, tensor: torch.Tensor, *arguments: Any, **options: Any
    ) -> Any:
        return collective(out, torch.zeros_like(tensor) if is_lost() else tensor, *arguments, **options)

    _replace_collective("all_reduce", reduce)
    _replace_collective("reduce_scatter_tensor", scatter)


lost_gradient = partial(lost_shard, backward=True)


def added_twice(site: Site) -> None:
    """The output of a row-parallel linear is summed over ranks twice."""
    runs = _while_module_runs(site)

    def twice(collective: Callable[..., Any], tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        work = collective(tensor, *arguments, **options)
        return collective(tensor, *arguments, **options) if runs() else work

    _replace_collective("all_reduce", twice)


def racing_gather(site: Site) -> None:
    """A GEMM reads the gathered tokens before those of the last rank have arrived."""
    runs = _while_module_runs(site)

    def gather(
        collective: Callable[..., Any], out: torch.Tensor, tensor: torch.Tensor, *arguments: Any, **options: Any
    ) -> Any:
        work = collective(out, tensor, *arguments, **options)
        if runs() and site.is_here:
            if work is not None:
                work.wait()
            out[-len(tensor) // 2 :] = 0
        return work

    _replace_collective("all_gather_into_tensor", gather)


def wrong_offset(site: Site) -> None:
    """The first row of an expert is given to the expert before it."""

    def shift(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, counts, *further = arguments
        counts = counts.clone() if isinstance(counts, torch.Tensor) else list(counts)
        expert = site.expert or 0
        if int(counts[expert + 1]) > 0:
            moved = max(1, int(counts[expert + 1]) // 8)
            counts[expert] += moved
            counts[expert + 1] -= moved
        return rows, counts, *further

    on_load(lambda loaded: loaded.modules[site.linear].register_forward_pre_hook(shift), main=False)
