"""What was measured of each option by forcing it alone (METHOD, estimator ``measured``): columns of the table.

NumPy only: the sidecar and ``snip validate-proxy`` read it without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MEASURED_COLUMNS = (
    "loss",  # mean token loss with the option on less that without it, nats; fprop only, 0 elsewhere
    "first_order",  # ⟨G, E⟩ on the same tokens, which ``loss`` contains and which vanishes on average; fprop only
    "loss_floor",  # |change of the loss| by a nudge in the same layer: rounding noise; fprop only
    "drift",  # Σ_j ‖u(g_j + δ_j) − u(g_j)‖/‖W_j‖ over linears and sinks, the floor of each taken off in quadrature
    "raw_drift",  # the same as it was read
    "floor",  # the same of a nudge: rounding noise of the training dtype; 0 for wgrad, which has none
    "variance",  # gradient variance added, as a share of the gradient's own (``weight_divergence.added_variance``)
    "step",  # the step before which it was measured; -1: never
)
"""One value an option: float64 [linears, 3 GEMMs, formats]."""

SIGNED = ("loss", "first_order", "step")
"""Columns that may be negative."""

NEVER = -1.0


@dataclass(frozen=True)
class Measured:
    """The measured columns of one table. ``columns`` holds every name of :data:`MEASURED_COLUMNS`."""

    columns: Mapping[str, NDArray[np.float64]]

    @classmethod
    def nothing(cls, linears: int, formats: int) -> Measured:
        """No option measured yet."""
        columns = {name: np.zeros((linears, 3, formats)) for name in MEASURED_COLUMNS}
        columns["step"][:] = NEVER
        return cls(columns)

    def __getitem__(self, column: str) -> NDArray[np.float64]:
        return self.columns[column]

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which options have been measured, bool [linears, 3, formats]."""
        return np.asarray(self.columns["step"] > NEVER)

    def renewed(self, newer: Measured) -> Measured:
        """This, with what ``newer`` measured in its place."""
        known = newer.known
        return Measured({name: np.where(known, newer[name], self[name]) for name in MEASURED_COLUMNS})

    def check(self, linears: int, formats: int) -> None:
        """Raises ValueError on a missing column or a wrong shape or dtype."""
        for name in MEASURED_COLUMNS:
            array = self.columns[name]
            if array.shape != (linears, 3, formats) or array.dtype != np.float64:
                raise ValueError(f"measured {name}: {array.dtype}{array.shape}, expected ({linears}, 3, {formats})")
