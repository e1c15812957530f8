"""Train both roles: supervised fine-tuning (stage 1), then interleaved reinforcement learning (stage 2).

    python -m tango_jax.train --config=last_letter --workdir=runs/last_letter
    python -m tango_jax.train --config=own_problems --model=MODEL --problems=FILE

The workdir receives metrics.jsonl, summary.json, provenance.json, curves.png, transcripts.md and the checkpoints. If
interrupted, the same command resumes where it stopped, bit for bit. The code: tango_jax/README.md.
Python programs call `train` with a configuration from `load_config`, and `read_metrics` of the workdir.
"""

import os
from collections.abc import Callable, Mapping, Sequence

from ml_collections import ConfigDict

from tango_jax.cli.command_line import load_config, parse_command_line
from tango_jax.cli.config_file import with_settings
from tango_jax.cli.session import configured, session
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES
from tango_jax.loop import run
from tango_jax.method.arms import Arm
from tango_jax.rl.algorithms import Algorithm
from tango_jax.runtime import hosts
from tango_jax.runtime.checks import folder_to_write, require
from tango_jax.runtime.console import Console
from tango_jax.runtime.user_code import given
from tango_jax.tracking.metrics import read_metrics

__all__ = ["load_config", "main", "read_metrics", "train"]


def train(
    config: ConfigDict, workdir: str | os.PathLike, console: Console | None = None, *, arm: Arm | None = None,
    rewards: Mapping[str, Callable | Sequence[Callable]] | None = None,
    algorithms: Mapping[str, Algorithm] | None = None,
    loss_terms: Mapping[str, Callable] | None = None, task: Callable | None = None, grader: Callable | None = None,
) -> dict:
    """Train from a Python program or a notebook; returns what is in summary.json.

    No signal handler is installed. jax's compilation cache and the allocator stay as `cli.session.configure` sets them.
    The same call resumes an interrupted run if the source of every object given here is the same.

    Args:
        console: default: print to standard output; `Console(enabled=False)` prints nothing.
        arm: the record to train (method/own_arm.py), in place of `config.arm`.
        rewards: by role, a function that scores one response, or several, with weights in `config.ROLE.reward_weights`
            (rl/own_reward.py).
        algorithms: by role, how rewards become advantages (rl/algorithms.py).
        loss_terms: by role, a loss per token that is added (rl/loss_term.py).
        task: a function from the configuration to a Task (tasks/task.py).
        grader: a function (problem, answer) -> bool (tasks/own_grader.py).

    Raises ValueError for a wrong setting or workdir, and FloatingPointError for a loss that is not finite.
    """
    own = {"arm": arm, "task.name": task, "task.grader": grader}
    rewards = {role: list(one) if isinstance(one, list | tuple) else [one] for role, one in (rewards or {}).items()}
    for name, by_role in (("rewards", rewards), ("loss.algorithm", algorithms), ("loss.term", loss_terms)):
        unknown = sorted(set(by_role or {}) - set(ROLES))
        require(not unknown, f"{name}: {', '.join(map(repr, unknown))} is no role: choose from {' and '.join(ROLES)}")
        own |= {f"{role}.{name}": value for role, value in (by_role or {}).items()}
    with given({key: value for key, value in own.items() if value is not None}) as settings:
        config = with_settings(config, settings)
        validate(config)
        workdir = folder_to_write("workdir", workdir)
        with configured(config, console) as console:
            return run.run_or_resume(config, workdir, console, preemption=hosts.Preemption(is_watching=False))


def main(argv: Sequence[str] | None = None) -> None:
    config, workdir = parse_command_line("train", __doc__, argv, "runs/NAME")
    with session(config, workdir) as console:
        run.run_or_resume(config, workdir, console)


if __name__ == "__main__":
    main()
