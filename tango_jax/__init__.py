"""RL Tango in JAX and Flax: a generator and a verifier language model, trained together with reinforcement learning.

Nothing here imports jax, so that a program can still set its XLA flags. Start reading at `tango_jax/train.py`.
tango_jax/README.md has the axis letters and the list of jitted functions.
"""

import os
import sys

__version__ = "0.1.0"

RESUMABLE_COMMANDS = ("train", "sft", "generate", "evaluate", "ablate")


def is_resumable_command() -> bool:
    """Valid during the import: with `-m`, sys.argv[0] is "-m" only until Python has found the module."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":
        names = {f"{flag}tango_jax.{command}" for command in RESUMABLE_COMMANDS for flag in ("", "-m")}
        return not names.isdisjoint(sys.orig_argv)
    # A worker process that multiprocessing spawns inherits sys.argv, but not the command line of its Python.
    names = {f"tango-{command}" for command in RESUMABLE_COMMANDS}
    return os.path.basename(program) in names and program in sys.orig_argv


# transformers warns at every import that PyTorch is missing.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

if is_resumable_command():
    # The other imports take seconds, and SIGTERM may come during them.
    from tango_jax.runtime import termination

    termination.watch(is_starting=True)
