"""Which linears are sensitive: what each GEMM would cost in its costliest candidate format, beside the map's choice."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap, option_id, split_option_id
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.run_data import RunData, number
from snip_megatron.sensitivity.policies import in_nats

SHOWN = 20
"""Number of GEMMs in the text of :func:`lines`."""
_BAR = 24


@dataclass(frozen=True)
class Harm:
    """What a choice of the map may cost."""

    linear: LinearId
    gemm: Gemm | None  # None stands for the linear's three GEMMs, at granularity ``layer``
    chosen: Format  # the format in the map
    costliest: Format  # the candidate format with the highest score
    score: float  # Q of ``costliest``
    delta_loss: float | None  # its ΔL. None if it is not known
    delta_weight: float | None  # its ΔW. None if it is not known

    @property
    def kind(self) -> str:
        """The option without its layer, such as ``mlp.linear_fc1:fprop``."""
        return option_id(self.linear.path, self.gemm)


def rank(scores: Mapping[str, Any], precision_map: PrecisionMap) -> list[Harm]:
    """Return the choices of a map, the most harmful first.

    ``scores`` are those of the map's update: option id → format → ``delta_loss``, ``delta_weight`` and ``q``. An option
    without scores, such as a pinned one, is left out.
    """
    harms = []
    for option, by_format in scores.items():
        options = by_format if isinstance(by_format, Mapping) else {}
        of_formats = {fmt: figures for fmt in Format if isinstance(figures := options.get(fmt.value), Mapping)}
        scored = {fmt: q for fmt, figures in of_formats.items() if (q := number(figures.get("q"))) is not None}
        if not scored:
            continue
        costliest = max(scored, key=lambda fmt: scored[fmt])
        linear, gemm = split_option_id(option)
        chosen = precision_map.format_of(str(linear), gemm or Gemm.FPROP)
        loss, weight = (number(of_formats[costliest].get(name)) for name in ("delta_loss", "delta_weight"))
        harms.append(Harm(linear, gemm, chosen, costliest, scored[costliest], loss, weight))
    return sorted(harms, key=lambda harm: -harm.score)


def rank_run(run: RunData) -> list[Harm]:
    """Return the ranked choices of a run's last map whose scores are known. Raises SnipError if there is none."""
    for adoption in reversed(run.adoptions):
        if adoption.precision_map is not None and adoption.scores:
            return rank(adoption.scores, adoption.precision_map)
    raise SnipError(f"{run.path}: no map with scores is recorded; the first ones come with the first update's map")


def unit_of(policy: str, q: str) -> str:
    """Return the unit of the scores of a policy, in words."""
    return "nats of training loss" if in_nats(policy, q) else f"scores of the policy {policy}"


def lines(harms: Sequence[Harm], unit: str) -> list[str]:
    """Return the sums by kind of GEMM, and the :data:`SHOWN` most sensitive GEMMs, as text for a terminal."""
    by_kind: dict[str, list[Harm]] = defaultdict(list)
    for harm in harms:
        by_kind[harm.kind].append(harm)
    sums = {kind: sum(harm.score for harm in group) for kind, group in by_kind.items()}
    total, highest = sum(sums.values()) or 1.0, max(sums.values(), default=0.0) or 1.0
    width = max(map(len, sums), default=0)
    text = [f"Harm of each GEMM in the costliest of its formats, in {unit}; by kind, summed over layers:"]
    for kind, in_kind in sorted(sums.items(), key=lambda item: -item[1]):
        formats = Counter(each.chosen.value for each in by_kind[kind])
        chosen = ", ".join(f"{count} {fmt}" for fmt, count in formats.most_common())
        bar = "#" * round(_BAR * in_kind / highest)
        text.append(f"{in_kind:9.2e} {in_kind / total:6.1%}  {kind:{width}}  {bar:{_BAR}}  {chosen}")
    text.append(f"The {min(SHOWN, len(harms))} most sensitive of {len(harms)}:")
    text.append("     harm  share         ΔL         ΔW  in the map  costliest   GEMM")
    for each in harms[:SHOWN]:
        figures = "".join("          –" if x is None else f"  {x:9.2e}" for x in (each.delta_loss, each.delta_weight))
        formats_of = f"{each.chosen.value:10}  {each.costliest.value:10}"
        option = option_id(str(each.linear), each.gemm)
        text.append(f"{each.score:9.2e} {each.score / total:6.1%}{figures}  {formats_of}  {option}")
    return text
