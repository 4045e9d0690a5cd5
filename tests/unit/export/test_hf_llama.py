"""snip export --format hf: joining shards, what is refused and in how many lines; nothing of a pickle runs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_state

from snip_megatron.cli import main
from snip_megatron.export import hf_llama
from snip_megatron.export.hf_llama import Shape, expected_tensors, split_qkv

SHAPE = Shape(layers=2, hidden=8, ffn=12, heads=4, groups=2, head_size=2, tied=False)
ROWS = 16
ARGUMENTS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 2,
    "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 32,
    "add_bias_linear": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "tokenizer_type": "NullTokenizer",
}


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(size, generator=generator) for name, size in expected_tensors(SHAPE, ROWS).items()}


def write(folder: Path, models: list[dict[str, Any]], **arguments: Any) -> Path:
    """A legacy checkpoint of iteration 3, one file a tensor parallel rank."""
    args = argparse.Namespace(**ARGUMENTS | {"tensor_model_parallel_size": len(models)} | arguments)
    for rank, model in enumerate(models):
        path = folder / "iter_0000003" / f"mp_rank_{rank:02d}"
        path.mkdir(parents=True)
        torch.save({"args": args, "checkpoint_version": 3.0, "model": model}, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def export(source: Path, *extra: str) -> int:
    return main(["export", "--format", "hf", str(source), "--out", str(source.parent / "hf"), *extra])


def shard(name: str, weight: torch.Tensor, rank: int) -> torch.Tensor:
    """What rank ``rank`` of two holds."""
    if "layernorm" in name:
        return weight
    if "linear_fc1" in name:
        return torch.cat([half.chunk(2)[rank] for half in weight.chunk(2)])
    return weight.chunk(2, dim=1 if "linear_proj" in name or "linear_fc2" in name else 0)[rank]


def test_joins_the_shards_of_a_legacy_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_llama, "SHARD_BYTES", 3000)  # several files
    model = whole()
    source = write(tmp_path / "run", [{n: shard(n, w, rank) for n, w in model.items()} for rank in range(2)])
    assert export(source) == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        with safe_open(tmp_path / "hf" / file, "pt") as part:
            assert part.metadata() == {"format": "pt"}
        found |= load_file(tmp_path / "hf" / file)
    assert found.keys() == index["weight_map"].keys()
    gate, up = model["decoder.layers.1.mlp.linear_fc1.weight"].chunk(2)
    assert torch.equal(found["model.layers.1.mlp.gate_proj.weight"], gate)
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], up)
    down = model["decoder.layers.0.mlp.linear_fc2.weight"]
    assert torch.equal(found["model.layers.0.mlp.down_proj.weight"], down)
    assert torch.equal(found["lm_head.weight"], model["output_layer.weight"])
    assert index["metadata"]["total_size"] == sum(4 * weight.numel() for weight in found.values())


def test_takes_the_norms_of_fused_layers(tmp_path: Path) -> None:
    """Transformer Engine's layers keep a norm in the linear after it."""
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    fused = whole()
    for plain, theirs in names.items():
        fused = {name.replace(plain, theirs): weight for name, weight in fused.items()}
    assert export(write(tmp_path / "run", [fused])) == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    for name, ours in (("input", "input"), ("pre_mlp", "post_attention")):
        expected = whole()[f"decoder.layers.1.{name}_layernorm.weight"]
        assert torch.equal(found[f"model.layers.1.{ours}_layernorm.weight"], expected)


