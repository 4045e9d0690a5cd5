#!/usr/bin/env bash
# A real Llama of about 3 M parameters, pretrained under SNIP on this machine, from a fresh clone to a report.
#
#   bash scripts/demo.sh                            three minutes on two CPU cores, after the installation
#   bash scripts/demo.sh --train-iters 1000         further arguments go to the training entry and win
#
# Two ranks, tensor and sequence parallel: on two GPUs with nccl, without a GPU on the CPU with gloo. One GPU: one rank.
# First it predicts what SNIP gains on a real job, in seconds and without a GPU. Text: sources of Python's standard library,
# nothing is downloaded. Exit code 0 only if the run did what scripts/demo_summary.py demands: maps adopted, budget met,
# loss well under the unigram entropy, report written. It ends with a verdict.
#
# Environment: SNIP_DEMO_DIR, where data/ and runs/ go (default: the repository).
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1
start=$SECONDS
source scripts/bootstrap.sh

data="${SNIP_DEMO_DIR:-.}/data/demo"
run="${SNIP_DEMO_DIR:-.}/runs/demo"
data="${data#./}" run="${run#./}"
mkdir -p "$run"
steps=120

echo "== prediction: Llama 8B on 8 H200s"
snip plan --model 8b --tp 2 --dp 4 >"$run/plan.txt" || exit
sed -n '1,2p; /^step /,/^$/p; /^budget /,/^$/p' "$run/plan.txt"
echo "the whole plan: $run/plan.txt"

echo "== text: $data"
snip prepare-data --output "$data" --glob '[a-c]*.py' --vocab-size 1024 --reuse --overwrite || exit

gpus="$(python -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null)"
ranks=2
layout=(--tensor-model-parallel-size 2 --sequence-parallel)
if ((${gpus:-0} >= 2)); then
    echo "== training: 2 ranks on 2 of $gpus GPUs (nccl)"
elif ((${gpus:-0} == 1)); then
    echo "== training: 1 rank on the GPU (nccl wants a GPU for each rank)"
    ranks=1
    layout=()
else
    echo "== training: 2 ranks on the CPU (gloo)"
    export CUDA_VISIBLE_DEVICES=""
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(python -c 'import os; print(max(1, min(8, len(os.sched_getaffinity(0)) // 2)))')}"
fi

# Every dimension that a rank holds (each SwiGLU half 256, each group's share of QKV 256, tokens 8 x 256 / 2) is a
# multiple of 128, so that quantisation tiles fall as they would on one rank.
model=(
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 512
    --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --bf16 --transformer-impl local
)
training=(
    --train-iters "$steps" --micro-batch-size 8 --global-batch-size 8
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234
    --train-data-path "$data/train" --valid-data-path "$data/valid" --num-workers 0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$data/tokenizer"
    --eval-interval 100000 --eval-iters 8 --log-interval 10  # Megatron validates once more where training ends
)
snip=(
    --snip --snip-budget fp4=0.75 --snip-formats "fp8,fp4" --snip-policy snip --snip-estimator noise
    --snip-first-update 30 --snip-update-interval 45 --snip-lag 10
    --snip-dir "$run" --snip-overwrite
)
PYTHONWARNINGS=ignore python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    -m snip_megatron.pretrain_gpt "${layout[@]}" "${model[@]}" "${training[@]}" "${snip[@]}" "$@" </dev/null 2>&1 |
    python scripts/demo_summary.py watch --log "$run/train.log"
status=${PIPESTATUS[0]}
if ((status != 0)); then
    tail -n 30 "$run/train.log" >&2
    echo "snip: training failed with exit code $status; the whole log: $run/train.log" >&2
    exit "$status"
fi

echo "== result after $((SECONDS - start)) s"
exec python scripts/demo_summary.py check --run "$run" --data "$data" --log "$run/train.log" \
    --recorded examples/recorded_run
