"""The Blackwell backend and its emulation against the API of an installed Transformer Engine; no GPU needed."""

import inspect
from typing import Any

import pytest
import torch

from snip_megatron.numerics.products.blackwell_engine import (
    COLUMN,
    NATIVE,
    ROW,
    QuantizerKey,
    one_usage,
    transformer_engine,
)
from snip_megatron.numerics.quantize import quantize_dequantize
from snip_megatron.precision import Format

from . import emulated_transformer_engine as emulated

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

NVFP4, MXFP8 = Format.NVFP4, Format.MXFP8
KEYS = [
    QuantizerKey(fmt, rowwise, columnwise, square, stochastic)
    for fmt in NATIVE
    for rowwise, columnwise in ((True, True), (True, False), (False, True))
    for square, stochastic in ((False, False), (True, False), (False, True))
    if fmt is NVFP4 or not (square or stochastic)
]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The installed one; NVFP4's quantizer makes its Hadamard matrix on the CPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    return transformer_engine()


def test_the_emulation_has_the_real_signatures(engine: Any) -> None:
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    pairs = [
        (emulated.NVFP4Quantizer, NVFP4Quantizer),
        (emulated.MXFP8Quantizer, MXFP8Quantizer),
        (emulated.general_gemm, engine._general_gemm),
    ]
    for ours, theirs in pairs:
        real = inspect.signature(theirs).parameters
        for name, parameter in inspect.signature(ours).parameters.items():
            assert name in real
            assert parameter.kind == real[name].kind
            if name != "fp4_dtype":
                assert parameter.default == real[name].default
        required = {name for name, p in real.items() if p.default is p.empty} - {"workspace"}
        assert required <= set(inspect.signature(ours).parameters)


@pytest.mark.parametrize(
    "key", KEYS, ids=lambda key: f"{key.format.value}{'-'.join(map(str, key.arguments().values()))}"
)
@pytest.mark.parametrize("shape", [(128, 256), (32, 96), (160, 32)], ids=str)
def test_quantizers_and_storages(engine: Any, key: QuantizerKey, shape: tuple[int, int]) -> None:
    """A quantizer can be made of a key; an operand is one usage of its storage, shaped as the emulation's bytes."""
    quantizer = engine._quantizer(key)
    assert (quantizer.rowwise_usage, quantizer.columnwise_usage) == (key.rowwise, key.columnwise)
    if key.format is NVFP4:
        assert quantizer.stochastic_rounding == key.stochastic
        assert quantizer.with_2d_quantization == key.square
    if not torch.cuda.is_available():
        quantizer.optimize_for_gemm = False  # it would ask for the device's architecture
    empty = quantizer.make_empty(shape, dtype=torch.bfloat16, device="cpu")
    ours = emulated.engine().quantize(torch.ones(shape, dtype=torch.bfloat16), key, seed=1)
    for usage, wanted in ((ROW, key.rowwise), (COLUMN, key.columnwise)):
        if not wanted:
            continue
        side = one_usage(empty, usage, key.format, shape)
        expected = one_usage(ours, usage, key.format, shape)
        assert side.names == expected.names or set(side.names) == set(expected.names)
        shapes = dict(zip(expected.names, (t.shape for t in expected.tensors), strict=True))
        assert {name: t.shape for name, t in zip(side.names, side.tensors, strict=True)} == shapes
        native = side.native()
        assert type(native) is type(empty)
        metadata = native.get_metadata()
        other = COLUMN if usage == ROW else ROW
        assert all(value is None for name, value in metadata.items() if other in name)
        assert all(metadata[name] is tensor for name, tensor in zip(side.names, side.tensors, strict=True))


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_the_reference_agrees_with_transformer_engine_s_own(square: bool, spread: float) -> None:
    """NVFP4 in its plain torch implementation, which its kernels are tested against: the same numbers but for E4M3
    scales of ties, because one divides where the other multiplies by a reciprocal."""
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(256, 512, generator=generator)
    x = (x * (spread * torch.randn(256, 1, generator=generator)).exp()).bfloat16()
    tile = (16, 16) if square else (1, 16)
    quantizer = reference_nvfp4.NVFP4QuantizerRef(reference_utils.Fp4Formats.E2M1, quant_tile_shape=tile)
    found = quantizer.quantize(x)
    for matrix, data, scale, amax in (
        (x, found.data, found.scale, found.global_amax_row),
        (x.t().contiguous(), found.data_t, found.scale_t, found.global_amax_col),
    ):
        values = reference_nvfp4.cast_from_fp4x2(data, torch.float32)
        theirs = values * (scale.float() * (amax / (6.0 * 448.0))).repeat_interleave(16, dim=1)
        ours = quantize_dequantize(matrix, "nvfp4", "block" if square else "tile")
        assert float((ours == theirs).float().mean()) > 0.999
        errors = [float((quantised - matrix.float()).norm()) for quantised in (ours, theirs)]
        assert errors[1] == pytest.approx(errors[0], rel=2e-3)


def test_its_gemm_multiplies_what_the_emulation_does(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """The function itself, on operands of its plain torch implementation: order of operands, layouts, accumulation."""
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

    monkeypatch.setattr(gemm, "get_cublas_workspace", lambda *args: torch.empty(1, dtype=torch.uint8), raising=False)
    quantizer = reference_nvfp4.NVFP4QuantizerRef(reference_utils.Fp4Formats.E2M1)
    generator = torch.Generator().manual_seed(1)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((64, 128), (96, 128), (64, 96)))
    products = {"TN": (w, x, x @ w.t()), "NN": (w, g, g @ w), "NT": (x, g, g.t() @ x)}
    for layout, (a, b, exact) in products.items():
        options = {"layout": layout, "out_dtype": torch.float32, "grad": layout != "TN", "use_split_accumulator": True}
        found, *others = engine._general_gemm(quantizer.quantize(a), quantizer.quantize(b), **options)
        assert len(others) == 3
        assert float((found - exact).norm()) < 0.25 * float(exact.norm())
        emulation = emulated.engine()
        usages = (ROW if layout[0] == "T" else COLUMN, COLUMN if layout[1] == "T" else ROW)
        sides = [
            one_usage(emulation.quantize(t, QuantizerKey(NVFP4, True, True)), usage, NVFP4, tuple(t.shape))
            for t, usage in zip((a, b), usages, strict=True)
        ]
        ours = emulation.gemm(sides[0], sides[1], layout, torch.float32)
        assert float((found - ours).norm()) < 0.1 * float((ours - exact).norm())