def test_splits_query_key_value_by_group() -> None:
    rows = torch.arange(16.0)[:, None].expand(16, 8)  # group: two query heads, key, value; two rows each
    query, key, value = (part[:, 0].tolist() for part in split_qkv(rows, SHAPE))
    assert query == [0, 1, 2, 3, 8, 9, 10, 11]
    assert key == [4, 5, 12, 13]
    assert value == [6, 7, 14, 15]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
        ({"add_bias_linear": True}, "add_bias_linear is True"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"swiglu": False}, "swiglu is False"),
        ({"position_embedding_type": "learned_absolute"}, "'learned_absolute'"),
        ({"use_rope_scaling": True}, "use_rope_scaling"),
        ({"hidden_size": 16}, "embedding.word_embeddings.weight is (16, 8)"),
        ({"num_layers": 3}, "decoder.layers.2.input_layernorm.weight is missing"),
        ({"num_layers": 1}, "it holds decoder.layers.1."),
        ({"layernorm_epsilon": None}, "epsilon"),
        ({"kv_channels": None}, "sizes"),
        ({"pipeline_model_parallel_size": 2}, "1 mp_rank_"),
    ],
)
def test_refuses_other_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], says: str
) -> None:
    assert export(write(tmp_path / "run", [whole()], **arguments)) == 2
    _one_line(capsys, says)
    assert not list(tmp_path.glob("hf*"))


def test_refuses_tensors_that_a_llama_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "decoder.layers.0.mlp.router.weight"
    assert export(write(tmp_path / "run", [{**whole(), name: torch.zeros(4, 8)}])) == 2
    _one_line(capsys, f"it holds {name}")


def test_refuses_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "run", [whole()])
    file = source / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    (tmp_path / "empty").mkdir()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "kept").touch()
    for arguments, says in (
        ([str(source)], "not an empty folder"),
        ([str(source), "--out", str(tmp_path / "new"), "--step", "7"], "--step 7: there is no"),
        ([str(source), "--out", str(tmp_path / "new"), "--vocab-size", "17"], "--vocab-size 17"),
        ([str(source), "--out", str(tmp_path / "new"), "--tokenizer", str(tmp_path)], "tokenizer_config.json"),
        ([str(tmp_path / "none"), "--out", str(tmp_path / "new")], "is not a folder"),
        ([str(tmp_path / "empty"), "--out", str(tmp_path / "new")], "not a checkpoint of Megatron"),
    ):
        out = [] if "--out" in arguments else ["--out", str(tmp_path / "hf")]
        assert main(["export", "--format", "hf", *arguments, *out]) == 2
        _one_line(capsys, says)
    file.write_bytes(file.read_bytes()[:500])
    assert export(source, "--out", str(tmp_path / "new")) == 2
    _one_line(capsys, "cannot be read as a checkpoint")
    (source / "iter_0000003" / ".metadata").write_bytes(b"\x80\x04N.")
    assert export(source, "--out", str(tmp_path / "new")) == 2
    _one_line(capsys, "cannot be read as a checkpoint")


def test_names_the_missing_file_of_a_distributed_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = FileSystemWriter(tmp_path / "run")
    save_state({"embedding.word_embeddings.weight": torch.zeros(4, 2)}, storage_writer=writer, no_dist=True)
    (lost,) = (tmp_path / "run").glob("*.distcp")
    lost.unlink()
    assert export(tmp_path / "run", "--out", str(tmp_path / "new")) == 2
    _one_line(capsys, f"FileNotFoundError: [Errno 2] No such file or directory: '{lost}'")


class _Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_runs_nothing_that_a_checkpoint_names(tmp_path: Path) -> None:
    source = write(tmp_path / "run", [{**whole(), "decoder.harm_extra_state": _Touches(tmp_path / "harm")}])
    assert export(source) == 0
    assert not (tmp_path / "harm").exists()


def _one_line(capsys: pytest.CaptureFixture[str], says: str) -> None:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("snip export: ")
    assert says in lines[0]


def test_a_model_in_the_current_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is written beside its folder and renamed, which cannot be done for the one that is in use."""
    source = write(tmp_path / "checkpoint", [whole()])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", "../here"):
        assert main(["export", "--format", "hf", str(source), "--out", out]) == 2
        _one_line(capsys, f"--out {out}: is the current folder")
    assert list((tmp_path / "here").iterdir()) == []
