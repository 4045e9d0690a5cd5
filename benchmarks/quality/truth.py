"""What forcing each option alone did: the truth that ``validate_proxy`` compares the estimators with.

It stands in ``truth/step_<N>.npz`` of a run directory: the columns ``truth.<column>``, measured on the microbatches of
the statistics ``stats/step_<N>.npz``, and ``truth_again.<column>``, measured on other microbatches.

An error of wgrad changes the gradient of its own weight only, so the wgrads of all linears are forced at once. Rounding
noise depends on where it starts and hardly on how, so one *perturbation* below a rounding step measures the noise of
all fprops of a layer, and another one that of all its dgrads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from snip_megatron.precision import Format, Gemm, LinearId
from snip_megatron.precision.errors import SnipError, cut

TRUTH_COLUMNS = (
    "loss",  # change of the mean token loss minus its first-order part ⟨G, E⟩, whose mean over batches is 0; nats
    "loss_floor",  # |change of the loss| by a perturbation in the same layer, which is rounding noise; nats
    "drift",  # Σ_j ‖u(g_j + δ_j) − u(g_j)‖/‖W_j‖ over linears and sinks, minus the floor of each in quadrature
    "raw_drift",  # the same without subtracting the floor
    "floor",  # the same for a perturbation: rounding noise of the training dtype; 0 for wgrad, which has none
)
"""One value per option: float64 [linears, 3 GEMMs, formats]. Those of losses are 0 for dgrad and wgrad."""

_GROUPS = ("truth", "truth_again")
Truth = Mapping[str, NDArray[np.float64]]
"""Every name of :data:`TRUTH_COLUMNS` → its values."""


@dataclass(frozen=True)
class Trial:
    """One forced option, of one linear or for wgrad of all. Without a format a perturbation begins at the linear."""

    gemm: Gemm
    linears: tuple[str, ...]
    format: Format | None


def plan_trials(names: Sequence[str], formats: Sequence[str]) -> tuple[Trial, ...]:
    """Return the trials of all options of the linears ``names``. Those of a layer and GEMM follow a perturbation."""
    layers: dict[tuple[str, int], list[str]] = {}
    for name in names:
        linear = LinearId.parse(name)
        layers.setdefault((linear.stack, linear.layer), []).append(name)
    candidates = [Format(name) for name in formats]
    trials: list[Trial] = []
    for members in layers.values():
        # Noise passes through the whole layer: it starts at the first linear in fprop, at the last one in dgrad.
        for gemm, start in ((Gemm.FPROP, members[0]), (Gemm.DGRAD, members[-1])):
            trials.append(Trial(gemm, (start,), None))
            trials += [Trial(gemm, (name,), fmt) for name in members for fmt in candidates if gemm in fmt.gemms]
    return (*trials, *(Trial(Gemm.WGRAD, tuple(names), fmt) for fmt in candidates if Gemm.WGRAD in fmt.gemms))


def truth_of(
    trials: Sequence[Trial],
    drift2: NDArray[np.float64],
    loss: NDArray[np.float64],
    w2: NDArray[np.float64],
    names: Sequence[str],
    formats: Sequence[str],
) -> Truth:
    """Return the columns of the truth for all of :func:`plan_trials`, in order.

    ``drift2`` is ‖u(g_j + δ_j) − u(g_j)‖² [trials, owners], the linears first, then the sinks; ``loss`` is ΔL − ⟨G, E⟩
    of fprops and ΔL of perturbations, [trials], nats; ``w2`` is ‖W_j‖² [owners].
    """
    truth = {column: np.zeros((len(names), len(Gemm), len(formats))) for column in TRUTH_COLUMNS}
    relative2 = drift2 / np.where(w2 > 0.0, w2, np.inf)
    floor2, loss_floor = np.zeros(len(w2)), 0.0
    for trial, raw2, change in zip(trials, relative2, loss, strict=True):
        if trial.format is None:
            floor2, loss_floor = raw2, abs(change)
            continue
        gemm, column = list(Gemm).index(trial.gemm), formats.index(trial.format.value)
        for name in trial.linears:
            row = names.index(name)
            rows = slice(row, row + 1) if trial.gemm is Gemm.WGRAD else slice(None)
            noise2 = np.minimum(0.0 if trial.gemm is Gemm.WGRAD else floor2, raw2)
            values = {"drift": raw2 - noise2, "raw_drift": raw2, "floor": noise2}
            figures = {kind: float(np.sqrt(squares[rows]).sum()) for kind, squares in values.items()}
            if trial.gemm is Gemm.FPROP:
                figures |= {"loss": float(change), "loss_floor": float(loss_floor)}
            for kind, value in figures.items():
                truth[kind][row, gemm, column] = value
    return truth


def save_truth(run: Path, step: int, truth: Truth, again: Truth) -> None:
    """Write what was measured before a step into a run directory."""
    file = run / "truth" / f"step_{step}.npz"
    file.parent.mkdir(exist_ok=True)
    groups = zip(_GROUPS, (truth, again), strict=True)
    arrays = {f"{group}.{name}": values for group, columns in groups for name, values in columns.items()}
    np.savez(file, **arrays)  # type: ignore[arg-type]


def load_truth(statistics: Path) -> tuple[Truth, Truth]:
    """Read what was measured beside a statistics file of a run. Raises SnipError if it is missing or damaged."""
    file = statistics.parent.parent / "truth" / statistics.name
    try:
        with np.load(file, allow_pickle=False) as data:
            truth, again = ({name: data[f"{group}.{name}"] for name in TRUTH_COLUMNS} for group in _GROUPS)
    except FileNotFoundError:
        raise SnipError(f"{statistics}: its run holds no truth; give an experiment file") from None
    except Exception as error:  # whatever NumPy and zipfile raise on bytes that are no such file
        raise SnipError(f"{file}: not a file of measured options ({cut(error)})") from None
    if not all(np.isfinite(values).all() for columns in (truth, again) for values in columns.values()):
        raise SnipError(f"{file}: holds values that are not finite")
    return truth, again
