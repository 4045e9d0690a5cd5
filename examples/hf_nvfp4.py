"""Pretrains a small Llama of Hugging Face's under NVFP4 and shows which of its linears matter. Two minutes on a CPU.

    python examples/hf_nvfp4.py --dir runs/hf        # --steps 40 for a short one

It ends with the path of a page that shows the map as a picture.
Text: bytes of Python's standard library. Formats are emulated where the card does not have them, with the same numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from snip_megatron.plain import convert
from snip_megatron.reporting.report import write_report
from snip_megatron.reporting.sensitivity import lines, rank_run
from snip_megatron.runtime.run_data import load_run

LENGTH, BATCH = 128, 8


def text() -> Tensor:
    """Bytes of modules of the standard library, uint8."""
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def batch(data: Tensor, step: int) -> Tensor:
    """Tokens [BATCH, LENGTH] of a step."""
    starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[start : start + LENGTH] for start in starts.tolist()]).long()


def main() -> None:
    """Train, and show what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--budget", default="fp4=0.75", help="share of the linears' FLOPs in NVFP4")
    parser.add_argument("--dir", type=Path, default=Path("runs/hf"), help="run directory, for snip report")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first = args.steps * 2 // 5
    snip = convert(
        model,
        optimizer,
        budget=args.budget,
        formats="mxfp8,nvfp4",
        first_update=first,
        update_interval=first,
        steps=args.steps,
        dir=str(args.dir),
        overwrite=True,
    )
    data = text()
    for step in range(args.steps):
        tokens = batch(data, step).to(device)

        def loss(tokens: Tensor = tokens) -> Tensor:
            return model(input_ids=tokens, labels=tokens).loss

        if snip.step(loss):
            print(f"step {step}: map {snip.map.version}, {snip.map.achieved:.0%} of the FLOPs in NVFP4", flush=True)
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        snip.record(value)
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {value.item():.3f}", flush=True)
    print(*lines(rank_run(load_run(args.dir)), "nats of training loss"), sep="\n")
    print(f"the map as a picture: {write_report(args.dir)}")


if __name__ == "__main__":
    main()
