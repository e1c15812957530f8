#!/usr/bin/env bash
# The torture suite at full size: kills, flipped bytes, full disks, hostile text, mistakes. Arguments go to
# tests/torture: `bash launch/torture.sh --only=kills,flips --seed=1`, `--share=0.05` for a twentieth of everything.
set -euo pipefail
# shellcheck source=launch/_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
install_extras test

say "torture suite (over an hour on two CPU cores; --share=0.05 for a few minutes)"
export JAX_PLATFORMS=cpu PYTHONPATH=$root:$root/tests
exec python -m torture "$@"
