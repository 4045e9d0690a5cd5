"""Names of the previous release still work, and say what to use."""

import pytest

from snip_megatron.megatron import convert_model
from snip_megatron.numerics import quantize_dequantize


def test_old_names_are_the_new_ones_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match=r"use snip_megatron\.megatron\.convert_model") as caught:
        from snip_megatron.layers import convert_model as old
    assert old is convert_model
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"use snip_megatron\.numerics\.quantize_dequantize"):
        from snip_megatron.quantization import quantize_dequantize as old_quantize
    assert old_quantize is quantize_dequantize
    import snip_megatron.quantization as module

    for owner in ("snip_megatron.layers", "snip_megatron.quantization"):
        with pytest.raises(AttributeError, match=f"module '{owner}' has no attribute 'nothing'"):
            _ = __import__(owner, fromlist=["nothing"]).nothing
    assert module.__name__ == "snip_megatron.quantization"
