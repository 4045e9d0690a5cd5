"""The statistics table: everything that one update measured, as float64 arrays.

All entries are sums of squares over the whole global tensor (all tokens of the probe over all data parallel ranks, all
shards), so they add over microbatches and ranks. L is the mean token loss of the probe's T tokens, and G = ∂L/∂Y in
that scale.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from snip_megatron.precision import LinearRow, Role, Side, strict_json
from snip_megatron.precision.errors import SnipError, cut

STATS_SCHEMA = "snip.stats/1"
_NUMBERS = ("step", "tokens", "tokens_per_step")

RHO_GRID = np.logspace(-4.0, 1.0, 24)
"""Relative gradient errors ρ at which F_j(ρ) is tabulated (docs/how-it-works.md, recipe step 6)."""

# One value per linear. Shapes: X [T,K], W [N,K], Y [T,N], G [T,N], D = ∂L/∂X [T,K], ∇W [N,K].
LINEAR_COLUMNS = (
    "x2",  # ‖X‖²
    "w2",  # ‖W‖²
    "y2",  # ‖Y‖²
    "g2",  # ‖G‖²
    "d2",  # ‖D‖², after its reduction over tensor parallel ranks
    "gw2",  # ‖∇W‖², after the reduction over data parallel ranks
    "s2",  # Σ_t ‖G_t‖²‖X_t‖², the sum of squared per-token gradients: Var(∇W) if tokens were independent
    "xs2",  # ‖X‖² over the sampled tokens, in the statistics pass
    "gs2",  # ‖G‖² over the sampled tokens
    "fx2",  # ‖X' − X‖² over the sampled tokens, X' of the forward-noise pass
    "fg2",  # ‖G' − G‖² over the sampled tokens, forward-noise pass
)
# One value per linear and candidate format.
FORMAT_COLUMNS = (
    "dx_row2",  # ‖δX‖², tiles along K (fprop)
    "dx_col2",  # ‖δX‖², tiles along T (wgrad)
    "dw2",  # ‖δW‖², blocks (fprop, dgrad)
    "dg_row2",  # ‖δG‖², tiles along N (dgrad), rounded as in training: for fp4 the expectation over the draws
    "dg_col2",  # ‖δG‖², tiles along T (wgrad), likewise
    "e2",  # ‖E‖², E = Q(X)Q(W)ᵀ − XWᵀ, from a sample of the tokens of a large microbatch
    "c2",  # Σ_t (G_t·E_t)², likewise (recorder.OutputErrorDots)
    "wdrift2",  # ‖u(g + σ∘z) − u(g)‖², σ from column norms of the wgrad error of one step (weight divergence of wgrad)
)
# One value per residual boundary: boundary b is the input of sub-block b; each stack ends with one more.
BOUNDARY_COLUMNS = (
    "h2",  # ‖h_b‖² over the sampled tokens
    "r2",  # ‖r_b‖², r_b = ∂L/∂h_b, sampled tokens
    "branch_h2",  # ‖h_{b+1} − h_b‖², sampled tokens; 0 at the end of a stack
    "branch_r2",  # ‖r_b − r_{b+1}‖², sampled tokens; 0 at the end of a stack
    "cn2",  # Σ_t (r_{b,t}·δh_{b,t})², sampled tokens scaled to all tokens, forward-noise pass
    "fr2",  # ‖δr_b‖², sampled tokens, forward-noise pass
)


@dataclass(frozen=True)
class SinkRow:
    """A word embedding or a norm's weight, which gradient errors reach although its GEMM is no candidate.

    The dgrad of the first block reaches sinks only (docs/how-it-works.md, recipe step 4).
    """

    name: str
    boundary: int  # the residual boundary that a norm reads, or 0, which the embedding writes
    numel: int


@dataclass(frozen=True)
class StatisticsTable:
    """The statistics of one update.

    Raises ValueError if a linear stands twice, or if an array is missing or has another shape or dtype.
    """

    step: int  # training step (0-based) before which the probe ran
    tokens: int  # T, tokens of the probe over all data parallel ranks
    # tokens of a training step's global batch. The gradient noise of one step is that of the probe times sqrt(tokens /
    # tokens_per_step). ``wdrift2`` is that of one step already
    tokens_per_step: int
    formats: tuple[str, ...]
    linears: tuple[LinearRow, ...]
    sinks: tuple[SinkRow, ...]
    # float64 arrays by the names that the file uses. :func:`array_shapes` gives their shapes and order.
    # ``linear.<column>``, ``by_format.<column>`` and ``boundary.<column>`` hold the columns above. ``drift2`` is ‖u(g +
    # ρ·s∘z) − u(g)‖² of each linear at each ρ of ``RHO_GRID``, where ‖s‖² is s2 scaled to one step. ``sink_drift2`` and
    # ``sink_w2`` are the same of the sinks, and their ‖W‖²
    arrays: Mapping[str, np.ndarray]
    meta: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(row.name for row in self.linears).items() if count > 1]
        if twice:
            raise ValueError(f"statistics: {twice[0]} is there twice")
        for name, shape in array_shapes(self.linears, self.formats, self.sinks).items():
            array = self.arrays[name]
            if array.shape != shape or array.dtype != np.float64:
                raise ValueError(f"statistics {name}: {array.dtype}{array.shape}, expected float64{shape}")

    @property
    def linear(self) -> dict[str, np.ndarray]:
        """Columns of :data:`LINEAR_COLUMNS`, [linears]."""
        return {column: self.arrays[f"linear.{column}"] for column in LINEAR_COLUMNS}

    @property
    def by_format(self) -> dict[str, np.ndarray]:
        """Columns of :data:`FORMAT_COLUMNS`, [linears, formats]."""
        return {column: self.arrays[f"by_format.{column}"] for column in FORMAT_COLUMNS}

    @property
    def boundary(self) -> dict[str, np.ndarray]:
        """Columns of :data:`BOUNDARY_COLUMNS`, [boundaries]."""
        return {column: self.arrays[f"boundary.{column}"] for column in BOUNDARY_COLUMNS}

    def non_finite(self) -> list[str]:
        """Return the columns with a NaN, an Inf or a negative value. An update with such a table is dropped."""
        bad = []
        for name, array in self.arrays.items():
            wrong = np.argwhere(~(np.isfinite(array) & (array >= 0)))
            if len(wrong):
                row = int(wrong[0][0])
                of_linear = name.startswith(("linear.", "by_format.", "drift2"))
                bad.append(f"{name} at {self.linears[row].name if of_linear else row}")
        return bad

    def to_bytes(self) -> bytes:
        """Return the contents of a .npz file without pickles."""
        header = {
            "schema": STATS_SCHEMA,
            **{name: getattr(self, name) for name in _NUMBERS},
            "formats": list(self.formats),
            "linears": [astuple(row) for row in self.linears],
            "sinks": [astuple(row) for row in self.sinks],
            "meta": dict(self.meta),
        }
        buffer = io.BytesIO()
        text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        np.savez(buffer, header=text, **self.arrays)  # type: ignore[arg-type]
        return buffer.getvalue()

    @classmethod
    def load(cls, path: Path) -> StatisticsTable:
        """Read a file of :meth:`to_bytes`. Raises SnipError on anything else; never unpickles."""
        return cls.from_bytes(strict_json.read_file(path), where=str(path))

    @classmethod
    def from_bytes(cls, content: bytes, *, where: str) -> StatisticsTable:
        """Read :meth:`to_bytes` of the source ``where``. Raises SnipError on anything else; never unpickles."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as data:
                header = json.loads(bytes(data["header"]))
                if header.get("schema") != STATS_SCHEMA:
                    raise ValueError(f'"schema" must be "{STATS_SCHEMA}"')
                formats = tuple(header["formats"])
                linears = tuple(_linear_row(*fields) for fields in header["linears"])
                sinks = tuple(SinkRow(str(a), int(b), int(c)) for a, b, c in header["sinks"])
                return cls(
                    **{name: int(header[name]) for name in _NUMBERS},
                    formats=formats,
                    linears=linears,
                    sinks=sinks,
                    arrays={name: data[name] for name in array_shapes(linears, formats, sinks)},
                    meta={str(k): float(v) for k, v in header["meta"].items()},
                )
        except Exception as error:  # whatever NumPy, zipfile and conversions raise on bytes that are no such file
            raise SnipError(f"{where}: not a statistics file ({cut(error)})") from None


def array_shapes(
    linears: Sequence[LinearRow], formats: Sequence[str], sinks: Sequence[SinkRow]
) -> dict[str, tuple[int, ...]]:
    """Return the name of each array of a table → its shape, in the order of a file."""
    n, s = len(linears), len(sinks)
    boundaries = 2 + max((row.sub_block for row in linears), default=-2)  # one above the last sub-block
    return {
        **{f"linear.{c}": (n,) for c in LINEAR_COLUMNS},
        **{f"by_format.{c}": (n, len(formats)) for c in FORMAT_COLUMNS},
        **{f"boundary.{c}": (boundaries,) for c in BOUNDARY_COLUMNS},
        "drift2": (n, len(RHO_GRID)),
        "sink_drift2": (s, len(RHO_GRID)),
        "sink_w2": (s,),
    }


def _linear_row(name: Any, stage: Any, n: Any, k: Any, *more: Any) -> LinearRow:
    """Read a row. Files of earlier releases hold decoders of attention and MLP, and no places."""
    fields = zip(more, (int, int, int, Role, bool, Side), strict=False)
    return LinearRow(str(name), int(stage), int(n), int(k), *(read(value) for value, read in fields))
