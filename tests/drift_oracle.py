"""Drifts by the kernel of update errors against the updates themselves in float64, on any device."""

from collections.abc import Sequence

import torch


def drift_differs(
    shape: tuple[int, int], start: int, end: int, step: int, noise: float, rhos: Sequence[float], device: str = "cpu"
) -> float:
    """Largest relative difference over ρ, and over two candidates, for elements ``start`` to ``end`` of a weight."""
    from snip_megatron.sensitivity.update_error import ErrorSizes, adamw_error_sums, error_signs
    from snip_megatron.sensitivity.updates import AdamWState, gradient_of_a_step

    generator = torch.Generator().manual_seed(2)
    (height, width), count = shape, end - start
    rows, cols = torch.arange(height) + 5, torch.randperm(width, generator=generator)
    size = torch.randn(count, generator=generator).mul(3).exp() * 1e-6
    m, v = torch.randn(count, generator=generator) * size, (size * torch.rand(count, generator=generator)).square()
    m[:40], v[:40] = 0.0, 0.0  # never had a gradient
    if step == 0:
        m, v = m * 0, v * 0
    gradient = torch.randn(count, generator=generator) * 1e-6
    gradient[:20] = 0.0

    def norms(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    unit_rows, unit_cols = norms(height) * 1e-6, norms(width)
    var_rows = norms(3, height) * torch.tensor([[1e-12], [1e-15], [1e-14]])
    var_cols = norms(3, width) * torch.tensor([[10.0], [1e-2], [0.1]])
    parts = [part.to(device) for part in (rows, cols, unit_rows, unit_cols, var_rows, var_cols)]
    rows, cols, unit_rows, unit_cols, var_rows, var_cols = parts
    m, v, gradient = m.to(device), v.to(device), gradient.to(device)
    kept = AdamWState(start, end, step, m, v, 0.9, 0.95, 1e-8)
    found = adamw_error_sums(gradient, kept, ErrorSizes(9, *parts), rhos, factor=0.7, noise=noise)

    exact = AdamWState(start, end, step, m.double(), v.double(), 0.9, 0.95, 1e-8)
    of_step = gradient_of_a_step(gradient.double() * 0.7, exact, noise)
    z = error_signs(9, rows, cols).double()
    expected = [exact.squared_error(of_step, (torch.outer(unit_rows, unit_cols) * z).view(-1)[start:end], rhos)]
    for f in (1, 2):
        variance = torch.outer(var_rows[f], var_cols[0]) + torch.outer(var_rows[0], var_cols[f])
        expected.append(exact.squared_error(of_step, (variance.sqrt() * z).view(-1)[start:end], [1.0]))
    return float((torch.cat(found) / torch.cat(expected) - 1.0).abs().max())
