"""Pretrains a small Llama of Hugging Face's under NVFP4 and shows which of its linears matter. Two minutes on a CPU.

    python examples/hf_nvfp4.py --dir runs/hf        # --steps 40 for a short one

It ends with the path of a page that shows the map as a picture.
Text: bytes of Python's standard library. Formats are emulated where the card does not have them, with the same numbers.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from snip_megatron.plain import PlainSnip, convert
from snip_megatron.reporting.report import write_report

LENGTH, BATCH = 128, 8


def text() -> Tensor:
    """Bytes of modules of the standard library, uint8."""
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def batch(data: Tensor, step: int) -> Tensor:
    """Tokens [BATCH, LENGTH] of a step."""
    starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[start : start + LENGTH] for start in starts.tolist()]).long()


def show(snip: PlainSnip, folder: Path) -> None:
    """Print the predicted harm of NVFP4 by kind of linear, summed over blocks, with the share that the map gives it."""
    scores = json.loads(max((folder / "scores").glob("*.json"), key=lambda path: path.stat().st_mtime).read_text())
    harm: dict[str, float] = defaultdict(float)
    four_bits: dict[str, list[bool]] = defaultdict(list)
    for option, by_format in scores["scores"].items():
        kind = option.split(".", 3)[3]
        harm[kind] += by_format["nvfp4"]["q"]
        four_bits[kind].append(snip.map.choices[option].value == "nvfp4")
    print("harm of NVFP4     by GEMM, summed over blocks              blocks in NVFP4")
    worst = max(harm.values())
    for kind, value in sorted(harm.items(), key=lambda item: -item[1]):
        bar = "#" * round(24 * value / worst)
        print(f"{value:9.2e}  {kind:30} {bar:24} {sum(four_bits[kind])}/{len(four_bits[kind])}")


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
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {value.item():.3f}", flush=True)
    show(snip, args.dir)
    print(f"the map as a picture: {write_report(args.dir)}")


if __name__ == "__main__":
    main()
