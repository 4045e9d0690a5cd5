#!/usr/bin/env bash
# Train a configuration under SLURM. Outside of a job this submits itself, with the nodes that the configuration needs:
#
#   bash launch/slurm.sh 70b --data /shared/data --save /shared/70b
#   bash launch/slurm.sh 7b --data mock --save /shared/7b --dry-run       print sbatch's and each node's command
#   SNIP_SBATCH="--partition=gpu --time=4:00:00" bash launch/slurm.sh 1b --data /shared/data --save /shared/1b
#
# Arguments are those of `snip launch`; launch/README.md has hardware, memory and speed. In the job one agent (torchrun)
# runs on each node; they meet by c10d rendezvous on the first. Before the time is up (10 minutes, or what --signal
# says), and when the job is preempted, all ranks save a checkpoint and the job is queued again; it goes on from there.
#
# Environment: SNIP, the command on every node (default: snip); SNIP_SBATCH, SNIP_SRUN: more arguments for sbatch and
# srun (partition, account, container); SNIP_REQUEUE: never, or always (also when SIGTERM came without preemption);
# NCCL's own variables (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, ...) reach the ranks.
#
#SBATCH --job-name=snip
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --output=%x-%j.log
set -uo pipefail
read -ra snip <<<"${SNIP:-snip}"

submit() {
    local nodes gpus argument sbatch=(sbatch)
    read -r nodes gpus < <("${snip[@]}" launch --hardware "$@") || exit 2
    read -ra extra <<<"${SNIP_SBATCH:-}"
    sbatch+=("--nodes=$nodes" "--gpus-per-node=$gpus" ${extra[@]+"${extra[@]}"} "${BASH_SOURCE[0]}" "$@")
    for argument in "$@"; do
        [[ "$argument" == --megatron ]] && break
        if [[ "$argument" == --dry-run ]]; then
            printf '# %q' "${sbatch[0]}" && printf ' %q' "${sbatch[@]:1}" && echo
            exec "${snip[@]}" launch "$@"
        fi
    done
    exec "${sbatch[@]}"
}

[[ -n "${SLURM_JOB_ID:-}" ]] || submit "$@"

# -- in the job ---------------------------------------------------------------------------------------------------------
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")" || exit 1
head="${hosts%%$'\n'*}"
# Each start of the job meets under a name of its own: what is left of an earlier one cannot join.
mine=(
    --nodes "$SLURM_JOB_NUM_NODES"
    --rendezvous "$head:${SNIP_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
    --rendezvous-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
)
"${snip[@]}" launch "${mine[@]}" --dry-run "$@" || exit

asked="" interrupted="" step=""
# shellcheck disable=SC2329  # the traps call it
forward() {
    asked="$1" interrupted=yes
    echo "snip: SIG$1: the ranks save a checkpoint after this step"
    # srun hands it on to the agent of every node, and that to its ranks.
    [[ -z "$step" ]] || kill -s USR1 "$step" 2>/dev/null
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

read -ra extra <<<"${SNIP_SRUN:-}"
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 ${extra[@]+"${extra[@]}"} \
    "${snip[@]}" launch "${mine[@]}" "$@" &
step=$!
while :; do
    wait "$step"
    code=$?
    # A trap ends wait with 128 + n while srun goes on.
    if [[ -z "$interrupted" ]] || ((code <= 128)); then break; fi
    interrupted=""
done

preempted() {
    scontrol show job --oneliner "$SLURM_JOB_ID" | grep -Eq ' PreemptTime=[0-9]'
}

# SIGUSR1: the time is nearly up, or somebody asked by scancel --batch --signal=USR1. SIGTERM is preemption or scancel.
requeue=""
case "${SNIP_REQUEUE:-auto} $asked" in
    "never "* | *" ") ;;
    "always "* | *" USR1") requeue=yes ;;
    *) preempted && requeue=yes ;;
esac
if [[ -n "$requeue" ]]; then
    echo "snip: training left with exit code $code; the job is queued again"
    scontrol requeue "$SLURM_JOB_ID" || exit 1
fi
exit "$code"
