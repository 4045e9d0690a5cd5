"""A small transformer in a plain torch loop, with SNIP in four lines, marked ``SNIP``. Runs on a CPU in seconds.

python examples/plain_loop.py --steps 60
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

from snip_megatron.plain import convert

HIDDEN, HEADS, LENGTH, VOCABULARY = 64, 4, 32, 64


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm2, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256), nn.Linear(256, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] to the same."""
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A language model of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, tokens, vocabulary]."""
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(steps: int, size: int = 8) -> list[Tensor]:
    """Sequences that count in steps of 1 to 7, [size, LENGTH + 1] each."""
    generator = torch.Generator().manual_seed(1)
    start, stride = (torch.randint(1, 8, (steps, size, 1), generator=generator) for _ in range(2))
    return list((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY)


def main() -> None:
    """Train, and print the losses and the shares of FP4."""
    parser = argparse.ArgumentParser(description="a plain torch loop under SNIP")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--budget", default="fp4=0.75")
    parser.add_argument("--dir", help="run directory; without one nothing is written")
    args = parser.parse_args()
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    snip = convert(model, optimizer, budget=args.budget, first_update=10, update_interval=25, dir=args.dir)  # SNIP 1

    for step, batch in enumerate(batches(args.steps)):

        def loss(batch: Tensor = batch) -> Tensor:
            logits = model(batch[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

        if snip.step(loss):  # SNIP 2
            print(f"step {step}: map {snip.map.version}, {snip.map.achieved:.0%} of the FLOPs in fp4")
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        snip.record(value)  # SNIP 3
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {value.item():.3f}")
    snip.close()  # SNIP 4
    print(snip.map)


if __name__ == "__main__":
    main()
