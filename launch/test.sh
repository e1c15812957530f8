#!/usr/bin/env bash
# Lint, then the tests, in two processes. Their tools are installed first: extras in pyproject.toml. Without arguments,
# those marked `long` are left out; `--all` runs them, too. Other arguments go to pytest:
# `bash launch/test.sh tests/rl/test_losses.py -k grpo`; `-n 0` runs them in one process, as a debugger wants it.
set -euo pipefail
# shellcheck source=launch/_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
install_extras test notebooks tensorboard wandb

selected=()  # to bash 3 an empty array is unset: see the last line
if (($# == 0)); then
    selected=(-m "not long")
elif [[ $1 == --all ]]; then
    shift
fi

say "ruff check (a second), lint-imports (a few seconds)"
python -m ruff check tango_jax configs launch tests notebooks  # not what a user has put beside them
lint-imports --no-logo --no-cache
say "pytest (5 to 15 minutes on two CPU cores, with --all three times as long)"
# Whole files to a process each: what a file's tests share is made once. In the order of tests/conftest.py.
exec python -m pytest -q -n 2 --dist=loadfile --no-loadscope-reorder ${selected[@]+"${selected[@]}"} "$@"
