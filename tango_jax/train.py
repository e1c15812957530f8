"""Train both roles: supervised fine-tuning (stage 1), then interleaved reinforcement learning (stage 2).

    python -m tango_jax.train --config=last_letter --workdir=runs/last_letter
    python -m tango_jax.train --config=own_problems --model=MODEL --problems=FILE

The workdir receives metrics.jsonl, summary.json, provenance.json, curves.png, transcripts.md and the checkpoints. If
interrupted, the same command resumes where it stopped, bit for bit. To read the code, start at tango_jax/loop/run.py.
Python programs call `train` with a configuration from `load_config`, and `read_metrics` of the workdir.
"""

import os
from collections.abc import Sequence

from ml_collections import ConfigDict

from tango_jax.cli.command_line import load_config, parse_command_line
from tango_jax.cli.session import configured, session
from tango_jax.cli.validation import validate
from tango_jax.loop import run
from tango_jax.runtime import hosts
from tango_jax.runtime.checks import folder_to_write
from tango_jax.runtime.console import Console
from tango_jax.tracking.metrics import read_metrics

__all__ = ["load_config", "main", "read_metrics", "train"]


def train(config: ConfigDict, workdir: str | os.PathLike, console: Console | None = None) -> dict:
    """Train as the command does, from a Python program or a notebook; returns what is in summary.json.

    It installs no signal handler; what `cli.session.configure` sets (jax's compilation cache, on CPUs the allocator)
    stays set. After an interruption the same call resumes from the last checkpoint. `console` replaces the one that
    prints to standard output; `Console(enabled=False)` prints nothing.

    Raises:
        ValueError: as the command's one-line errors: a setting, a workdir in use, or one of a run of another method.
        FloatingPointError: a loss is not finite.
    """
    validate(config)
    workdir = folder_to_write("workdir", workdir)
    with configured(config, console) as console:
        return run.train(config, workdir, console, preemption=hosts.Preemption(is_watching=False))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
    config, workdir = parse_command_line("train", __doc__, argv, "runs/NAME")
    with session(config, workdir) as console:
        run.train(config, workdir, console)


if __name__ == "__main__":
    main()
