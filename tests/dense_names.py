"""Names of the linears of a decoder of dense layers, in the order of the forward pass."""

from snip_megatron.precision import DENSE_LAYER, LinearId


def dense_names(layers: int) -> list[str]:
    return [str(LinearId("decoder", layer, path)) for layer in range(layers) for path in DENSE_LAYER]
