"""A real MLP of Megatron with SwiGLU fused into quantisation: the bits of the unfused sequence, in every combination.

The fused functions are those of ``quantize/swiglu.py`` in torch; kernels have the same interface and are compared
elsewhere. Unfused is the same MLP with SwiGLU as an autograd function of its own between the two linears.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.mlp import MLP
from small_decoder import dense
from torch.utils.checkpoint import checkpoint

from snip_megatron.layers import LinearRegistry
from snip_megatron.layers.autograd import PrequantizedTensor
from snip_megatron.layers.registry import DeviceStep
from snip_megatron.layers.swiglu import SwiGLU
from snip_megatron.megatron import convert_model
from snip_megatron.megatron.linears import SnipMLP, fuse_swiglu
from snip_megatron.numerics.products.check import decibel
from snip_megatron.numerics.quantize import swiglu
from snip_megatron.numerics.quantize.kernels import swiglu as kernels
from snip_megatron.precision import Format, Formats, Gemm, PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig
from tests.unit.numerics.products.products import hopper

pytestmark = pytest.mark.usefixtures("model_parallel_of_one")

STOCK = SwiGLU(swiglu.swiglu, swiglu.swiglu_gradient)
BF16, FP8, FP4, TENSOR, NVFP4 = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR, Format.NVFP4
FC1, FC2 = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2"
MAPS: dict[str, tuple[Formats, Formats]] = {  # of fc1 and of fc2: (fprop, dgrad, wgrad)
    "fp8": ((FP8,) * 3, (FP8,) * 3),
    "mixed": ((FP8, FP4, FP8), (FP4, FP8, FP8)),
    "fc1 alone": ((FP8, FP8, FP4), (BF16,) * 3),
    "fc2 alone": ((BF16,) * 3, (FP8, FP4, FP4)),
    "forward alone": ((FP8, BF16, FP8), (FP8, FP8, FP4)),
    "backward alone": ((BF16, FP4, FP4), (FP8, FP8, BF16)),
    "tensor": ((TENSOR,) * 3, (TENSOR,) * 3),
    "tensor and tiles": ((FP8, FP4, TENSOR), (TENSOR, FP8, FP8)),
    "neither": ((TENSOR, TENSOR, NVFP4), (NVFP4, TENSOR, TENSOR)),
}
FORWARD = {
    **dict.fromkeys(("fp8", "mixed", "fc2 alone", "forward alone"), "quantize_swiglu"),
    **dict.fromkeys(("tensor", "tensor and tiles"), "swiglu_with_amax"),
}
BACKWARD = {
    **dict.fromkeys(("fp8", "mixed", "fc1 alone", "backward alone"), "quantize_swiglu_gradient"),
    **dict.fromkeys(("tensor", "tensor and tiles"), "swiglu_with_amax"),
}


class Counting:
    """The functions of ``quantize/swiglu.py``, which note what they are asked for, where the kernels would run."""

    fits = staticmethod(kernels.fits)

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            self.called.append(name)
            return getattr(swiglu, name)(*arguments, **options)

        return noted


class Unfused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return STOCK.forward(y.view(-1, y.shape[-1])).view(*y.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        (y,), g = ctx.saved_tensors, grad_outputs[0]
        return STOCK.backward(g.reshape(-1, g.shape[-1]), y.view(-1, y.shape[-1])).view(y.shape)


def unfused(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    y, _ = mlp.linear_fc1(x)
    return mlp.linear_fc2(Unfused.apply(y))[0]  # type: ignore[no-any-return,no-untyped-call]


def fused(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return mlp(x, padding_mask=None)[0]  # type: ignore[no-any-return]  # as Megatron's layer calls it


def recomputed(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(mlp, x, use_reentrant=True)[0]  # type: ignore[no-any-return]


ACTIVATIONS = Counting()
BACKEND = hopper(activations=ACTIVATIONS)


class Run:
    """One layer whose MLP is fused, under a map, and what was fused."""

    def __init__(self, chosen: tuple[Formats, Formats], *, device: bool = False, **changes: Any) -> None:
        model = gpt(**changes)
        self.registry: LinearRegistry = convert_model([model], SnipConfig(enabled=True, seed=7))
        self.registry.context.backend = BACKEND
        self.layers = list(model.decoder.layers)
        self.mlp: Any = self.layers[0].mlp
        self.fused = fuse_swiglu(self.layers, BACKEND, STOCK)
        ACTIVATIONS.called.clear()
        choices = {
            f"{name}:{gemm.value}": fmt
            for name in self.registry.names
            for gemm, fmt in zip(Gemm, dict(zip((FC1, FC2), chosen, strict=True)).get(name, (BF16,) * 3), strict=True)
        }
        self.registry.adopt(PrecisionMap(choices=choices))
        for handle in self.registry:
            handle.weight.main_grad = torch.zeros(handle.weight.shape)  # type: ignore[attr-defined]
            handle.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        if device:
            self.registry.device = DeviceStep(list(self.registry), [0] * len(self.registry), torch.device("cpu"))

    def step(self, forward: Callable[[Any, torch.Tensor], torch.Tensor] = fused) -> list[torch.Tensor]:
        """Two microbatches: results, input gradients and accumulated weight gradients."""
        self.registry.start_step(3)
        result = []
        for microbatch in range(2):
            if self.registry.device is not None and microbatch == 1:
                self.registry.device.weights_are_current(0)
            x, g = tensors(microbatch)
            y = forward(self.mlp, x)
            y.backward(g)
            assert x.grad is not None
            result += [y.detach(), x.grad]
        self.registry.end_step()
        for linear in (self.mlp.linear_fc1, self.mlp.linear_fc2):
            weight = linear.weight
            result.append(weight.main_grad.clone() if weight.grad_added_to_main_grad else weight.grad)
            weight.main_grad.zero_()
            weight.grad, weight.grad_added_to_main_grad = None, False
        return result


def gpt(**changes: Any) -> GPTModel:
    sizes = {"num_layers": 1, "ffn_hidden_size": 128, "bias_activation_fusion": True, "params_dtype": torch.bfloat16}
    return dense(**sizes | changes)


def tensors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(80, 2, 64, generator=generator) for _ in range(2))
    return (40 * x).to(torch.bfloat16).requires_grad_(), (1e-3 * g).to(torch.bfloat16)


def assert_alike(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype is b.dtype
        assert decibel(b.double(), a) > 40


@pytest.mark.parametrize("device", [False, True], ids=["counted on the host", "counted on the device"])
@pytest.mark.parametrize("chosen", MAPS)
def test_results_are_those_of_the_unfused_sequence(chosen: str, device: bool) -> None:
    run, plain = Run(MAPS[chosen], device=device), Run(MAPS[chosen], device=device)
    assert run.fused == "SwiGLU of 1 layers"
    expected = plain.step(unfused)
    assert not ACTIVATIONS.called
    assert_alike(run.step(), expected)
    assert set(ACTIVATIONS.called) == {kinds[chosen] for kinds in (FORWARD, BACKWARD) if chosen in kinds}


@pytest.mark.parametrize("forward", [fused, recomputed])
def test_repeated_steps_and_recomputation(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    run, plain = Run(MAPS["mixed"], num_layers=2), Run(MAPS["mixed"], num_layers=2)
    assert (type(run.mlp), run.fused) == (SnipMLP, "SwiGLU of 2 layers")
    assert set(run.mlp.state_dict()) == set(gpt().decoder.layers[0].mlp.state_dict())
    for _ in range(2):
        assert_alike(run.step(forward), plain.step(unfused))


def test_gradients_are_those_of_float64() -> None:
    run = Run(MAPS["fp8"])
    x, g = tensors(0)
    fused(run.mlp, x).backward(g)
    exact, grad = x.detach().double().requires_grad_(), g.double()
    first, second = (linear.weight.detach().double() for linear in (run.mlp.linear_fc1, run.mlp.linear_fc2))
    first.requires_grad_(), second.requires_grad_()
    gate, up = (exact @ first.t()).chunk(2, -1)
    (torch.nn.functional.silu(gate) * up @ second.t()).backward(grad)
    main = [linear.weight.main_grad for linear in (run.mlp.linear_fc1, run.mlp.linear_fc2)]
    for actual, expected in zip((x.grad, *main), (exact.grad, first.grad, second.grad), strict=True):
        assert (actual.double() - expected).norm() < 10 ** (-22 / 20) * expected.norm()  # 22 dB


def test_validation_quantises_for_fprop_alone() -> None:
    run, plain = Run(MAPS["fp8"]), Run(MAPS["fp8"])
    with torch.no_grad():
        assert torch.equal(fused(run.mlp, tensors(0)[0]), unfused(plain.mlp, tensors(0)[0]))
    assert ACTIVATIONS.called == ["quantize_swiglu"]
    run.registry.context.bf16_eval = True
    run.mlp.eval()
    with torch.no_grad():
        fused(run.mlp, tensors(0)[0])
    assert ACTIVATIONS.called == ["quantize_swiglu"]


def test_a_use_of_what_lies_between_the_linears_is_noticed() -> None:
    """The tensor between them has no numbers, and a second gradient of fc1's output is an error."""
    run = Run(MAPS["fp8"])
    inputs: list[torch.Tensor] = []
    run.mlp.linear_fc2.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    fused(run.mlp, tensors(0)[0])
    assert isinstance(inputs[0], PrequantizedTensor)
    with pytest.raises(SnipError, match="--snip-fusions none"):
        inputs[0].isnan()
    extra: list[torch.Tensor] = []
    run.mlp.linear_fc1.register_forward_hook(lambda *arguments: extra.append(arguments[2][0]))
    x, g = tensors(0)
    y = fused(run.mlp, x)
    with pytest.raises(SnipError, match="--snip-fusions none"):
        torch.autograd.backward([y, extra[0].sum()], [g, torch.ones((), dtype=torch.bfloat16)])


def test_a_hook_that_replaces_what_lies_between_the_linears_is_refused() -> None:
    """torch passes another tensor to a linear with such a hook."""
    run = Run(MAPS["fp8"])
    hook = run.mlp.linear_fc2.register_full_backward_hook(lambda *arguments: None)
    with pytest.raises(SnipError, match=r"a hook.*--snip-fusions none"):
        fused(run.mlp, tensors(0)[0])
    hook.remove()
    assert fused(run.mlp, tensors(0)[0]).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"activation_func": torch.nn.functional.gelu}, "the activation is not SwiGLU"),
        ({"add_bias_linear": True}, "linears have a bias"),
        ({"bias_activation_fusion": False}, "--no-bias-swiglu-fusion"),
    ],
)
def test_other_mlps_stay_unfused(changes: dict[str, Any], why: str) -> None:
    run = Run(MAPS["fp8"], **changes)
    assert type(run.mlp) is MLP
    assert run.fused.startswith("no SwiGLU")
    assert why in run.fused
