"""The quickstart after warm-ups of 0 to 20 turns, and longer problems, each with and without trust.

Command:   python -m tango_jax.ablate --config=configs/last_letter_trust.py:trusted --workdir=runs/trust
           The other PARTS are run in the same way. Parts of longer problems need another folder.
           --config.ablation.workers=2 uses two cores.
Hardware:  any CPU with two cores and 8 GiB of memory.
Time:      about half a minute a run on one core, 180 runs, after a stage 1 of two minutes for each start. Longer
           problems take two minutes a run, 48 runs, after a stage 1 of fifteen minutes to half an hour.
Expected:  results/trust.md.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped

TRUST = {"rl.trust": (0.4, 0.55), "rl.judge": "failed", "rl.alpha_schedule": "none"}
UNTIL = TRUST | {"rl.warmup_until": 1.0}
WARM_UPS = [0, 3, 6, 12, 20]
# Arms, whether step rewards are weighed by trust, and warm-ups.
PARTS = {
    "baselines": (("grpo", "gold_steps"), None, None),
    "published": (("tango",), False, WARM_UPS),
    "trusted": (("tango",), True, WARM_UPS),
    "left_alone": (("fixed_verifier_warm",), True, WARM_UPS[1:]),  # without a warm-up nothing would train it
    "published_left_alone": (("fixed_verifier_warm",), False, WARM_UPS[1:]),
    "until": (("tango",), True, [20]),  # a warm-up that ends once trust is 1, beside the whole one
    "long": (("tango",), True, None),
    "long_published": (("grpo", "gold_steps", "tango"), False, None),
}


def get_config(argument: str = "") -> ConfigDict:
    """`argument`: a part of the experiment, or the part and its starts, as in trusted:4,5."""
    part, _, starts = (argument or "trusted").partition(":")
    if part not in PARTS:
        raise ValueError(f"there is no part {part!r}: choose one of {', '.join(PARTS)}")
    is_long = part.startswith("long")
    config = load_shipped("last_letter_long" if is_long else "last_letter")
    config.rollouts.every = 0
    config.ablation.seeds = (0, 1, 2, 3) if is_long else (0, 1, 2)
    arms, is_trusted, warm_ups = PARTS[part]
    config.ablation.arms = arms
    grid = {} if is_trusted is None else {"trust": {"on": TRUST} if is_trusted else {"off": {}}}
    if part == "until":
        grid["trust"]["until"] = UNTIL
    grid |= {"rl.warmup_steps": warm_ups} if warm_ups else {}
    chosen = [int(start) for start in starts.split(",")] if starts else [10, 11, 12] if is_long else [20, 21, 22]
    config.ablation.grid = grid | {"task.data_seed": chosen}
    return config
