"""The catalogue of :mod:`benchmarks.quality.blame`: which faults are planted where, and healthy steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any

from benchmarks.quality import blame_bugs as bugs
from benchmarks.quality import blame_rounding as rounding
from benchmarks.quality.blame_sites import GEMMS, LINEARS, OPERANDS, Plant, Site, norm_of

BUG, ROUNDING, HEALTHY = "bug", "rounding", "not_precision"


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
        first_unseen = len(self.cases)
        self._unseen(ranks=ranks, experts=experts)
        cases = self.cases[:first_unseen] + [replace(case, unseen=True) for case in self.cases[first_unseen:]]
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
            self.add("nearest", ROUNDING, site, rounding.of_spec(rounding.to_nearest), formats=formats, gemms=gemms)
        for gemm in ("dgrad", "wgrad", "dgrad"):
            self.add("e5m2-g", ROUNDING, self.site(gemm=gemm), rounding.of_spec(rounding.e5m2))
        for gemm in ("fprop", None):
            self.add("e5m2-x", ROUNDING, self.site(gemm=gemm), rounding.of_spec(rounding.e5m2))
        for base in ("fp8_tensor", "fp8_tensor", "fp8", "fp8"):
            self.add("outlier-channel", ROUNDING, self.site(reads), rounding.outlier_channel(19), base=base)
        for base in ("fp8_tensor", "fp8_tensor", "fp8"):
            self.add("huge-tile", ROUNDING, self.site(reads), rounding.huge_tiles(15), base=base)
        for operand in ("g", "x"):
            gemms = [gemm for gemm in GEMMS if operand in OPERANDS[gemm]]
            plant = rounding.stale_amax(operand, 2.0**-5)
            self.add(f"clipped-{operand}", ROUNDING, self.site_of(operand), plant, base="fp8_tensor", gemms=gemms)
        for operand in ("g", "g", "g", "x", "x", "w", "w"):
            gemms = [gemm for gemm in GEMMS if operand in OPERANDS[gemm]]
            plant = rounding.stale_amax(operand, 2.0**16)
            self.add(f"stale-amax-{operand}", ROUNDING, self.site_of(operand), plant, base="fp8_tensor", gemms=gemms)

    def _bugs(self) -> None:
        for _ in range(4):
            self.add("stale-weight", BUG, self.site(), bugs.in_weight_cache(bugs.step_back), gemms=("fprop", "dgrad"))
        for operand, gemms in (("x", ("fprop", "wgrad")), ("w", ("fprop", "dgrad")), ("g", ("dgrad", "wgrad"))):
            plant = bugs.in_scales(bugs.transpose, operand)
            self.add("transposed-scale", BUG, self.site_of(operand), plant, gemms=gemms)
            self.add("wrong-axis", BUG, self.site_of(operand), bugs.in_quantize(bugs.wrong_axis, operand), gemms=gemms)
            self.add("wrong-scale", BUG, self.site_of(operand), bugs.in_scales(bugs.double_first, operand), gemms=gemms)
        for gemm in GEMMS:
            self.add("dropped-rows", BUG, self.site(gemm=gemm), bugs.in_result(bugs.drop_rows))
            self.add("repeated-columns", BUG, self.site(gemm=gemm), bugs.in_result(bugs.repeat_columns))
        for gemm in ("fprop", "wgrad"):
            self.add("one-nan", BUG, self.site(gemm=gemm), bugs.in_result(bugs.one_nan))
        self.add("split-twice", BUG, self.site(gemm="fprop"), bugs.in_result(bugs.halve_depth), base="fp8_tensor")
        self.add("split-twice", BUG, self.site(gemm="wgrad"), bugs.in_result(bugs.halve_depth))
        self.add("overwritten", BUG, self.site(gemm="wgrad"), bugs.in_multiply(bugs.overwrite), microbatches=2)
        self.add("late-gather", BUG, self.site(), bugs.late_gather, gemms=())

    def _bugs_of_ranks(self) -> None:
        rows = ("self_attention.linear_proj", "mlp.linear_fc2")
        columns = ("self_attention.linear_qkv", "mlp.linear_fc1")
        for layout in ("tp", "tp", "sp"):
            self.add("lost-shard", BUG, self.site(rows, rank=1), bugs.lost_shard, layout=layout, gemms=())
        for _ in range(3):
            self.add("racing-gather", BUG, self.site(columns, rank=1), bugs.racing_gather, layout="sp", gemms=())
        for layout in ("tp", "sp"):
            site = self.site(columns, rank=1)
            self.add("lost-gradient", BUG, site, bugs.lost_gradient, layout=layout, gemms=("dgrad",))
        self.add("rows-on-a-rank", BUG, self.site(gemm="fprop", rank=1), bugs.in_result(bugs.drop_rows), layout="tp")
        self.add("late-gather", BUG, self.site(rank=1), bugs.late_gather, layout="tp", gemms=())
        site = self.site(columns, rank=1)
        norm = Site(norm_of(site.linear).removesuffix(".weight"), rank=1, seed=site.seed)
        self.add("unequal-norm", BUG, norm, bugs.unequal_replicas, layout="tp", gemms=())
        self.add("unequal-weight", BUG, self.site(rank=1), bugs.unequal_replicas, layout="dp", gemms=())

    def _bugs_of_experts(self) -> None:
        for _ in range(3):
            layer, expert = self._draw.randrange(1, self.expert_layers), self._draw.randrange(self.experts - 1)
            name = f"decoder.layers.{layer}.mlp.experts"
            site = Site(name, expert=expert, seed=self._draw.randrange(2**31))
            linears = (f"{name}.linear_fc1", f"{name}.linear_fc2")
            self.add("wrong-offset", BUG, site, bugs.wrong_offset, layout="experts", gemms=(), linears=linears)

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
        self.add("noise-for-text", HEALTHY, anywhere(), rounding.noise_for_text, gemms=())
        self.add("large-weights", HEALTHY, anywhere(), rounding.large_weights, gemms=())
        self.add("nan-in-bf16", HEALTHY, anywhere(), rounding.broken_norm, gemms=())

    def _unseen(self, *, ranks: bool, experts: bool) -> None:
        x, w, g = ("fprop", "wgrad"), ("fprop", "dgrad"), ("dgrad", "wgrad")
        for operand, gemms in (("x", x), ("w", w)):
            self.add("shifted-scale", BUG, self.site_of(operand), bugs.in_scales(bugs.shift, operand), gemms=gemms)
        self.add("nan-tile", BUG, self.site_of("g"), bugs.in_scales(bugs.nan_tile, "g"), gemms=g)
        self.add("saturated", BUG, self.site_of("x"), bugs.in_quantize(bugs.saturated, "x"), gemms=x)
        self.add("truncated", BUG, self.site(), bugs.in_quantize(bugs.truncated, "w"), gemms=w)
        self.add("truncated", BUG, self.site_of("g"), bugs.in_quantize(bugs.truncated, "g"), gemms=g, base="fp8_tensor")
        site = self.site(gemm="wgrad")
        self.add("dropped-microbatch", BUG, site, bugs.in_multiply(bugs.second_dropped), microbatches=2)
        self.add("late-read", BUG, self.site(gemm="fprop"), bugs.in_multiply(bugs.late_read()), microbatches=2)
        site = self.site(gemm="fprop")
        self.add("stock-rows", BUG, site, bugs.stock_rows, formats={site.linear: "bf16"})
        for gemm in ("dgrad", "wgrad"):
            self.add("flushed", ROUNDING, self.site(gemm=gemm), rounding.of_spec(rounding.flushed))
        plant = rounding.stale_amax("w", 2.0**-4)
        self.add("clipped-w", ROUNDING, self.site(), plant, base="fp8_tensor", gemms=w)
        anywhere = Site("decoder", seed=self._draw.randrange(2**31))
        self.add("broken-attention", HEALTHY, anywhere, rounding.broken_attention, gemms=())
        if ranks:
            rows, columns = ("self_attention.linear_proj", "mlp.linear_fc2"), ("mlp.linear_fc1",)
            self.add("transposed-shard", BUG, self.site(rank=1), bugs.transposed_shard, layout="tp", gemms=())
            self.add("added-twice", BUG, self.site(rows), bugs.added_twice, layout="tp", gemms=())
            norm = Site(norm_of(self.site(columns).linear).removesuffix(".weight"), rank=1)
            self.add("stale-norm", BUG, norm, bugs.stale_norm, layout="dp", gemms=())
        if experts:
            layer, expert = self._draw.randrange(1, self.expert_layers), self._draw.randrange(self.experts - 1)
            name = f"decoder.layers.{layer}.mlp.experts"
            linears = (f"{name}.linear_fc1", f"{name}.linear_fc2")
            site = Site(name, expert=expert)
            plant = bugs.in_weight_cache(bugs.take_neighbour)
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
