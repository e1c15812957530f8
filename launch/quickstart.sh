#!/usr/bin/env bash
# Trains a small generator and verifier on last-letter concatenation, on CPU, and sets the run beside stored runs of other
# arms. Arguments go to tango_jax.train and win over those given here:
# `bash launch/quickstart.sh --workdir=runs/second --config.seed=1`. Relative paths start at the repository root.
set -euo pipefail
# shellcheck source=launch/_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"

say "training on last-letter concatenation into runs/last_letter (4 to 11 minutes on two CPU cores)"
exec python -m tango_jax.train --config=configs/last_letter.py --workdir=runs/last_letter \
  --config.compare_with=configs/results/last_letter.csv "$@"
