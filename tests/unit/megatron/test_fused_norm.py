"""Layers of Megatron with RMSNorm fused into quantisation: the bits of the unfused layers, in every combination.

The fused functions are those of ``quantization/rmsnorm.py`` in torch; kernels have the same interface and are compared
elsewhere. The norms of the model add up rows in one of its orders, which torch's own norm does not do on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from ordered_norm import ORDER, OrderedNorm, stock_of
from torch.utils.checkpoint import checkpoint

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import REFERENCE
from snip_megatron.gemm.hopper import HopperBackend
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.layers import LinearRegistry, convert_model
from snip_megatron.layers.context import Forced
from snip_megatron.layers.rmsnorm import StockNorm
from snip_megatron.layers.rmsnorm_check import difference
from snip_megatron.megatron import fused_norm
from snip_megatron.megatron.compat.norms import TORCH, stock_norm
from snip_megatron.megatron.fused_norm import SnipNorm, fuse_norms
from snip_megatron.precision import Format, Gemm, PrecisionMap
from snip_megatron.quantization import packed, rmsnorm
from snip_megatron.quantization.rmsnorm import Order, RMSNorm

pytestmark = pytest.mark.usefixtures("model_parallel_of_one")

CPU = torch.device("cpu")
NORM = RMSNorm(ORDER, 1e-5)
BF16, FP8, FP4, TENSOR = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR
QKV, FC1 = "decoder.layers.0.self_attention.linear_qkv", "decoder.layers.0.mlp.linear_fc1"
Formats = tuple[Format, Format, Format]
MAPS: dict[str, tuple[Formats, Formats, int]] = {  # of qkv and of fc1: (fprop, dgrad, wgrad); how many are fused
    "fp8": ((FP8,) * 3, (FP8,) * 3, 2),
    "fp4": ((FP4,) * 3, (FP4,) * 3, 2),
    "mixed": ((FP8, FP4, FP4), (FP4, BF16, FP8), 2),
    "qkv alone": ((FP8,) * 3, (BF16,) * 3, 1),
    "fc1 alone": ((TENSOR,) * 3, (FP4, FP8, FP4), 1),
    "a bf16 wgrad": ((FP8, FP8, BF16), (BF16, FP8, FP8), 0),
    "neither": ((TENSOR,) * 3, (BF16,) * 3, 0),
}


class Products(ScaledProducts):
    """Dequantised products in FP32: any device."""

    def multiply(self, a: Any, b: Any, dtype: torch.dtype, *, fast: bool = True) -> torch.Tensor:
        return (a.dequantize() @ b.dequantize().t()).to(dtype)


STOCK = stock_of(SimpleNamespace(eps=NORM.eps))


class Mixing(torch.nn.Module):
    """In place of the attention of heads, whose dropout needs a GPU."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return (q * k.sigmoid() + v.cumsum(0)).flatten(2)


def noted(name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        CALLED.append(name)
        return getattr(rmsnorm, name)(*arguments)

    return call


CALLED: list[str] = []
NORMS: Any = SimpleNamespace(fits=rmsnorm.fits, **{n: noted(n) for n in ("reciprocal_rms", "quantize_rmsnorm")})
BACKEND = HopperBackend(packed, Products(), norms=NORMS)


class Run:
    """Layers whose norms are fused, or not, under a map."""

    def __init__(self, chosen: tuple[Formats, Formats, int], *, fuse: bool, **changes: Any) -> None:
        model = gpt(**changes)
        self.registry: LinearRegistry = convert_model([model], SnipConfig(enabled=True, seed=7))
        self.registry.context.backend = BACKEND
        self.layers = list(model.decoder.layers)
        self.layer: Any = self.layers[0]
        self.layer.self_attention.core_attention = Mixing()
        for module in model.modules():
            if type(module) is torch.nn.RMSNorm:
                module.__class__ = OrderedNorm
        self.fused = fuse_norms(self.layers, BACKEND, stock_of) if fuse else None
        names = dict(zip((QKV, FC1), chosen[:2], strict=True))
        choices = {
            f"{name}:{gemm.value}": fmt
            for name in self.registry.names
            for gemm, fmt in zip(Gemm, names.get(name, (BF16,) * 3), strict=True)
        }
        self.registry.adopt(PrecisionMap(choices=choices))
        CALLED.clear()
        OrderedNorm.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, attention_mask=None)[0]  # type: ignore[no-any-return]

    def step(self, recompute: bool = False) -> list[torch.Tensor]:
        """Two microbatches: results, input gradients and the gradients of all parameters."""
        self.registry.start_step(3)
        found = []
        for microbatch in range(2):
            x, g = tensors(microbatch)
            y = checkpoint(self.forward, x, use_reentrant=True) if recompute else self.forward(x)
            y.backward(g)
            assert x.grad is not None
            found += [y.detach(), x.grad]
        self.registry.end_step()
        for parameter in self.layer.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad)
            parameter.grad = None
        return found


