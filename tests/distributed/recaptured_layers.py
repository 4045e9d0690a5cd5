"""Megatron's helper of Transformer Engine's graphs over a real decoder on the CPU; prints what each capture was given.

Transformer Engine's function is replaced: it captures nothing and returns objects that know the capture they are from.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from snip_megatron.megatron import startup

LAYERS = 6


class Graph:
    """What a capture returns for a layer."""

    def __init__(self, capture: int) -> None:
        self.capture = capture
        self.live = True

    def reset(self) -> None:
        self.live = False


def main() -> None:
    startup.prepare([], [])
    import torch
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import cuda_graphs as core
    from megatron.core.transformer.transformer_config import TransformerConfig

    from snip_megatron.megatron.compat import te_graphs

    calls: list[dict[str, Any]] = []

    def make(callables: Any, sample_args: Any, **named: Any) -> Any:
        order = {name: named[name] for name in ("_order", "_num_layers_per_chunk", "num_warmup_iters")}
        samples = [sorted(kwargs) for kwargs in named["sample_kwargs"]]
        calls.append({"layers": [each.layer_number for each in callables], "samples": samples, **order})
        return tuple(Graph(len(calls)) for _ in sample_args)

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, 2, 1, 1)
        core.HAVE_TE_GRAPHS, core.is_te_min_version = True, lambda *version: True
        core.make_graphed_callables = make
        core._layer_is_graphable = lambda layer, config: True
        te_graphs.training.should_disable_forward_pre_hook = lambda args: False
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True,
        )  # fmt: skip
        chunk = GPTModel(config, get_gpt_layer_local_spec(), 32, 8, position_embedding_type="rope")
        chunk.zero_grad_buffer = lambda: None
        config.cuda_graph_impl = "transformer_engine"
        layers = list(chunk.decoder.layers)

        graphs = te_graphs.TransformerEngineGraphs()
        helper = core.TECudaGraphHelper([chunk], config, 8, 2)
        helper.create_cudagraphs()
        first = [layer.cuda_graphs[0] for layer in layers]
        graphs._layer_bytes = 1.0
        torch.cuda.mem_get_info = lambda: (1 << 20, 1 << 20)
        chosen = graphs.choose([layers[4].mlp.linear_fc1, layers[1].self_attention.linear_qkv])
        graphs.renew([chunk], None, chosen)
        captured = [[layer.cuda_graphs[0].capture for layer in layers]]
        live = [graph.live for graph in first]
        _, fields = graphs.take()
        graphs.renew([chunk], None)
        captured.append([layer.cuda_graphs[0].capture for layer in layers])
        made = bool(helper.graphs_created() and helper.capture_finished())
        print(json.dumps({"calls": calls, "captured": captured, "live": live, "made": made, **fields}))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
