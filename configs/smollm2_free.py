"""SmolLM2-135M with adapters on last letters whose steps may name one word or two: two forms of the step advantage.

Command:   python -m tango_jax.ablate --config=configs/smollm2_free.py:tango --workdir=runs/smollm2_free
           and the same for the other PARTS, with one workdir for all. Offline, see smollm2_last_letter.py.
Hardware:  a CPU with two cores and 16 GiB of memory.
Time:      stage 1 of both roles takes about an hour on two busy cores, a run of `gold_steps` 19 to 23 minutes on one.
Expected:  results/smollm2_free.md.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped
from tango_jax.rl.step_norm import ELEMENTS

# Arm, and forms of the step advantage.
PARTS = {
    "grpo": ("grpo", []),
    "gold": ("gold_steps", [ELEMENTS, "solutions"]),
    "tango": ("tango", [ELEMENTS, "solutions"]),
}


def get_config(argument: str = "") -> ConfigDict:
    """`argument`: a part of the experiment."""
    part = argument or "tango"
    if part not in PARTS:
        raise ValueError(f"there is no part {part!r}: choose one of {', '.join(PARTS)}")
    config = load_shipped("smollm2_lora", "published")
    config.task.double_steps, config.task.hard_error = 0.5, 0.4
    arm, forms = PARTS[part]
    config.ablation.arms = (arm,)
    adapters = config.ablation.grid["weights"]
    config.ablation.grid = {"weights": adapters} | ({"generator.loss.step_norm": forms} if forms else {})
    return config
