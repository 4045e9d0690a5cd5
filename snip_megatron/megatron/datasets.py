"""Builds train, validation and test data sets from Megatron's arguments, and reads their microbatches."""

import argparse
import dataclasses
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import flatten_batch_for_packed_sequences, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from snip_megatron.megatron.compat import graph_implementation
from snip_megatron.precision.errors import SnipError, is_number

_NAMES = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
_ENDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")  # of the documents in a sequence
#: Implementations of layers with attention over packed documents.
ENGINES_OF_PACKED = ["transformer_engine"]
_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_PATH_FILES = ("data_args_path", "per_split_data_args_path")
_FIM_TOKENS = ("prefix", "middle", "suffix", "pad", "eod")
#: Arguments that need another forward step.
_OTHER_KINDS = ("hybrid_context_parallel", "logits_load_dir")


def check_kind_of_data(args: argparse.Namespace) -> None:
    """Raise SnipError if this entry does not support the kind of data. No file is looked for."""
    for name in _OTHER_KINDS:
        if getattr(args, name, None):
            argument = f"--{name.replace('_', '-')}"
            raise SnipError(f"{argument} is not supported by this entry; use attach() in Megatron's own script")
    if not _has_packed_documents(args):
        return
    argument = "--sft" if args.sft else "--dataloader-inter-document-masking"
    stages, engine, graphs = args.pipeline_model_parallel_size, args.transformer_impl, graph_implementation(args)
    several = stages > 1 and args.micro_batch_size > 1
    overlapped_mtp = args.mtp_num_layers and args.overlap_moe_expert_parallel_comm
    for refused, option, way in (
        (engine not in ENGINES_OF_PACKED, f"--transformer-impl {engine}", "use transformer_engine"),
        (several, f"--micro-batch-size {args.micro_batch_size} on several pipeline stages", "use 1"),
        (graphs is not None, f"--cuda-graph-impl {graphs}", "leave it out"),
        (overlapped_mtp, "--mtp-num-layers and --overlap-moe-expert-parallel-comm", "leave one of them out"),
        (args.sft and args.mock_data, "--mock-data", "give --data-path"),
        (args.sft and args.reset_position_ids, "--reset-position-ids", "leave it out"),
        (args.sft and args.reset_attention_mask, "--reset-attention-mask", "leave it out"),
    ):
        if refused:
            raise SnipError(f"{argument} cannot be combined with {option}: it packs documents; {way}")


def check_data(args: argparse.Namespace) -> None:
    """Raise SnipError if there is no training data, or if this entry does not support its kind."""
    check_kind_of_data(args)
    if args.sft and args.tokenizer_type != "SFTTokenizer":
        raise SnipError(f"--sft cannot be combined with --tokenizer-type {args.tokenizer_type}; use SFTTokenizer")
    if args.sft and importlib.util.find_spec("datasets") is None:
        raise SnipError("--sft needs a package that is not here: pip install datasets")
    if args.mock_data:
        return
    if not any(getattr(args, name) for name in (*_PATHS, *_PATH_FILES)):
        raise SnipError("no training data: give --data-path, --train-data-path or --mock-data")
    suffix, hint = ("", "give a file of JSON lines") if args.sft else (".idx", "give the path without suffix")
    for name in _PATHS:
        for entry in getattr(args, name) or ():
            if not is_number(entry) and "://" not in entry and not Path(entry + suffix).is_file():
                raise SnipError(f"--{name.replace('_', '-')} {entry}: there is no {entry}{suffix} ({hint})")


def _has_packed_documents(args: argparse.Namespace) -> bool:
    """Return whether documents in a sequence do not attend to each other, so that all stages need their ends."""
    return bool(args.sft or args.dataloader_inter_document_masking)


def provide_datasets(samples: tuple[int, int, int], vp_stage: int | None = None) -> Any:
    """Return train, validation and test data sets of ``samples`` sequences. They are None on ranks that read none."""
    args = get_args()
    text = MockGPTDataset if args.mock_data else GPTFIMDataset if args.fim_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(
        SFTDataset if args.sft else text,
        samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0 and _needs_batches(args, vp_stage),
        dataset_config(args),
    )
    return builder.build()


provide_datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron calls it on every rank


