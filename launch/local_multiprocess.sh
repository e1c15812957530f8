#!/usr/bin/env bash
# One command in N processes on this machine, which jax joins into one job: CPU processes with virtual devices, or
# processes that share the machine's GPUs. If one dies, all are restarted (launch/_supervise.sh says when).
#
#   bash launch/local_multiprocess.sh 2 python -m tango_jax.train --config=configs/tiny.py --workdir=runs/two
#   bash launch/local_multiprocess.sh 2 --devices=4 python -m tango_jax.train ...                 # 2 x 4 devices
#   bash launch/local_multiprocess.sh 8 --platform=gpu python -m tango_jax.train ...              # a process per GPU
#   bash launch/local_multiprocess.sh 1 --platform=gpu --devices=8 python -m tango_jax.train ...  # one process for all
#
#   --platform=cpu|gpu   what the processes compute on (cpu)
#   --devices=K          devices of each process: virtual ones of a CPU, or the next K GPUs (1)
#   --logs=DIR           output of all processes but the first, whose output comes here (runs/process_logs)
#
# Ctrl-C and SIGTERM let the processes save and end; a second one kills them. Relative paths start at the repository
# root.
set -euo pipefail

processes=${1:-}
devices=1 logs=runs/process_logs TANGO_PLATFORM=${TANGO_PLATFORM:-cpu}
shift || true
while [[ ${1:-} == --* ]]; do
    case $1 in
        --platform=*) TANGO_PLATFORM=${1#*=} ;;
        --devices=*) devices=${1#*=} ;;
        --logs=*) logs=${1#*=} ;;
        *) processes=  ;;  # unknown: print the usage
    esac
    shift
done
if ! [[ $processes =~ ^[1-9][0-9]*$ && $devices =~ ^[1-9][0-9]*$ && $# -gt 0 ]]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi

# shellcheck source=launch/_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
# shellcheck source=launch/_supervise.sh
source launch/_supervise.sh
[[ $TANGO_PLATFORM != tpu ]] || fail "--platform=tpu: one process has all chips of a TPU VM; see launch/tpu_vm.sh."
export LOCAL_DEVICES=$devices
# shellcheck source=launch/flags_cpu.sh
source "launch/flags_$TANGO_PLATFORM.sh"

# Seconds that processes get to end by themselves once one of them was lost: their state cannot be saved without it.
grace_s=30
mkdir -p "$logs"

free_port() { python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# One line per process: the cores it may use, so that they do not push each other aside. Empty: fewer cores than
# processes.
core_shares() {
    python - "$processes" <<'PYTHON'
import os, sys
count = int(sys.argv[1])
cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
for i in range(count):
    print(*cores[len(cores) * i // count : len(cores) * (i + 1) // count], sep=",")
PYTHON
}
mapfile -t cores < <(core_shares)

# start_process ID COMMAND...
start_process() {
    local id=$1 pinned=()
    shift
    export JAX_PROCESS_ID=$id
    [[ $TANGO_PLATFORM == gpu ]] && JAX_LOCAL_DEVICE_IDS=$(seq -s, $((id * devices)) $(((id + 1) * devices - 1))) &&
        export JAX_LOCAL_DEVICE_IDS
    [[ -n ${cores[id]} ]] && command -v taskset >/dev/null && pinned=(taskset -c "${cores[id]}")
    if ((id == 0)); then
        "${pinned[@]}" "$@" &
    else
        "${pinned[@]}" "$@" >>"$logs/process_$id.log" 2>&1 &
    fi
    pids[id]=$!
}

# signal_all SIGNAL: to those that still run.
signal_all() {
    local id
    for ((id = 0; id < ${#pids[@]}; id++)); do
        [[ -n ${exit_codes[id]:-} ]] || kill "-$1" "${pids[id]}" 2>/dev/null || true
    done
}

on_signal() {
    if [[ -n $stopping ]]; then
        signal_all KILL
    else
        stopping=1
        say "ending the processes; they save their state first (once more: kill them)"
        signal_all TERM
    fi
}

# Notes the end of a process. A bad one ends the rest too. After a preemption they end by themselves: all agreed on it,
# and save for as long as it takes.
on_exit() {
    local id=$1 code=$2
    exit_codes[id]=$code
    ((code == 0)) && return
    say "process $id ended with exit code $code: $(describe_exit "$code")"
    ((code == 75)) && return
    ((id > 0)) && tail -n 5 "$logs/process_$id.log" | sed "s/^/  process $id: /" >&2
    ((kill_at > 0)) && return
    kill_at=$((SECONDS + grace_s))
    [[ -n $stopping ]] || signal_all TERM
}

run_all() {
    local id code running=1 kill_at=0
    pids=()
    JAX_COORDINATOR_ADDRESS=127.0.0.1:$(free_port)
    export JAX_COORDINATOR_ADDRESS JAX_COORDINATOR_BIND_ADDRESS=$JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES=$processes
    for ((id = 0; id < processes; id++)); do start_process "$id" "$@"; done
    [[ -n $stopping ]] && signal_all TERM # asked for while the processes were started
    while ((running)); do
        sleep 0.2 || true # Ctrl-C ends it too
        running=0
        for ((id = 0; id < processes; id++)); do
            [[ -n ${exit_codes[id]:-} ]] && continue
            if kill -0 "${pids[id]}" 2>/dev/null; then
                running=1
            else
                code=0
                wait "${pids[id]}" || code=$?
                on_exit "$id" "$code"
            fi
        done
        ((kill_at > 0 && SECONDS >= kill_at)) && signal_all KILL
    done
    return 0
}

trap on_signal TERM INT HUP
((processes > 1)) && say "$processes processes x $devices devices; output of all but the first in $logs"
supervise run_all "$@"