def gpt(**changes: Any) -> GPTModel:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": torch.bfloat16,
        "bf16": True,
    }
    config = TransformerConfig(**options | changes)
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=32, position_embedding_type="rope").bfloat16()
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data += torch.randn(parameter.shape) * 0.3
    return model


def tensors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(80, 2, 256, generator=generator) for _ in range(2))
    return (40 * x).to(torch.bfloat16).requires_grad_(), (1e-3 * g).to(torch.bfloat16)


def assert_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)
        assert a.any()


@pytest.mark.parametrize("chosen", MAPS)
@pytest.mark.parametrize("recompute", [False, True])
def test_bits_are_those_of_the_unfused_sequence(chosen: str, recompute: bool) -> None:
    plain = Run(MAPS[chosen], fuse=False)
    expected = plain.step(recompute)
    assert not CALLED
    run = Run(MAPS[chosen], fuse=True)
    assert_bits(run.step(recompute), expected)
    fused, microbatches = MAPS[chosen][2], 4 if recompute else 2
    if chosen == "a bf16 wgrad" and recompute:  # the first forward has no wgrad
        assert CALLED.count("quantize_rmsnorm") == 2
        return
    assert CALLED.count("reciprocal_rms") == CALLED.count("quantize_rmsnorm") == fused * microbatches
    assert OrderedNorm.calls == (2 - fused) * microbatches


def test_every_norm_and_the_log() -> None:
    run = Run(MAPS["fp8"], fuse=True, num_layers=2)
    assert str(run.fused) == "RMSNorm of 4 linears"
    assert isinstance(run.layer.input_layernorm, SnipNorm)
    assert set(run.layer.state_dict()) == set(gpt().decoder.layers[0].state_dict())
    again = fuse_norms(run.layers, BACKEND, stock_of)
    assert again.number == 4
    run.step()
    assert "quantize_rmsnorm" in CALLED


def test_validation_quantises_for_fprop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run, plain = Run(MAPS["fp8"], fuse=True), Run(MAPS["fp8"], fuse=False)
    formats: list[Any] = []
    monkeypatch.setattr(NORMS, "quantize_rmsnorm", lambda *a: (formats.append(a[4:]), rmsnorm.quantize_rmsnorm(*a))[1])
    with torch.no_grad():
        assert torch.equal(run.forward(tensors(0)[0]), plain.forward(tensors(0)[0]))
    assert formats == [(FP8, None)] * 2
    run.registry.context.bf16_eval = True
    run.layer.eval()
    with torch.no_grad():
        run.forward(tensors(0)[0])
    assert len(formats) == 2


def test_probes_measuring_passes_and_bf16_run_the_norm_itself() -> None:
    run = Run(MAPS["fp8"], fuse=True)
    run.registry.context.probing = True
    run.forward(tensors(0)[0])
    run.registry.context.probing = False
    run.registry.context.forcing = lambda handle: Forced()
    run.forward(tensors(0)[0])
    run.registry.context.forcing = None
    run.registry.adopt(PrecisionMap.uniform(run.registry.names, BF16))
    run.forward(tensors(0)[0])
    assert OrderedNorm.calls == 6
    assert not CALLED


def test_a_number_of_tokens_with_another_order_runs_the_norm_itself() -> None:
    run = Run(MAPS["fp8"], fuse=True)
    run.forward(torch.ones(3, 1, 256, dtype=torch.bfloat16))
    assert OrderedNorm.calls == 2
    assert not CALLED


def test_a_use_of_the_result_is_noticed() -> None:
    run = Run(MAPS["fp8"], fuse=True)
    results: list[torch.Tensor] = []
    run.layer.input_layernorm.register_forward_hook(lambda *arguments: results.append(arguments[2]))
    run.forward(tensors(0)[0])
    assert results[0].isnan().all()
    hook = run.layer.self_attention.linear_qkv.register_full_backward_hook(lambda *arguments: None)
    with pytest.raises(SnipError, match=r"linear_qkv.*hook.*--snip-fusions none"):
        run.forward(tensors(0)[0])
    hook.remove()
    assert run.forward(tensors(0)[0]).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"normalization": "LayerNorm"}, "the norm is LayerNorm"),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, "--recompute-modules layernorm"),
        ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm"),
        ({"fp32_residual_connection": True}, "--fp32-residual-connection"),
    ],
)
def test_other_norms_stay_unfused(changes: dict[str, Any], why: str) -> None:
    run = Run(MAPS["fp8"], fuse=True, **changes)
    assert run.fused is not None
    assert run.fused.number == 0
    assert why in str(run.fused)
    assert not isinstance(run.layer.input_layernorm, SnipNorm)


