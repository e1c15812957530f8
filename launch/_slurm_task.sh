#!/usr/bin/env bash
# One process of launch/slurm.sbatch: tells jax which one it is and which GPUs of the node are its own, and runs the
# command. srun reports the largest exit code of all processes, so the codes are made to rank by what they mean for the
# job: 0, then 75 (preempted), 76 (restart), 250 (a mistake: do not restart).
set -euo pipefail
# shellcheck source=launch/_supervise.sh
source launch/_supervise.sh

export JAX_PROCESS_ID=$SLURM_PROCID
if ((TANGO_GPUS_PER_TASK > 0)); then
    # Without it jax would take one GPU per process, whatever the number of processes.
    first=$((SLURM_LOCALID * TANGO_GPUS_PER_TASK))
    JAX_LOCAL_DEVICE_IDS=$(seq -s, "$first" $((first + TANGO_GPUS_PER_TASK - 1)))
    export JAX_LOCAL_DEVICE_IDS
fi

# SLURM signals every process of a task itself; this one only has to outlive the command.
trap : TERM
code=0
"$@" || code=$?
((code == 0)) || echo "tango_jax: process $SLURM_PROCID ended with exit code $code: $(describe_exit "$code")" >&2
case $(judge "$code") in
    "done") exit 0 ;;
    preempted) exit 75 ;;
    restart) exit 76 ;;
    stop) exit 250 ;;
esac
