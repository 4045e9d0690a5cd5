# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code of the update error: AdamW's answer to many gradient errors, from one read of g, m and v."""

import triton
import triton.language as tl

_TINY = tl.constexpr(1e-37)


@triton.jit
def _root(x, HARDWARE: tl.constexpr):
    """Return √x for x > 0."""
    if HARDWARE:
        inverse = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return x * inverse
    else:
        return tl.sqrt(x)


@triton.jit
def _quotient(a, b, HARDWARE: tl.constexpr):
    if HARDWARE:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
        )
        return a * inverse
    else:
        return a / b


@triton.jit
def _signs(row_word, col_word):
    """Return ±1, as ``update_error.error_signs`` does."""
    h = (row_word ^ col_word).to(tl.uint32, bitcast=True) * 0x9E3779B1
    h = (h ^ (h >> 15)) * 0x85EBCA6B
    return tl.where(h.to(tl.int32, bitcast=True) < 0, -1.0, 1.0)


@triton.jit
def _squared_slope(rho, unit, unit_gain, twice_g, v, s, uv, m_gain, eps, HARDWARE: tl.constexpr):
    """Return ((u(g + δ) − u(g)) / ρ)² of δ = ρ·unit, without forming the difference of two updates.

    With t = 2g + δ: √v' − √v = (v' − v)/(√v' + √v) and v' − v = δ·t·v_gain. So (u' − u)/δ = (m_gain·(√v' + √v) −
    u·v_gain·t) / ((√v' + √v)·(√v' + ε)).
    """
    t = rho * unit + twice_g
    root = _root(tl.maximum(rho * unit_gain * t + v, _TINY), HARDWARE)
    both = root + s
    slope = _quotient(m_gain * both - uv * t, both * (root + eps), HARDWARE) * unit
    return slope * slope


@triton.jit(do_not_specialize=["start", "N"])
def update_error_kernel(
    g_ptr, m_ptr, v_ptr, sums_ptr, rho_ptr, unit_rows_ptr, unit_cols_ptr, var_rows_ptr, var_cols_ptr,
    row_words_ptr, col_words_ptr, start, size, N, K,
    factor, noise, mean_scale, beta1, beta2, m_scale, v_scale, eps,
    RHOS: tl.constexpr, FORMATS: tl.constexpr, BLOCK: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Sum over one block of elements [start, start + size) of a flattened [N, K] weight.

    ``sums`` [RHOS + FORMATS, blocks] holds the squared update error at each ρ divided by ρ², then that of each
    candidate. ``var_rows`` [1 + FORMATS, N] and ``var_cols`` [1 + FORMATS, K] are those of ``update_error.ErrorSizes``.
    """
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    row, col = (start + at) // K, (start + at) % K
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
    m = tl.load(m_ptr + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + at, mask=inside, other=0.0)
    mean = m * mean_scale
    g = mean + noise * (g - mean)
    v = tl.maximum(v_scale * (beta2 * v + (1.0 - beta2) * g * g), _TINY)
    s = _root(v, HARDWARE)
    u = m_scale * (beta1 * m + (1.0 - beta1) * g) / (s + eps)
    m_gain, v_gain = (1.0 - beta1) * m_scale, (1.0 - beta2) * v_scale
    row_word = tl.load(row_words_ptr + row, mask=inside, other=0)
    col_word = tl.load(col_words_ptr + col, mask=inside, other=0)
    z = tl.where(inside, _signs(row_word, col_word), 0.0)
    unit = tl.load(unit_rows_ptr + row, mask=inside, other=0.0) * tl.load(unit_cols_ptr + col, mask=inside, other=0.0)
    unit *= z
    twice_g, uv = 2.0 * g, u * v_gain
    unit_gain = unit * v_gain
    for j in tl.static_range(RHOS):
        slope2 = _squared_slope(tl.load(rho_ptr + j), unit, unit_gain, twice_g, v, s, uv, m_gain, eps, HARDWARE)
        tl.store(sums_ptr + j * blocks + block, tl.sum(slope2, axis=0))
    if FORMATS > 0:
        g_norm = tl.load(var_rows_ptr + row, mask=inside, other=0.0)
        x_norm = tl.load(var_cols_ptr + col, mask=inside, other=0.0)
        for f in tl.static_range(1, FORMATS + 1):
            dg_norm = tl.load(var_rows_ptr + f * N + row, mask=inside, other=0.0)
            dx_norm = tl.load(var_cols_ptr + f * K + col, mask=inside, other=0.0)
            unit = tl.sqrt(dg_norm * x_norm + g_norm * dx_norm) * z
            slope2 = _squared_slope(1.0, unit, unit * v_gain, twice_g, v, s, uv, m_gain, eps, HARDWARE)
            tl.store(sums_ptr + (RHOS + f - 1) * blocks + block, tl.sum(slope2, axis=0))
