"""Relatives of RL Tango in the quickstart's setting: one policy that checks itself, and no gold answers: family.md.

Command:   python -m tango_jax.ablate --config=configs/last_letter_family.py --workdir=runs/family
           --config.ablation.workers=2 for two cores. What they are compared with: last_letter_trust.py.
Hardware:  any CPU with two cores and 8 GiB of memory.
Time:      about half a minute a run on one core, 12 runs, after a stage 1 of three minutes for each start.
Expected:  not run so far; family.md is the protocol.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped


def get_config() -> ConfigDict:
    config = load_shipped("last_letter")
    config.rollouts.every = 0
    config.ablation.arms, config.ablation.seeds = ("self_verify", "no_labels"), (0, 1)
    config.ablation.grid = {"task.data_seed": [20, 21, 22]}
    return config
