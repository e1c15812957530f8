"""The quickstart with adapters: stage 1 trains all parameters, RL trains adapters of several ranks and learning rates.

Command:   python -m tango_jax.ablate --config=configs/last_letter_lora.py --workdir=runs/lora
           :rates runs the learning rates on development starts, with grpo alone.
Hardware:  any CPU with two cores and 4 GiB of memory.
Time:      about half a minute a run on one core, 24 runs, after a stage 1 of two minutes for each start.
Expected:  mean accuracy of `tango` 0.547 with all parameters, 0.531 with rank 32, 0.528 with 8 and 0.443 with 1.
           results/adapters.md has all runs.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped

RATE = 7e-4  # chosen by :rates, see results/adapters.md


def with_rank(rank: int, rate: float = RATE) -> dict:
    """The settings of a cell of the grid."""
    return {f"{role}.{key}": value for role in ("generator", "verifier")
            for key, value in (("model.lora.rank", rank), ("optimizer.lora_lr", rate), ("sft.full", True))}


def get_config(argument: str = "") -> ConfigDict:
    """`argument`: empty, or rates."""
    if argument not in ("", "rates"):
        raise ValueError(f"there is no part {argument!r}: write rates, or nothing")
    config = load_shipped("last_letter")
    config.rollouts.every = 0
    config.ablation.arms, config.ablation.seeds = ("grpo", "tango"), (0, 1, 2)
    ranks = {"full": {}} | {str(rank): with_rank(rank) for rank in (1, 8, 32)}
    config.ablation.grid = {"rank": ranks, "task.data_seed": [20]}
    if argument:
        config.ablation.arms, config.ablation.seeds = ("grpo",), (0, 1)
        rates = {f"{rate:g}": with_rank(8, rate) for rate in (3e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 3e-3, 1e-2)}
        config.ablation.grid = {"rate": rates, "task.data_seed": [4, 5]}
    return config
