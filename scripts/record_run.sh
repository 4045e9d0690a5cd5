#!/usr/bin/env bash
# Records the run on a GPU that scripts/demo.sh shows: a Llama of 125 M parameters, 400 steps, about three minutes on an H100.
#
#   bash scripts/record_run.sh DATA [further arguments of the training entry]
#
# DATA is the text of the demonstration (data/demo). Of the run, what a report reads is kept in examples/recorded_run.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
data="${1:?usage: record_run.sh DATA}"
run=runs/recorded kept=examples/recorded_run
torchrun --standalone --nproc-per-node 1 -m snip_megatron.pretrain_gpt \
    --num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12 \
    --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope \
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 --bf16 --transformer-impl local \
    --train-iters 400 --micro-batch-size 16 --global-batch-size 32 --clip-grad 1.0 --seed 1234 \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 \
    --train-data-path "$data/train" --valid-data-path "$data/valid" --num-workers 2 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$data/tokenizer" \
    --eval-interval 100 --eval-iters 4 --log-interval 20 \
    --snip --snip-first-update 50 --snip-update-interval 100 --snip-dir "$run" --snip-overwrite "${@:2}"
rm -rf "$kept"
mkdir -p "$kept"
for part in config.json events.jsonl metrics.jsonl maps scores; do # what a report reads
    cp -r "$run/$part" "$kept/"
done
snip report "$kept" --out "$kept/report.html"
du -sh "$kept"