def _needs_batches(args: argparse.Namespace, vp_stage: int | None) -> bool:
    """Return whether a pipeline stage needs batches.

    The first and the last stage need them, and the one that predicts further tokens. If documents are packed, all do.
    """
    layout = _layout(args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size)
    has_mtp = mtp_on_this_rank(layout, args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)
    return bool(_has_packed_documents(args) or is_first_or_last_pipeline_stage(vp_stage) or has_mtp)


@functools.cache
def _layout(text: str | None, stages: int) -> PipelineParallelLayerLayout | None:
    return None if text is None else PipelineParallelLayerLayout.from_str(text, stages)


def _makes_mask(args: argparse.Namespace) -> bool:
    """Return whether data sets make attention masks, as they do if documents reset the mask. Otherwise it is causal."""
    return bool(args.reset_attention_mask and args.create_attention_mask_in_dataloader)


def dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    """Return the data sets' configuration. Most of its fields have the names of Megatron's arguments."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = args.per_dataset_sequences_path
    values = {
        **vars(args),
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": None if blend_per_split is not None and any(blend_per_split) else args.split,
        "path_to_cache": args.data_cache_path,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequences_per_dataset": None if sequences is None else json.loads(Path(sequences).read_text()),
        "tokenizer": get_tokenizer(),
        "create_attention_mask": _makes_mask(args),
        "inter_document_masking": args.dataloader_inter_document_masking,
    }
    kind = GPTDatasetConfig
    if args.fim_data:  # for models that fill in the middle, spans of a document are moved to its end
        kind = GPTFIMDatasetConfig
        values["fim_extra_tokens"] = {name: getattr(args, f"fim_{name}_token") for name in _FIM_TOKENS}
    # The fields differ between versions of Megatron.
    fields = {f.name for f in dataclasses.fields(kind) if f.init}
    return kind(**{name: value for name, value in values.items() if name in fields})


def get_batch(args: argparse.Namespace, data_iterator: Any, *, training: bool, vp_stage: int | None) -> dict[str, Any]:
    """Return this rank's microbatch, which one rank of the tensor parallel group reads.

    Args:
        args: Megatron's arguments.
        data_iterator: Read on tensor parallel rank 0 only.
        training: Whether the microbatch has the training size or the validation size.
        vp_stage: The virtual pipeline stage.

    Returns:
        ``tokens``, ``labels`` and ``position_ids`` (int64) and ``loss_mask`` (fp32), each [microbatch, sequence], and
        ``attention_mask``, which is None unless the data set makes one. Under context parallelism the sequence
        dimension has this rank's part. All values are None on pipeline stages that need none. If documents are packed,
        the sequences of a microbatch are concatenated to [1, microbatch · sequence], and :func:`packed_documents`
        returns the ends of the documents.
    """
    packed = _has_packed_documents(args)
    names = (*_NAMES, *_ENDS) if packed else _NAMES
    batch: dict[str, Any] = dict.fromkeys(names)
    if not _needs_batches(args, vp_stage):
        return batch
    rank = mpu.get_tensor_model_parallel_rank()
    if rank == 0:
        sample = next(data_iterator)
        batch |= {name: sample[name].cuda(non_blocking=True) for name in names if name in sample}
    if args.tensor_model_parallel_size > 1:
        batch = get_batch_on_this_tp_rank(
            batch,
            has_cu_seqlens=packed,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=_makes_mask(args),
            broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
            broadcast_group=mpu.get_tensor_model_parallel_group(),
            cp_size=args.context_parallel_size,
            tp_rank=rank,
            micro_batch_size=args.micro_batch_size if training else args.eval_micro_batch_size,
            seq_length=args.seq_length,
            mtp_on_this_rank=True,  # all stages that read get everything
        )
    return get_batch_on_this_cp_rank(  # type: ignore[no-any-return]
        flatten_batch_for_packed_sequences(batch),
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        use_per_sequence_balancing=not args.sft,  # only conversations are padded for parts of each
    )


def packed_documents(args: argparse.Namespace, batch: dict[str, Any]) -> PackedSeqParams | None:
    """Return the ends of the documents in a microbatch of :func:`get_batch`. None if documents are not packed."""
    if batch.get("cu_seqlens") is None:
        return None
    boundaries, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"])
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=int(boundaries[-1]) if args.hybrid_layer_pattern else None,  # Mamba needs each token's document
        tokens_per_sample=args.seq_length,
    )
