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
# Environment: SNIP, the command on every node (default: snip; a script must exec its program, or signals do not reach
# it under proctrack/cgroup); SNIP_SBATCH, SNIP_SRUN: more arguments for sbatch and srun (partition, account, container);
# SNIP_REQUEUE: never, or always (whenever the training stopped before its end without an error); SNIP_PORT: of the
# rendezvous; NCCL's own variables (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, ...) reach the ranks.
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

refuse() {
    echo "slurm.sh: $*" >&2
    exit 2
}

submit() {
    local nodes gpus argument sbatch=(sbatch)
    read -r nodes gpus < <("${snip[@]}" launch --hardware "$@") || exit 2
    read -ra extra <<<"${SNIP_SBATCH:-}"
    # The job cannot ask SLURM how long before its end the signal comes.
    export SNIP_WARNING_S=600
    for argument in ${extra[@]+"${extra[@]}"}; do
        [[ "$argument" =~ ^--signal=.*@([0-9]+)$ ]] && SNIP_WARNING_S="${BASH_REMATCH[1]}"
    done
    sbatch+=("--nodes=$nodes" "--gpus-per-node=$gpus" ${extra[@]+"${extra[@]}"} "${BASH_SOURCE[0]}" "$@")
    for argument in "$@"; do
        [[ "$argument" == --megatron ]] && break
        if [[ "$argument" == --dry-run ]]; then
            printf '# %q' "${sbatch[0]}" && printf ' %q' "${sbatch[@]:1}" && echo
            exec "${snip[@]}" launch "$@"
        fi
    done
    command -v sbatch >/dev/null || refuse "there is no sbatch here; run this where SLURM's commands are, or use snip launch"
    exec "${sbatch[@]}"
}

[[ -n "${SLURM_JOB_ID:-}" ]] || submit "$@"

# -- in the job ---------------------------------------------------------------------------------------------------------
case "${SNIP_REQUEUE:=auto}" in
    auto | always | never) ;;
    *) refuse "SNIP_REQUEUE=$SNIP_REQUEUE: give always, never or nothing" ;;
esac

asked="" interrupted="" step=""
# shellcheck disable=SC2329  # the traps call it
forward() {
    asked="$1" interrupted=yes
    [[ -n "$step" ]] || return
    echo "snip: SIG$1: the ranks save a checkpoint after this step"
    # srun hands it on to the agent of every node, and that to its ranks.
    kill -s USR1 "$step" 2>/dev/null
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

# What SLURM says of a job or node: field "job 4711" TimeLimit. Times are in Unix seconds; nothing without an answer.
field() {
    # shellcheck disable=SC2086  # two words
    SLURM_TIME_FORMAT=%s scontrol show --oneliner $1 2>/dev/null | tr ' ' '\n' | sed -n "s/^$2=//p" | head -n 1
}

started="$(field "job $SLURM_JOB_ID" StartTime)"
[[ "$started" =~ ^[0-9]+$ ]] || started="$(date +%s)"
ends="$(field "job $SLURM_JOB_ID" EndTime)"
# SLURM sends the signal up to a minute early.
if [[ "$ends" =~ ^[0-9]+$ && -n "${SNIP_WARNING_S:-}" ]] && ((ends - $(date +%s) <= SNIP_WARNING_S + 60)); then
    refuse "the time limit of $(field "job $SLURM_JOB_ID" TimeLimit) is not longer than the signal before its end" \
        "(--signal=B:USR1@$SNIP_WARNING_S seconds) by more than a minute: no step would be trained; give a longer" \
        "--time, or a shorter warning that still lets a checkpoint be saved (SNIP_SBATCH=\"--signal=B:USR1@120\")"
fi

hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")" || exit 1
head="${hosts%%$'\n'*}" reached=()
if ! getent hosts "$head" >/dev/null; then
    address="$(field "node $head" NodeAddr)"
    if [[ -z "$address" ]] || ! getent hosts "$address" >/dev/null; then
        refuse "$head, the first node of this job, and its NodeAddr (${address:-none}) do not resolve on it; the nodes" \
            "cannot meet there"
    fi
    head="$address" reached=(--local-address route)
fi
# Each start of the job meets under a name of its own: what is left of an earlier one cannot join.
mine=(
    --nodes "$SLURM_JOB_NUM_NODES"
    --rendezvous "$head:${SNIP_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
    --rendezvous-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
    ${reached[@]+"${reached[@]}"}
)
"${snip[@]}" launch "${mine[@]}" --dry-run "$@" || exit

read -ra extra <<<"${SNIP_SRUN:-}"
# Run a step until it ends. The result is its exit code.
run_step() {
    local code
    srun --ntasks-per-node=1 --kill-on-bad-exit=1 ${extra[@]+"${extra[@]}"} "$@" &
    step=$!
    while :; do
        interrupted=""
        wait "$step"
        code=$?
        # A trap ends wait with 128 + n while srun goes on.
        if [[ -z "$interrupted" ]] || ((code <= 128)) || ! kill -0 "$step" 2>/dev/null; then break; fi
    done
    step=""
    return "$code"
}

# One process on the first node checks what all ranks would refuse. A job that is queued again was checked before.
if ((${SLURM_RESTART_COUNT:-0} == 0)); then
    run_step --nodes=1 --ntasks=1 "${snip[@]}" launch "${mine[@]}" --check "$@" || exit
fi
read -r before steps < <("${snip[@]}" launch "${mine[@]}" --progress "$@") || exit
code=0
# Nothing is started for a signal that has already come.
[[ -n "$asked" ]] || run_step "--nodes=$SLURM_JOB_NUM_NODES" "${snip[@]}" launch "${mine[@]}" "$@" || code=$?
read -r saved steps < <("${snip[@]}" launch "${mine[@]}" --progress "$@") || exit

# Preemption with a GraceTime signals the ranks, not this script. PreemptTime may be that of an earlier start.
preempted() {
    local when
    when="$(field "job $SLURM_JOB_ID" PreemptTime)"
    [[ "$when" =~ ^[0-9]+$ ]] && ((when >= started))
}

again=""
if [[ "$SNIP_REQUEUE" == never ]] || ((saved >= steps)); then
    :
elif preempted; then
    again="it was preempted"
elif [[ "$SNIP_REQUEUE" == always && ($code == 0 || -n "$asked") ]]; then
    again="SNIP_REQUEUE=always"
elif [[ "$asked" == USR1 ]]; then
    # Each start trains the step in which it finds the signal: one step is no progress.
    if ((saved - before > 1)); then
        again="SIGUSR1"
    else
        echo "slurm.sh: SIGUSR1 came before a second step was trained and saved (step $before at the start, $saved now):" \
            "queued again, this job would not come far; give a longer --time, or a shorter warning (--signal). It is" \
            "not queued again (SNIP_REQUEUE=always does)" >&2
        ((code)) || code=1
    fi
fi
if [[ -n "$again" ]]; then
    echo "snip: training left with exit code $code at step $saved of $steps; the job is queued again ($again)"
    scontrol requeue "$SLURM_JOB_ID" || exit 1
fi
exit "$code"
