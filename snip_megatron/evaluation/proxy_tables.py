"""Markdown tables of proxy validations."""

from __future__ import annotations

from collections.abc import Sequence

from snip_megatron.evaluation.proxy import QUANTITIES, Validation


def proxy_markdown(validations: Sequence[Validation]) -> str:
    """Return a page with a table of Spearman correlations for each validation."""
    parts = ["# Estimators against measured truth", "Spearman of each estimator's score to `measured`, over options."]
    for validation in validations:
        parts += [
            f"## {validation.source}, step {validation.step}, {validation.format}, {validation.tokens:,} tokens",
            _correlations(validation),
        ]
    return "\n\n".join(parts) + "\n"


def _correlations(validation: Validation) -> str:
    names = validation.estimators
    lines = [f"| quantity | options | {' | '.join(names)} |", "|---|---" + "|---" * len(names) + "|"]
    for quantity in QUANTITIES:
        found = [validation.of(quantity, name) for name in names]
        counts = [c for c in found if c is not None]
        if counts:
            options = f"{counts[0].options} ({min(c.trusted for c in counts)} above noise)"
            cells = ["–" if c is None else _pair(c.rho, c.trusted_rho) for c in found]
            lines.append(f"| {quantity} | {options} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _pair(rho: float | None, trusted: float | None) -> str:
    """Format the correlation over all options, followed in brackets by that above rounding noise if it differs."""
    if rho is None:
        return "–"
    return f"{rho:.3f}" if trusted is None or abs(rho - trusted) < 5e-4 else f"{rho:.3f} ({trusted:.3f})"
