"""A quantised linear without Megatron, for tests on a GPU."""

import torch
from torch import Tensor

from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import LinearState, StepContext
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.precision import Formats
from tests.unit.handles import handle_of


class Linear(torch.nn.Module):
    """A weight with DDP's attributes and its handle."""

    def __init__(
        self,
        backend: GemmBackend,
        n: int,
        k: int,
        formats: Formats,
        *,
        main_grad: Tensor | None = None,
        delays: bool = False,
    ) -> None:
        super().__init__()
        generator = torch.Generator(device="cuda").manual_seed(n + k)
        weight = torch.randn(n, k, device="cuda", generator=generator).mul_(k**-0.5).bfloat16()
        self.weight = torch.nn.Parameter(weight)
        self.weight.main_grad = torch.zeros(n, k, device="cuda") if main_grad is None else main_grad
        self.weight.grad_added_to_main_grad = False
        self.handle = handle_of(
            "decoder.layers.3.mlp.linear_fc2", n, k, StepContext(backend=backend, seed=11), parallel="row",
            module=self, state=LinearState(formats=formats), delays=delays,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        call = LinearCall(self.handle)
        y: Tensor = QuantizedLinear.apply(x, self.weight, None, call)
        return y