def test_a_recomputed_mlp_keeps_its_norm() -> None:
    changes = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    run = Run(MAPS["fp8"], fuse=True, **changes)
    assert str(run.fused) == "RMSNorm of 1 linears"
    assert not isinstance(run.layer.pre_mlp_layernorm, SnipNorm)


def test_sequence_parallelism_stays_unfused() -> None:
    run = Run(MAPS["fp8"], fuse=False)
    run.layer.config.sequence_parallel, run.layer.config.tensor_model_parallel_size = True, 2
    assert "--sequence-parallel" in str(fuse_norms(run.layers, BACKEND, stock_of))


def test_a_backend_without_kernels_fuses_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    convert_model([gpt(hidden_size=512)], SnipConfig(enabled=True, fusions="auto"))
    said = capsys.readouterr().out
    assert "no RMSNorm (the reference GEMMs have no kernel for torch.bfloat16 and 512 features)" in said


# -- the comparison before training ------------------------------------------------------------------------------------
def module() -> torch.nn.Module:
    norm = torch.nn.RMSNorm(256, eps=1e-5).bfloat16()
    norm.__class__ = OrderedNorm
    return norm


def other_order(x: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    other = RMSNorm(Order(vector=8, warps=1, centred=True), 1e-5)
    rs = rmsnorm.reciprocal_rms(x, other)
    return rmsnorm.rmsnorm(x, gamma, rs, other), rs


def rounded_twice(x: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rs = rmsnorm.reciprocal_rms(x, NORM)
    return (x * rs[:, None].to(x.dtype)) * gamma, rs


def one_unit_more(d: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rs: torch.Tensor) -> Any:
    return STOCK.backward(d, x, gamma, torch.nextafter(rs, torch.full_like(rs, torch.inf)))


@pytest.mark.parametrize(
    ("stock", "expected"),
    [
        (STOCK, None),
        (StockNorm(NORM, other_order, STOCK.backward), "the reciprocal RMS of"),
        (StockNorm(NORM, rounded_twice, STOCK.backward), "the norm itself"),
        (StockNorm(NORM, STOCK.forward, one_unit_more), "the gradient"),
    ],
)
def test_the_norm_is_compared(stock: StockNorm, expected: str | None) -> None:
    found = difference(BACKEND, module(), stock, CPU, torch.bfloat16, rows=1024)
    assert found is None if expected is None else str(found).startswith(expected)


def test_another_result_is_noticed() -> None:
    """With the same reciprocals, but rounded before the weight is multiplied."""

    def quantize(x: torch.Tensor, gamma: torch.Tensor, rs: torch.Tensor, norm: RMSNorm, *formats: Any) -> Any:
        return packed.quantize_tiles((x.float() * rs[:, None]).to(x.dtype) * gamma, *formats)

    norms = SimpleNamespace(fits=rmsnorm.fits, reciprocal_rms=rmsnorm.reciprocal_rms, quantize_rmsnorm=quantize)
    backend = HopperBackend(packed, Products(), norms=norms)
    assert difference(backend, module(), STOCK, CPU, torch.bfloat16, rows=256) == "the result"


def test_a_failing_comparison_fuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> str:
        raise TypeError("rmsnorm_fwd(): incompatible function arguments")

    monkeypatch.setattr(fused_norm, "difference", fails)
    assert "the comparison fails: rmsnorm_fwd()" in str(Run(MAPS["fp8"], fuse=True).fused)


def test_torch_s_norm_is_known() -> None:
    """Its functions exist in this torch. On a CPU its order is another one, which the comparison notices."""
    norm = torch.nn.RMSNorm(512, eps=1e-6).bfloat16()
    stock = stock_norm(norm)
    assert stock.norm == RMSNorm(TORCH, 1e-6)
    y, rs = stock.forward(*(torch.ones(size, dtype=torch.bfloat16) for size in ((4, 512), 512)))
    assert y.shape == (4, 512)
    assert rs.shape == (4,)
    found = difference(BACKEND, norm, stock, CPU, torch.bfloat16, rows=512)
    assert found is not None
    assert "reciprocal RMS" in found
    assert difference(REFERENCE, norm, stock, CPU, torch.bfloat16, rows=4) is not None


@pytest.mark.parametrize(
    "norm", [torch.nn.LayerNorm(512), torch.nn.RMSNorm(512), torch.nn.RMSNorm(512, eps=1e-5, elementwise_affine=False)]
)
def test_other_modules_are_not_known(norm: torch.nn.Module) -> None:
    with pytest.raises(LookupError):
        stock_norm(norm)
