"""Verifiers that write, that say how sure they are, that stop at the first error, and that are read in one pass.

Command:   python -m tango_jax.ablate --config=configs/judgements.py:written \
               --workdir=runs/judgements/last_letter/written
           The other PARTS are run in the same way, each in a folder of that name, and start from the stage 1 in the
           folder of `written`, which comes first. The other tasks of STARTS are run as written:last_letter_long and so
           on, in runs/judgements/last_letter_long. --config.ablation.workers=2 uses two cores. This makes the tables
           and figures of a task:
           python -m tango_jax.ablate --figures runs/judgements/last_letter/*/ablation.csv --against=grpo
Hardware:  any CPU with two cores and 8 GiB of memory.
Time:      half a minute to a minute a run of eight words on one core, two to four minutes a run of the other tasks.
           Stage 1 takes two minutes for each start, with twelve words half an hour, in state tracking up to an hour.
Expected:  results/judgements.md.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped

TRUST = {"rl.trust": (0.4, 0.55), "rl.judge": "failed", "rl.alpha_schedule": "none"}
# Arms, and what they have beside the settings of the task.
PARTS = {
    "written": (("tango",), {"written": TRUST}),
    "baselines": (("grpo", "gold_steps"), {}),
    "soft": (("tango",), {"soft": TRUST | {"rl.step_reward": "probability"}}),
    "first_error": (("tango",), {"first_error": TRUST | {"verifier.stop_at_first_error": True}}),
    "scored": (("scored", "scored_exact"), {"scored": TRUST}),
}
OWN_VERIFIER = ("first_error", "scored")  # their verifiers imitate other texts
STARTS = {"last_letter": (60, 61, 62), "last_letter_long": (60, 61, 62), "state_tracking": (60, 61, 62)}


def get_config(argument: str = "") -> ConfigDict:
    """`argument`: a part of the comparison, or the part and its task, as in scored:last_letter_long; a third place
    names the starts, as in scored:last_letter:4,5."""
    part, task, starts = ((argument or "written").split(":") + ["", ""])[:3]
    task = task or "last_letter"
    if part not in PARTS or task not in STARTS:
        raise ValueError(f"there is no {argument!r}: choose a part, {', '.join(PARTS)}, and perhaps a task, "
                         f"{' or '.join(STARTS)}")
    # State tracking as the relatives have it, with longer problems: as shipped, outcomes alone say enough.
    config = load_shipped("last_letter_family:beside:state_tracking" if task == "state_tracking" else task)
    config.rollouts.every = 0
    config.ablation.seeds = (0, 1, 2)
    config.ablation.arms, settings = PARTS[part]
    chosen = [int(start) for start in starts.split(",")] if starts else list(STARTS[task])
    grid = {"judgements": settings} if settings else {}
    if part == "written":
        grid["task.data_seed"] = chosen
    else:
        made = {start: f"runs/judgements/{task}/written/stage_one/data_seed={start}" for start in chosen}
        roles = ("generator",) if part in OWN_VERIFIER else ("generator", "verifier")
        grid["start"] = {str(start): {"task.data_seed": start} | {f"{role}.init_from": folder for role in roles}
                         for start, folder in made.items()}
    config.ablation.grid = grid
    return config
