"""Last letters of eight words in which a step may name one word or two, and the forms of the step advantage.

The number of steps is free, so a form that counts steps shows: the teacher of stage 1 writes every second step as a
double one and errs twice as often in these.

Command:   python -m tango_jax.train --config=configs/last_letter_free.py --workdir=runs/last_letter_free
           python -m tango_jax.ablate --config=configs/last_letter_free.py:gold --workdir=runs/free
           and the same for the other PARTS; --config.ablation.workers=2 for two cores.
Hardware:  any CPU with two cores and 4 GiB of memory; nothing is downloaded.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped
from tango_jax.rl.step_norm import ELEMENTS, FORMS

STEP_NORMS = [ELEMENTS, *FORMS]
# Arm, and forms of the step advantage.
PARTS = {
    "grpo": ("grpo", []),
    "gold": ("gold_steps", STEP_NORMS),
    "tango": ("tango", STEP_NORMS),
    "fixed": ("tango", [ELEMENTS, "solutions"]),  # the quickstart, whose problems fix the number of steps
}


def get_config(argument: str = "") -> ConfigDict:
    """`argument`: empty for one run, a part of the experiment, or a part and its starts, as in gold:20,21."""
    part, _, starts = argument.partition(":")
    if part and part not in PARTS:
        raise ValueError(f"there is no part {part!r}: choose one of {', '.join(PARTS)}")
    config = load_shipped("last_letter")
    config.rl.alpha_schedule = "none"  # step rewards count for half throughout, so that their form shows
    if part != "fixed":
        set_free_steps(config)
    if part:
        arm, forms = PARTS[part]
        config.rollouts.every = 0
        config.ablation.arms, config.ablation.seeds = (arm,), (0, 1, 2)
        config.ablation.grid = ({"generator.loss.step_norm": forms} if forms else {}) | {
            "task.data_seed": [int(start) for start in starts.split(",")] if starts else [50, 51, 52]
        }
    return config


def set_free_steps(config: ConfigDict) -> None:
    task = config.task
    task.double_steps, task.hard_error, task.reading_error = 0.5, 0.4, 0.4
    for role in (config.generator, config.verifier):
        role.sft.max_heldout_loss = 0.2  # whether a step names one word or two cannot be known
    config.generator.sft.steps = 800  # after 400, samples are right far less often than greedy solutions
    config.verifier.sft.steps = 1200  # after 400, it cannot read steps that name two words
