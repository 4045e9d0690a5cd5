"""Builds Megatron's arguments of a job, and says how far the job has come."""

from __future__ import annotations

from snip_megatron.launch.job import MOCK, TRACKER, Job, last_value
from snip_megatron.planner.layout import Layout

_RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


def megatron_arguments(job: Job) -> list[str]:
    """Return all arguments after ``-m snip_megatron.pretrain_gpt``.

    The user's override the others, except ``--load``: a job that is started again goes on from its own checkpoint.
    """
    parts = (_model(job), _layout(job.layout), _training(job), _data(job), _checkpoints(job), _snip(job), job.extra)
    load = [] if job.load is None else ["--load", str(job.load)]
    return [*(word for part in parts for word in part), *load]


def _model(job: Job) -> list[str]:
    model, layout = job.model, job.layout
    text = (
        f"--num-layers {model.blocks} --hidden-size {model.hidden} --ffn-hidden-size {model.ffn}"
        f" --num-attention-heads {model.heads} --kv-channels {model.head_size}"
    )
    if model.groups != model.heads:
        text += f" --group-query-attention --num-query-groups {model.groups}"
    text += (
        f" --seq-length {layout.seq_length} --max-position-embeddings {max(layout.seq_length, model.context)}"
        f" --position-embedding-type rope --rotary-base {model.rotary_base}"
        f" --normalization RMSNorm --norm-epsilon {model.norm_epsilon:g} --swiglu --disable-bias-linear"
        " --attention-dropout 0 --hidden-dropout 0 --bf16"
    )
    if not model.tied:
        text += " --untie-embeddings-and-output-weights"
    return text.split()


def _layout(layout: Layout) -> list[str]:
    text = (
        f"--tensor-model-parallel-size {layout.tp} --pipeline-model-parallel-size {layout.pp}"
        f" --micro-batch-size {layout.micro_batch_size} --global-batch-size {layout.global_batch_size}"
        " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    )
    if layout.sequence_parallel:
        text += " --sequence-parallel"
    return f"{text} {_RECOMPUTE[layout.recompute]}".split()


def _training(job: Job) -> list[str]:
    lr, layout = job.asked.lr, job.layout
    steps = 20 if job.smoke else round(job.asked.tokens / (layout.global_batch_size * layout.seq_length))
    warmup, log, evaluate = (2, 1, 10) if job.smoke else (2000, 10, 1000)
    return (
        f"--train-iters {steps} --lr {lr:g} --min-lr {lr / 10:g} --lr-decay-style cosine"
        f" --lr-warmup-iters {warmup} --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0"
        f" --init-method-std 0.02 --seed 1234 --log-interval {log} --eval-interval {evaluate}"
        f" --eval-iters {1 if job.smoke else 10} --distributed-timeout-minutes 30"
    ).split()


def _data(job: Job) -> list[str]:
    if job.data is None:
        return []
    workers = ["--num-workers", "0" if job.smoke else "2"]
    if job.data == MOCK:
        # The null tokenizer adds one token to --vocab-size.
        size = str(job.model.vocabulary - 1)
        return ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", size, *workers]
    data = job.data.rstrip("/")
    return [
        *("--train-data-path", f"{data}/train", "--valid-data-path", f"{data}/valid"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{data}/tokenizer", *workers),
    ]


def _checkpoints(job: Job) -> list[str]:
    """Arguments for checkpoints. On a signal, Megatron's handler saves one after the current step and exits."""
    return ["--save", str(job.save), "--save-interval", "10" if job.smoke else "500", "--exit-signal-handler"]


def _snip(job: Job) -> list[str]:
    if not job.snip:
        return []
    found = ["--snip"]
    if job.smoke:
        found += ["--snip-first-update", "2", "--snip-update-interval", "10", "--snip-lag", "4", "--snip-wait", "120"]
    return found


def progress(job: Job) -> tuple[int, int]:
    """Return the step of the newest checkpoint in the folder for checkpoints, 0 without one, and the steps in all."""
    steps = last_value(megatron_arguments(job), "--train-iters")
    assert steps is not None
    try:
        saved = int((job.save / TRACKER).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no checkpoint, or one that a kill left without a name
        saved = 0
    return saved, int(steps)
