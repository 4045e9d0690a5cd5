"""convert_model on a real GPT model of Megatron, one rank, and which formats a run may ask a GEMM backend for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_names import dense_names
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from small_decoder import DENSE, dense, identity
from torch_attention import TorchAttention

from snip_megatron.megatron import convert_model
from snip_megatron.megatron.compat.patches import token_prediction_repair
from snip_megatron.megatron.host import segments_of
from snip_megatron.megatron.linears import SnipColumnParallelLinear, SnipRowParallelLinear
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("model_parallel_of_one")

CONFIG = SnipConfig(enabled=True, seed=99)
# hidden 64, 4 heads of 16, 2 query groups, gated MLP of 96
SHAPES = {
    "self_attention.linear_qkv": (128, 64),
    "self_attention.linear_proj": (64, 64),
    "mlp.linear_fc1": (192, 64),
    "mlp.linear_fc2": (64, 96),
}


def linears(chunk: GPTModel) -> dict[str, Any]:
    modules = dict(chunk.named_modules())
    return {name: modules[name] for name in dense_names(2)}


def test_every_decoder_linear_and_nothing_else_is_converted() -> None:
    chunk = dense()
    before = identity(chunk)
    registry = convert_model([chunk], CONFIG)
    assert identity(chunk) == before
    for name, module in linears(chunk).items():
        column = name.endswith(("linear_qkv", "linear_fc1"))
        assert type(module) is (SnipColumnParallelLinear if column else SnipRowParallelLinear)
        handle = registry[name]
        assert handle is module.snip
        assert handle.weight is module.weight
        assert (handle.name, handle.parallel) == (name, "column" if column else "row")
        assert (handle.n, handle.k) == SHAPES[handle.id.path] == tuple(module.weight.shape)
        assert handle.out_features.tolist() == list(range(handle.n))
        assert handle.in_features.tolist() == list(range(handle.k))
        assert handle.is_stock
    assert len(registry) == len(registry.names) == 8
    assert registry.context.seed == 99
    assert type(chunk.output_layer) is ColumnParallelLinear


@pytest.fixture(params=[False, True], ids=["sequential", "grouped"])
def experts_model(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> GPTModel:
    """The second layer is a mixture of four experts of 32 each, of which a token goes through two."""
    # Megatron's dispatcher of tokens asks for the current CUDA device and a stream.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: None)
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_layer_freq": [0, 1]}
    experts |= {"moe_token_dispatcher_type": "alltoall", "moe_shared_expert_intermediate_size": 48}
    # Local layers run experts one by one all the same.
    config = TransformerConfig(**DENSE | experts, moe_grouped_gemm=request.param)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return GPTModel(config, spec, vocab_size=128, max_sequence_length=32, position_embedding_type="rope")


def test_each_expert_is_converted_under_one_name(experts_model: GPTModel) -> None:
    chunk = experts_model
    keys = list(chunk.state_dict())
    registry = convert_model([chunk], CONFIG)
    mlp = chunk.decoder.layers[1].mlp
    experts = [row for row in registry.rows if row.experts == 4 and row.active == 2]
    assert [(row.name, row.sub_block) for row in experts] == [
        ("decoder.layers.1.mlp.experts.linear_fc1", 3),
        ("decoder.layers.1.mlp.experts.linear_fc2", 3),
    ]
    assert len(registry.names) == 10
    assert len(registry) == 8 + 2 * 4
    for kind, cls, shape in (
        ("linear_fc1", SnipColumnParallelLinear, (64, 64)),
        ("linear_fc2", SnipRowParallelLinear, (64, 32)),
    ):
        handles = [h for h in registry if h.name == f"decoder.layers.1.mlp.experts.{kind}"]
        assert [h.expert for h in handles] == [0, 1, 2, 3]
        for handle, expert in zip(handles, mlp.experts.local_experts, strict=True):
            module = getattr(expert, kind)
            assert type(module) is cls
            assert handle.weight is module.weight
            assert (handle.n, handle.k) == shape == tuple(module.weight.shape)
    assert mlp.shared_experts.linear_fc1.snip is registry["decoder.layers.1.mlp.shared_experts.linear_fc1"]
    assert list(chunk.state_dict()) == keys


class FusedLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Stands for a linear of another library: a subclass must not be taken for its base."""


