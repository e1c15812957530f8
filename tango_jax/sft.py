"""Stage 1 alone: supervised fine-tuning of each role with `sft.steps`.

    python -m tango_jax.sft --config=last_letter --workdir=runs/sft

The checkpoints of the roles are written to DIR/sft. Once they are finished, another run can start from them with
--config.generator.init_from=DIR --config.verifier.init_from=DIR.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.cli.command_line import parse_command_line
from tango_jax.cli.session import configured, session
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES
from tango_jax.grading import check_grader
from tango_jax.loop.best import check_keep_best
from tango_jax.loop.breakdown import names_memory
from tango_jax.loop.init_from import check_init_from, sft_directory
from tango_jax.loop.run import rehearsed
from tango_jax.loop.stage_one import run_stage_one
from tango_jax.method.own_arm import shares_policy
from tango_jax.rl.policy import make_policies
from tango_jax.runtime import hosts
from tango_jax.runtime.checks import folder_to_write
from tango_jax.runtime.console import Console
from tango_jax.runtime.lock import locked
from tango_jax.tracking.provenance import begin
from tango_jax.tracking.run_config import check_config


def sft(config: ConfigDict, workdir: str | os.PathLike, console: Console | None = None) -> None:
    """Run stage 1 as the command does, from a Python program; see `tango_jax.train.train`. Raises ValueError."""
    validate(config)
    workdir = folder_to_write("workdir", workdir)
    with configured(config, console) as console:
        _run(config, workdir, console, hosts.Preemption(is_watching=False))


def main(argv: Sequence[str] | None = None) -> None:
    config, workdir = parse_command_line("sft", __doc__, argv, "runs/sft")
    with session(config, workdir) as console:
        _run(config, workdir, console, hosts.Preemption())


def _run(config: ConfigDict, workdir: Path, console: Console, preemption: hosts.Preemption) -> None:
    trained = [role for role in ROLES if config[role].sft.steps and not config[role].init_from]
    if not trained:
        states = ", ".join(f"{role}.sft.steps={config[role].sft.steps} {role}.init_from={config[role].init_from!r}"
                           for role in ROLES)
        raise ValueError(f"no role has a stage 1 to run ({states}): set the steps, and leave init_from empty "
                         "(--config.generator.init_from=)")
    with locked(workdir, console):
        check_config(config, workdir / "config.json")
        provenance = begin(config, workdir, console)
        needs_both = config.verifier.sft.start == "generator" or config.task.stage_one == "self"
        needed = ROLES if needs_both or shares_policy(config) else trained
        check_init_from(config, needed)
        policies = make_policies(config, shares_policy(config))
        method, task = rehearsed(config, policies)
        check_keep_best(config, task, method)
        check_grader(task.grade_kind)  # stage 1 does not grade, but the stages that follow do
        for note in (*config.notes.splitlines(), *task.notes):
            console.log(note)
        policies = {role: policies[role] for role in needed}
        with names_memory("setting up the policies", ["init"], config, *policies.values()):
            run_stage_one(policies, config, task, workdir, console, preemption, provenance)
        for role in trained:
            console.log(f"{role}: {sft_directory(workdir, role)}")


if __name__ == "__main__":
    main()
