#!/usr/bin/env bash
# One command on every worker of a Cloud TPU slice, through gcloud. Run it where it can stay: in tmux on a small VM or
# in Cloud Shell. It makes the slice if there is none, copies this repository to every worker, runs the command on all
# of them and restarts it on all of them (launch/_supervise.sh says when). A preempted slice is deleted and made anew.
#
#   TPU_NAME=tango TPU_ZONE=us-east5-a TPU_TYPE=v5p-64 bash launch/tpu_vm.sh \
#       python -m tango_jax.train --config=configs/qwen2_5_math_7b.py --workdir=/mnt/share/7b
#
# Edit (or give in the environment):
TPU_NAME=${TPU_NAME:-tango}
TPU_ZONE=${TPU_ZONE:-us-east5-a}
TPU_TYPE=${TPU_TYPE:-v5p-64}                # 32 chips of two cores; gcloud compute tpus accelerator-types list
TPU_VERSION=${TPU_VERSION:-v2-alpha-tpuv5}  # the VM's image: v2-alpha-tpuv5-lite for v5e, v2-alpha-tpuv6e for v6e
TPU_CREATE_FLAGS=${TPU_CREATE_FLAGS---spot} # more options of `tpu-vm create`; set but empty: on demand
# Run on each worker before each start of the command. If it fails at the first start, the job ends; later it counts as
# a lost machine, and all start again. --workdir must lie in a folder that all workers share, for checkpoints, and so
# should the compile cache, or a new machine compiles again: add --config.compile_cache=/mnt/share/xla to the command. An
# image with a Python older than 3.11 needs another one as well. Example, which waits while a new machine still updates
# itself and holds the lock of its packages:
#   sudo apt-get install -yq -o DPkg::Lock::Timeout=600 nfs-common python3.11-venv && sudo mkdir -p /mnt/share &&
#       (mountpoint -q /mnt/share || sudo mount FILESTORE_IP:/share /mnt/share)
TPU_SETUP=${TPU_SETUP:-true}
#
# Output of the workers: runs/tpu_logs/<attempt>/<worker>.log; the first one's comes here as well. TANGO_DISTRIBUTED=1 in
# the command's environment makes jax look for the other workers. Ctrl-C and SIGTERM let the workers save and end; the
# slice stays. Delete it with: gcloud compute tpus tpu-vm delete NAME --zone=ZONE
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/_supervise.sh
source launch/_supervise.sh

say() { printf 'tango_jax: %s\n' "$*" >&2; }
fail() { say "error: $*" && exit 1; }
tpu_vm() { gcloud compute tpus tpu-vm "$1" "${@:2}" --zone="$TPU_ZONE"; }
# A connection whose worker is gone ends within two minutes.
on_all() {
    tpu_vm ssh "$TPU_NAME" --worker=all --command="$1" "${@:2}" \
        --ssh-flag="-o ConnectTimeout=15 -o ServerAliveInterval=30 -o ServerAliveCountMax=4"
}
state_of_slice() { tpu_vm describe "$TPU_NAME" --format='value(state)' 2>/dev/null || echo ABSENT; }

(($# > 0)) || fail "no command: bash launch/tpu_vm.sh python -m tango_jax.train --config=FILE --workdir=DIR"
command -v gcloud >/dev/null || fail "gcloud is not on PATH: install the Google Cloud CLI and run gcloud auth login."
logs=${TPU_LOGS:-runs/tpu_logs}
code_archive=$(mktemp)
last_words='tango_jax: this worker ended with exit code' # as _tpu_worker.sh says it
setup_failed='tango_jax: TPU_SETUP failed on this worker'
tail_pid=''
trap 'rm -f "$code_archive"; [[ -z $tail_pid ]] || kill "$tail_pid" 2>/dev/null || true' EXIT
# What runs is what lies here now; later changes do not reach a restart.
tar -czf "$code_archive" --exclude=./.git --exclude='./.venv*' --exclude=./runs .
printf -v command '%q ' "$@"

# Returns when the slice is ready. The first slice that cannot be made is a mistake; later ones wait for free capacity.
ensure_slice() {
    local state
    while state=$(state_of_slice); [[ $state != READY && -z $stopping ]]; do
        case $state in
            ABSENT)
                say "making the slice $TPU_NAME ($TPU_TYPE, $TPU_ZONE)"
                # shellcheck disable=SC2086 # several options
                tpu_vm create "$TPU_NAME" --accelerator-type="$TPU_TYPE" --version="$TPU_VERSION" \
                    $TPU_CREATE_FLAGS && continue
                ((restarts > 0)) || fail "gcloud could not make the slice; the reason is above."
                ;;
            PREEMPTED | TERMINATED | STOPPED)
                say "the slice is $state: deleting it"
                tpu_vm delete "$TPU_NAME" --quiet && continue
                ;;
            *) say "the slice is $state; looking again in a minute" ;;
        esac
        sleep "${TPU_POLL_S:-60}" || true # Ctrl-C ends it too
    done
}

copy_code() {
    tpu_vm scp "$code_archive" "$TPU_NAME:tango_jax.tar.gz" --worker=all
    on_all "rm -rf tango_jax/tango_jax && mkdir -p tango_jax && tar -xzf tango_jax.tar.gz -C tango_jax"
}

# Nothing here may end the script: what failed shows in the codes, and is tried again.
run_all() {
    local worker log gcloud_pid setup_code reason
    mkdir -p "$logs/$restarts"
    rm -f "$logs/$restarts"/*.log
    exit_codes=()
    ensure_slice
    copy_code >"$logs/$restarts/copy" 2>&1 || say "could not copy to the workers, see $logs/$restarts/copy"
    touch "$logs/$restarts/0.log"
    tail -n +1 -F "$logs/$restarts/0.log" 2>/dev/null &
    tail_pid=$!
    # A setup that fails at the first start is a mistake. On a restart the cause is more likely the machine, which may
    # be new, or the network: it counts as a lost machine, and is tried again.
    setup_code=1
    ((restarts == 0)) || setup_code=137
    # In the background, so that Ctrl-C reaches this script alone.
    on_all "if { $TPU_SETUP; }; then bash tango_jax/launch/_tpu_worker.sh $command; \
        else echo '$setup_failed'; echo '$last_words $setup_code'; fi" \
        --output-directory="$logs/$restarts" >"$logs/$restarts/gcloud" 2>&1 &
    gcloud_pid=$!
    while kill -0 "$gcloud_pid" 2>/dev/null; do wait "$gcloud_pid" || true; done
    sleep 1 || true # for the last lines
    kill "$tail_pid" && tail_pid=
    for log in "$logs/$restarts"/*.log; do
        worker=$(basename "$log" .log)
        exit_codes[worker]=$(sed -n "s/^$last_words //p" "$log" | tail -n 1)
        # No last line: the worker, or the way to it, was lost.
        exit_codes[worker]=${exit_codes[worker]:-137}
        reason=$(describe_exit "${exit_codes[worker]}")
        if grep -qxF "$setup_failed" "$log"; then reason="TPU_SETUP failed, see $log"; fi
        ((exit_codes[worker] == 0)) || say "worker $worker: exit code ${exit_codes[worker]}: $reason"
    done
}

on_signal() {
    stopping=1
    say "asking the workers to save and end"
    on_all "kill -TERM \$(cat tango_jax/.pid)" >/dev/null 2>&1 || true
}

trap on_signal TERM INT HUP
supervise run_all "$@"