def test_other_linears_stay_as_they_are_and_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A subclass, a frozen linear, and one of torch in a layer."""
    chunk = dense()
    other, frozen, side = "decoder.layers.1.mlp.linear_fc1", "decoder.layers.0.self_attention.linear_proj", "mlp.side"
    linears(chunk)[other].__class__ = FusedLinear
    linears(chunk)[frozen].weight.requires_grad_(False)
    chunk.decoder.layers[1].mlp.side = torch.nn.Linear(64, 32)
    registry = convert_model([chunk], CONFIG)
    no_form = "no quantised form of {}"
    side = f"decoder.layers.1.{side}"
    expected = {other: no_form.format("FusedLinear"), frozen: "frozen", side: no_form.format("Linear")}
    assert registry.stock == expected
    assert type(linears(chunk)[frozen]) is RowParallelLinear
    assert [(row.n, row.k) for row in registry.uncovered if row.name == side] == [(32, 64)]
    assert len(registry) == 6
    assert not set(expected) & set(registry.names)
    shown = capsys.readouterr().out
    for name, why in expected.items():
        assert f"{name.replace('.0.', '.*.').replace('.1.', '.*.')} of 1 layers stays bf16 ({why})" in shown


def test_latent_attention_and_token_prediction_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of multi-latent attention and one of multi-token prediction, of Megatron's own classes."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    for name, function in token_prediction_repair().items():
        monkeypatch.setattr(multi_token_prediction, name, function)
    torch.manual_seed(0)
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    sizes |= {key: value for key, value in DENSE.items() if key != "num_query_groups"}
    config = MLATransformerConfig(**sizes, multi_latent_attention=True, mtp_num_layers=1, rope_type="rope")
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True)
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    chunk = GPTModel(config, spec, 128, 32, position_embedding_type="rope", mtp_block_spec=mtp)
    keys = list(chunk.state_dict())
    registry = convert_model([chunk], CONFIG)
    attention = [f"self_attention.linear_{part}" for part in ("q_down_proj", "kv_down_proj", "q_up_proj", "kv_up_proj")]
    layer = [*attention, "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"]
    prefixes = ("decoder.layers.0.", "decoder.layers.1.", "mtp.layers.0.mtp_model_layer.")
    names = [f"{prefix}{path}" for prefix in prefixes for path in layer] + ["mtp.layers.0.eh_proj"]
    assert sorted(registry.names) == sorted(names)
    assert not registry.stock
    modules = dict(chunk.named_modules())
    assert all(modules[name].snip is registry[name] for name in names)
    assert list(chunk.state_dict()) == keys
    blocks = {row.name: row.sub_block for row in registry.rows}
    assert blocks["decoder.layers.1.mlp.linear_fc1"] == 3
    assert blocks["mtp.layers.0.eh_proj"] == 5  # after the end of the decoder's stream
    assert blocks["mtp.layers.0.mtp_model_layer.mlp.linear_fc2"] == 7
    segments = segments_of(chunk, registry.rows)
    assert [[reader.boundary for reader in segment.readers] for segment in segments] == [[0, 1, 2, 3], [5, 6, 7]]
    assert [segment.is_last for segment in segments] == [True, True]


NVFP4, MXFP8, BF16 = Format.NVFP4, Format.MXFP8, Format.BF16


def test_formats_of_a_configuration(tmp_path: Path) -> None:
    written = tmp_path / "map.json"
    written.write_text(PrecisionMap(choices={"decoder.layers.0.mlp.linear_fc1": MXFP8}).to_json())
    pinned = ("*.linear_fc1=bf16", "*.linear_fc2=fp8")
    expected = {
        SnipConfig(): {Format.FP8, Format.FP4},
        SnipConfig(formats=("mxfp8", "nvfp4"), pin=pinned): {MXFP8, NVFP4, BF16, Format.FP8},
        SnipConfig(map=str(written)): {MXFP8},
        SnipConfig(policy="uniform-fp4"): {Format.FP4},
        SnipConfig(policy="uniform-fp4", formats=("mxfp8", "nvfp4"), pin=("*.linear_fc1=bf16",)): {NVFP4, BF16},
        SnipConfig(policy="bf16"): {BF16},
        SnipConfig(policy="nvidia"): {NVFP4, Format.NVFP4_HADAMARD, BF16},
    }
    for config, formats in expected.items():
        assert config.formats_in_use() == formats
    with RunDirectory(tmp_path / "run", {}, overwrite=False, resume_step=None) as run:
        for step, fmt in ((3, NVFP4), (7, BF16)):
            run.event(step, "adopt", version=step)
            run.write("maps", step, PrecisionMap(choices={"decoder.layers.0.mlp.linear_fc1": fmt}).to_json())
    assert SnipConfig(replay=str(tmp_path / "run")).formats_in_use() == {NVFP4, BF16}
