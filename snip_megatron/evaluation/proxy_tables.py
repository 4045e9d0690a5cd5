"""Markdown tables of proxy validations and of staleness."""

from __future__ import annotations

from collections.abc import Sequence

from snip_megatron.evaluation.proxy import DEFAULT, NEAR, QUANTITIES, TARGETS, Validation
from snip_megatron.evaluation.staleness import Summary


def proxy_markdown(validations: Sequence[Validation]) -> str:
    """Return a page with a table of Spearman correlations for each validation."""
    parts = ["# Estimators against measured truth", "Spearman of each estimator's score to `measured`, over options."]
    for validation in validations:
        parts += [
            f"## {validation.source}, step {validation.step}, {validation.fmt}, {validation.tokens:,} tokens",
            _correlations(validation),
            _targets(validation),
        ]
    return "\n\n".join(parts) + "\n"


def stale_markdown(summaries: Sequence[Summary], source: str) -> str:
    """Return a page with the medians over pairs of updates by phase and lag."""
    lines = [
        "| phase | steps apart | pairs | ΔL, fprop | ΔW, all | Q, all | excess cost of the older map |",
        "|---|---|---|---|---|---|---|",
    ]
    for s in summaries:
        excess = "–" if s.excess is None else f"{100 * s.excess:.2f} %"
        figures = " | ".join(_figure(value) for value in (s.loss, s.drift, s.score))
        lines.append(f"| {s.phase} | {s.lag} | {s.pairs} | {figures} | {excess} |")
    notes = [
        "Spearman between the scores of two updates of one run, median over pairs; early: first half of the steps.",
        "Excess: what the older map costs by the newer scores over the newer map, of the cost of all options in fp4.",
    ]
    return "\n\n".join([f"# Staleness of scores: {source}", *notes, "\n".join(lines)]) + "\n"


def _correlations(validation: Validation) -> str:
    names = validation.estimators
    lines = [f"| quantity | options | {' | '.join(names)} |", "|---|---" + "|---" * len(names) + "|"]
    for quantity in QUANTITIES:
        found = {name: validation.of(quantity, name) for name in names}
        counts = [c for c in found.values() if c is not None]
        if counts:
            options = f"{counts[0].options} ({min(c.trusted for c in counts)} above noise)"
            cells = [_pair(c.rho, c.trusted_rho) if c is not None else "–" for c in found.values()]
            lines.append(f"| {quantity} | {options} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _pair(rho: float | None, trusted: float | None) -> str:
    """Format the correlation over all options, followed in brackets by that above rounding noise if it differs."""
    if trusted is None or rho is None or abs(rho - trusted) < 5e-4:
        return _figure(rho)
    return f"{_figure(rho)} ({_figure(trusted)})"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _targets(validation: Validation) -> str:
    words = {True: "met", False: "missed", None: "not measured"}
    lines = [
        f"- {quantity}: {DEFAULT} ≥ {limit:g} or within {NEAR:g} of the ceiling: {words[validation.met(quantity)]}"
        for quantity, limit in TARGETS.items()
    ]
    return "\n".join(lines)
