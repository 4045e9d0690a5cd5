"""Data arguments that cannot work are refused by name; the loss."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.training import global_vars

from snip_megatron.megatron.datasets import check_data
from snip_megatron.megatron.entry import loss_function
from snip_megatron.precision.errors import SnipError

PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path")


DATA: dict[str, Any] = {
    **dict.fromkeys((*PATHS, "per_split_data_args_path")), "mock_data": False, "sft": False,
    "dataloader_inter_document_masking": False, "pipeline_model_parallel_size": 1, "micro_batch_size": 2,
    "transformer_impl": "transformer_engine", "cuda_graph_impl": "none", "reset_position_ids": False,
    "reset_attention_mask": False, "tokenizer_type": "SFTTokenizer", "mtp_num_layers": None,
    "overlap_moe_expert_parallel_comm": True,
}  # fmt: skip


def data_args(**changes: Any) -> Namespace:
    return Namespace(**(DATA | changes))


def test_no_data() -> None:
    check_data(data_args(mock_data=True))
    with pytest.raises(SnipError, match="no training data: give --data-path, --train-data-path or --mock-data"):
        check_data(data_args())


def test_missing_file_is_named(tmp_path: Path) -> None:
    prefix = str(tmp_path / "text")
    with pytest.raises(SnipError, match=f"--train-data-path {prefix}: there is no {prefix}.idx"):
        check_data(data_args(train_data_path=["0.5", prefix]))
    (tmp_path / "text.idx").touch()
    check_data(data_args(train_data_path=["0.5", prefix]))
    check_data(data_args(data_path=["s3://bucket/text"]))


def test_other_kinds_are_refused() -> None:
    with pytest.raises(SnipError, match="--logits-load-dir is not supported"):
        check_data(data_args(mock_data=True, logits_load_dir="x"))


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"transformer_impl": "local"}, "--transformer-impl local: it packs documents; use transformer_engine"),
        ({"pipeline_model_parallel_size": 2}, "--micro-batch-size 2 on several pipeline stages: .*; use 1"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers and --overlap-moe-expert-parallel-comm"),
        ({"mock_data": True}, "--mock-data: it packs documents; give --data-path"),
        ({"reset_position_ids": True}, "--reset-position-ids"),
        ({"tokenizer_type": "NullTokenizer"}, "--tokenizer-type NullTokenizer; use SFTTokenizer"),
    ],
)
def test_what_packed_documents_cannot_be_combined_with(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(SnipError, match=f"--sft cannot be combined with {flag}"):
        check_data(data_args(sft=True, **options))


def test_conversations_are_a_file_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(SnipError, match=f"there is no {tmp_path}/lines"):
        check_data(data_args(sft=True, train_data_path=[f"{tmp_path}/lines"]))
    (tmp_path / "lines").touch()
    check_data(data_args(sft=True, train_data_path=[f"{tmp_path}/lines"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SnipError, match="--sft needs a package that is not here: pip install datasets"):
        check_data(data_args(sft=True, train_data_path=[f"{tmp_path}/lines"]))


def test_loss_is_masked_sum_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    args = Namespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    output = torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=torch.bfloat16, requires_grad=True)
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    loss, tokens, report = loss_function(mask, output)
    loss.backward()
    assert (loss.item(), tokens.item(), report["lm loss"].tolist()) == (13.0, 3, [13.0, 3.0])
    assert tokens.dtype == torch.int
    assert not report["lm loss"].requires_grad
    assert torch.equal(output.grad, mask.bfloat16())
