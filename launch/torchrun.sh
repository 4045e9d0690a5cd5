#!/usr/bin/env bash
# Train a configuration on this machine, or as one node of several.
#
#   launch/torchrun.sh 1b --data data/mine --save checkpoints/1b            8 GPUs of this machine
#   launch/torchrun.sh 7b --data mock --save checkpoints/7b --dry-run       the exact command
#   launch/torchrun.sh 70b --data data/mine --save /shared/70b --rendezvous node0:29500     on each of 8 nodes
#   launch/torchrun.sh 1b --smoke --cpu --nodes 1 --gpus-per-node 2 --save /tmp/trial       a trial without a GPU
#
# Arguments are those of `snip launch` (--help lists them); launch/README.md has hardware, memory and speed.
# SIGTERM, SIGUSR1 or SIGHUP ends the run after a checkpoint; the same command then goes on from it.
#
# Environment: SNIP, the command to use (default: snip); NCCL's own variables are passed on.
set -euo pipefail
read -ra snip <<<"${SNIP:-snip}"
exec "${snip[@]}" launch "$@"
