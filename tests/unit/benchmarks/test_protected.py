"""What a map protects beside NVIDIA's list, on a map whose shares are known."""

import pytest

from benchmarks.quality.protected import figures
from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id

LINEARS = [f"decoder.layers.{layer}.{path}" for layer in range(4) for path in ("self_attention.linear_qkv", "mlp.x")]


def test_shares_of_a_map_that_protects_the_forward_of_two_linears() -> None:
    """On the list are the attentions and the last of four blocks: 5 of 8 linears of equal cost."""
    cost = {option_id(name, gemm): 1.0 for name in LINEARS for gemm in Gemm}
    kept = {option_id(name, Gemm.FPROP) for name in LINEARS[:2]}  # one is on the list
    chosen = PrecisionMap(choices={o: Format.MXFP8 if o in kept else Format.NVFP4 for o in cost})
    found = figures(chosen, cost)
    assert found == pytest.approx(
        {"protected": 2 / 24, "listed": 5 / 8, "protected_that_is_listed": 0.5, "fprop": 0.25, "dgrad": 0, "wgrad": 0}
    )
