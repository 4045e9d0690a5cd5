#!/usr/bin/env bash
# Records the run on a GPU that scripts/demo.sh shows: a Llama of 1.1 B parameters (TinyLlama's shape) with CUDA graphs,
# 300 steps and one update, about four minutes on an H100. It needs Transformer Engine.
#
#   bash scripts/record_run.sh DATA [further arguments of the training entry]
#
# DATA is the text of the demonstration (data/demo). Of the run, what a report reads is kept in examples/recorded_run.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
data="${1:?usage: record_run.sh DATA}"
run=runs/recorded kept=examples/recorded_run
torchrun --standalone --nproc-per-node 1 -m snip_megatron.pretrain_gpt \
    --num-layers 22 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 4 --seq-length 2048 --max-position-embeddings 2048 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer \
    --transformer-impl transformer_engine --cuda-graph-impl transformer_engine --te-rng-tracker \
    --train-iters 300 --micro-batch-size 8 --global-batch-size 16 --clip-grad 1.0 --seed 1234 \
    --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 \
    --train-data-path "$data/train" --valid-data-path "$data/valid" --num-workers 2 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$data/tokenizer" \
    --eval-interval 100 --eval-iters 4 --log-interval 10 \
    --snip --snip-first-update 30 --snip-dir "$run" --snip-overwrite "${@:2}"
rm -rf "$kept"
mkdir -p "$kept"
for part in config.json events.jsonl metrics.jsonl maps plans problems scores stats; do # what a report reads
    cp -r "$run/$part" "$kept/"
done
snip report "$kept" --out "$run/report.html"
du -sh "$kept"
