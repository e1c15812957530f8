"""RL Tango in JAX and Flax: a generator and a verifier language model, trained together with reinforcement learning.

Nothing that imports jax is imported here, so that `import tango_jax` starts no backend and a program can still set its
XLA flags. Start reading at `tango_jax/train.py`; the letters at the end of an array's name are its axes.
tango_jax/README.md has their legend and the list of jitted functions.

Shapes come from fixed buckets and are compiled before the first turn. A prompt is computed once for all its samples, in
sampling and in updates. A row's randomness depends on (seed, turn, row) alone, and results depend neither on packing
nor on micro-batch size.
"""

import os
import sys

__version__ = "0.1.0"

# The commands that continue where an earlier attempt stopped.
RESUMABLE_COMMANDS = ("train", "sft", "generate", "evaluate", "ablate")


def is_resumable_command() -> bool:
    """Whether this process was started as `python -m tango_jax.train`, as `tango-train`, or in one of these
    ways for another of RESUMABLE_COMMANDS.

    Meant for the time of the import: with `-m`, sys.argv[0] is "-m" only until Python has found the module.
    """
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":
        names = {f"{flag}tango_jax.{command}" for command in RESUMABLE_COMMANDS for flag in ("", "-m")}
        return not names.isdisjoint(sys.orig_argv)
    # A worker process that multiprocessing spawns inherits sys.argv, but not the command line of its Python.
    names = {f"tango-{command}" for command in RESUMABLE_COMMANDS}
    return os.path.basename(program) in names and program in sys.orig_argv


# transformers is used for tokenizers and configurations, for which it needs no PyTorch; it would say so every time.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

if is_resumable_command():
    # The rest of the imports takes seconds, and the machine may be taken away during them.
    from tango_jax.runtime import termination

    termination.watch(is_starting=True)
