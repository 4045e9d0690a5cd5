"""A Llama small enough to try every option, shaped like Megatron's: fused qkv, fused fc1 (gate and up), untied head.

Every decoder linear runs its three GEMMs through :class:`QuantisedMatmul`, each in its own format, and can record its
operands; the residual stream can be recorded and disturbed at every boundary.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snip_megatron.quantization import fake_quantize

WIDTH, HEADS, FFN, VOCAB, SEQUENCE, BLOCKS = 128, 4, 256, 256, 64, 4
BETAS, EPS = (0.9, 0.95), 1e-8


def quantise(x: Tensor, fmt: str, axis: str, seed: int | None = None) -> Tensor:
    """Round trip in ``fmt``: tiles along the last dimension ("rows") or the first ("columns"), or a "block".

    A seed asks for the rounding of gradients: stochastic in fp4.
    """
    along, block = (0 if axis == "columns" else -1), axis == "block"
    if seed is not None and fmt == "fp4":
        return fake_quantize(x, fmt, axis=along, block=block, rounding="stochastic", seed=seed)
    return fake_quantize(x, fmt, axis=along, block=block)


class QuantisedMatmul(torch.autograd.Function):
    """Y = X·Wᵀ with each of the three GEMMs in the format that ``linear.formats`` names (absent: exact)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, linear: SmallLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.linear = linear
        if linear.record is not None:
            linear.record["x"] = x.detach()
        return linear.output(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        linear = ctx.linear
        if linear.record is not None:
            linear.record["g"] = grad.detach().clone()
        d, w = linear.formats.get("dgrad"), linear.formats.get("wgrad")
        dx = quantise(grad, d, "rows", linear.seed) @ quantise(weight, d, "block") if d else grad @ weight
        dw = quantise(grad, w, "columns", linear.seed).t() @ quantise(x, w, "columns") if w else grad.t() @ x
        return dx, dw, None


class SmallLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)
        self.formats: dict[str, str] = {}
        self.seed = 0
        self.record: dict[str, Tensor] | None = None

    def output(self, x: Tensor) -> Tensor:
        """Y of [tokens, inputs] in the format of fprop."""
        fmt = self.formats.get("fprop")
        if fmt is None:
            return x @ self.weight.t()
        return quantise(x, fmt, "rows") @ quantise(self.weight.detach(), fmt, "block").t()

    def forward(self, x: Tensor) -> Tensor:
        flat = QuantisedMatmul.apply(x.reshape(-1, x.shape[-1]), self.weight, self)
        return flat.view(*x.shape[:-1], -1)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return normalised(x) * self.weight


def normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


@dataclass
class Stream:
    """What passes the residual boundaries: recorded activations and gradients, and noise to add going forward."""

    activations: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    forward_noise: dict[int, Tensor] = field(default_factory=dict)
    backward_noise: dict[int, Tensor] = field(default_factory=dict)
    final_gradient: Tensor = field(default_factory=lambda: torch.empty(0))

    def keep_final_gradient(self, gradient: Tensor) -> None:
        """Hook on the final norm's output."""
        self.final_gradient = gradient.detach()


class Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h: Tensor, stream: Stream, index: int) -> Tensor:
        ctx.stream, ctx.index = stream, index
        if index in stream.forward_noise:
            h = h + stream.forward_noise[index]
        stream.activations[index] = h.detach()
        return h.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.index in ctx.stream.backward_noise:
            grad = grad + ctx.stream.backward_noise[ctx.index]
        ctx.stream.gradients[ctx.index] = grad.detach().clone()
        return grad, None, None


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of [batch, heads, positions, width]."""
    positions, width = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(positions)[:, None] * frequency
    even, odd = x[..., : width // 2], x[..., width // 2 :]
    return torch.cat([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1)


class Block(nn.Module):
    def __init__(self, out_std: float) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = Norm(), Norm()
        self.qkv, self.proj = SmallLinear(WIDTH, 3 * WIDTH, 0.02), SmallLinear(WIDTH, WIDTH, out_std)
        self.fc1, self.fc2 = SmallLinear(WIDTH, 2 * FFN, 0.02), SmallLinear(FFN, WIDTH, out_std)

    def attention(self, h: Tensor) -> Tensor:
        batch, positions, _ = h.shape
        qkv = self.qkv(self.input_layernorm(h)).view(batch, positions, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, positions, WIDTH))

    def mlp(self, h: Tensor) -> Tensor:
        gate, up = self.fc1(self.pre_mlp_layernorm(h)).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


class SmallLlama(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(0.02 / math.sqrt(2 * blocks)) for _ in range(blocks))
        self.final_layernorm = Norm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def linears(self) -> dict[str, SmallLinear]:
        """The decoder's linears by global name, in the order of the forward pass."""
        named = {}
        for i, block in enumerate(self.blocks):
            parts = {"self_attention.linear_qkv": block.qkv, "self_attention.linear_proj": block.proj}
            parts |= {"mlp.linear_fc1": block.fc1, "mlp.linear_fc2": block.fc2}
            named |= {f"decoder.layers.{i}.{kind}": linear for kind, linear in parts.items()}
        return named

    def loss(self, tokens: Tensor, labels: Tensor, stream: Stream | None = None) -> Tensor:
        """Mean token loss."""
        stream = stream or Stream()
        h = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            h = Boundary.apply(h, stream, 2 * i)
            h = h + block.attention(h)
            h = Boundary.apply(h, stream, 2 * i + 1)
            h = h + block.mlp(h)
        h = Boundary.apply(h, stream, 2 * len(self.blocks))
        normed = self.final_layernorm(h)
        if normed.requires_grad:
            normed.register_hook(stream.keep_final_gradient)
        logits = self.head(normed)
        return F.cross_entropy(logits.view(-1, VOCAB), labels.reshape(-1))


@dataclass
class Trained:
    """A model in mid-training: the weights, AdamW's moments by parameter name, and the step that comes next."""

    model: SmallLlama
    moments: dict[str, tuple[Tensor, Tensor]]
    next_step: int
    losses: list[float]


def corpus() -> Tensor:
    """Bytes of the standard library's sources."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(f.read_bytes() for f in files)[:4_000_000]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch(data: Tensor, sequences: int, seed: int) -> tuple[Tensor, Tensor]:
    start = torch.randint(0, len(data) - SEQUENCE - 1, (sequences,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([data[i : i + SEQUENCE + 1] for i in start]).long()
    return rows[:, :-1], rows[:, 1:]


def train(data: Tensor, steps: int, sequences: int, seed: int = 0, blocks: int = BLOCKS, lr: float = 2e-3) -> Trained:
    torch.manual_seed(seed)
    model = SmallLlama(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, eps=EPS, weight_decay=0.1)
    losses = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 20)
        loss = model.loss(*batch(data, sequences, 1000 * (seed + 1) + step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    states = {n: optimizer.state[p] for n, p in model.named_parameters()}
    moments = {n: (state["exp_avg"], state["exp_avg_sq"]) for n, state in states.items()}
    return Trained(model, moments, steps + 1, losses)


def adamw_direction(grad: Tensor, moments: tuple[Tensor, Tensor], step: int) -> Tensor:
    """u(g): AdamW's update at ``step`` without learning rate and decay."""
    (b1, b2), (m, v) = BETAS, moments
    m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad * grad
    return (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + EPS)
