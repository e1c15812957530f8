#!/usr/bin/env bash
# What launch/tpu_vm.sh runs on each worker of a slice: the environment, the flags, the command. The last line of output
# tells its exit code.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

trap 'echo "tango_jax: this worker ended with exit code $?"' EXIT
trap 'exit 143' TERM HUP

# A process that outlived its connection still holds the chips, and this lock. It saves and ends, and so do the others;
# then all start again together.
exec 9>>.lock
if ! flock --nonblock 9; then
    echo "tango_jax: ending the process that an earlier connection left behind"
    kill -TERM "$(<.pid)" || true
    flock --timeout 120 9 || kill -KILL "$(<.pid)" || true
    exit 143
fi
echo "$$" >.pid

export TANGO_PLATFORM=${TANGO_PLATFORM:-tpu}
# shellcheck source=launch/_env.sh
source launch/_env.sh
# shellcheck source=launch/flags_tpu.sh
source "launch/flags_$TANGO_PLATFORM.sh"

TANGO_DISTRIBUTED=1 "$@" & # jax finds the other workers
pid=$!
trap 'kill -TERM "$pid" || true' TERM HUP
running=1
while ((running)); do # a signal interrupts `wait`
    code=0
    wait "$pid" || code=$?
    kill -0 "$pid" 2>/dev/null || running=0
done
exit "$code"
