#!/usr/bin/env bash
# Lint, then the tests. Arguments go to pytest: `bash launch/test.sh tests/test_losses.py -k grpo`.
set -euo pipefail
# shellcheck source=launch/_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"

say "ruff check (a second)"
python -m ruff check .
say "pytest (some minutes on two CPU cores)"
exec python -m pytest -q "$@"
