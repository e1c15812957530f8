#!/usr/bin/env bash
# Checks a GPU, TPU or CPU without a network, once the environment is there: are its numbers right, and how long do layers
# of a 7B model and short runs take, in nine minutes. TANGO_SMOLLM2=FILE.gguf also trains SmolLM2-135M-Instruct. Arguments go to `python -m tango_jax.bench --check`: `bash launch/check_device.sh --out=h100
# --minutes=30`. device_check/check.md can be pasted into an issue; a run that is cut off leaves what it had, and
# `--only=quickstart --out=rest` does what the minutes did not reach.
#
# An NVIDIA GPU is found by nvidia-smi. On a TPU VM start it with TANGO_PLATFORM=tpu. TANGO_WHEELS=DIR is for a machine
# that has jax for its device but no network: the machine's Python is used, with the wheels in that folder.
set -euo pipefail
if [[ -n "${TANGO_WHEELS:-}" ]]; then
    export TANGO_PYTHON=${TANGO_PYTHON:-$(command -v python3)}
    site=$(mktemp -d)
    "$TANGO_PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$TANGO_WHEELS"/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
if [[ -z "${TANGO_PLATFORM:-}" ]] && nvidia-smi -L >/dev/null 2>&1; then
    export TANGO_PLATFORM=gpu
fi
# shellcheck source=launch/_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
# shellcheck source=/dev/null
source "launch/flags_$platform.sh"

say "checking this machine's ${platform^^} (TANGO_PLATFORM=cpu, gpu or tpu chooses another)"
exec python -m tango_jax.bench --check "$@"
