#!/usr/bin/env bash
# Lint, then the tests, in two processes. Their tools are installed first: extras in pyproject.toml. Arguments go to
# pytest: `bash launch/test.sh tests/rl/test_losses.py -k grpo`; `-n 0` runs them in one process, as a debugger wants it.
set -euo pipefail
# shellcheck source=launch/_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
install_extras test notebooks tensorboard wandb

say "ruff check (a second), lint-imports (a few seconds)"
python -m ruff check .
lint-imports --no-logo --no-cache
say "pytest (some minutes on two CPU cores)"
# Whole files to a process each: what a file's tests share is made once. In the order of tests/conftest.py.
exec python -m pytest -q -n 2 --dist=loadfile --no-loadscope-reorder "$@"
