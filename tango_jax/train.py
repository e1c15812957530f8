"""Train both roles: supervised fine-tuning (stage 1), then interleaved reinforcement learning (stage 2).

    python -m tango_jax.train --config=last_letter --workdir=runs/last_letter

The workdir receives metrics.jsonl, summary.json, curves.png, transcripts.md and the checkpoints. If interrupted, the
same command resumes where it stopped, bit for bit. To read the code, start at tango_jax/loop/run.py.
"""

from collections.abc import Sequence

from tango_jax.cli.command_line import parse_command_line
from tango_jax.cli.session import session
from tango_jax.loop.run import train


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
    config, workdir = parse_command_line("train", __doc__, argv, "runs/last_letter")
    with session(config, workdir) as console:
        train(config, workdir, console)


if __name__ == "__main__":
    main()
