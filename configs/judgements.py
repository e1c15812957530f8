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
# Parts whose verifiers imitate other texts, and the names of their stages 1.
OWN_VERIFIER = {"first_error": "judgements=first_error,start={}", "scored": "start={},marks_alone"}
# Turns of the warm-ups that train the verifier alone, in the parts written_alone and so on, and words of the pool.
ALONE = {"written": [20, 40], "first_error": [20, 40], "scored": [20, 60, 120]}
WORDS = (4, 6, 8)
STARTS = {"last_letter": (60, 61, 62), "last_letter_long": (60, 61, 62), "state_tracking": (60, 61, 62)}


def get_config(argument: str = "") -> ConfigDict:
    """`argument`: a part of the comparison, or the part and its task, as in scored:last_letter_long; a third place
    names the starts, as in scored:last_letter:4,5."""
    whole, task, starts = ((argument or "written").split(":") + ["", ""])[:3]
    part, task, is_alone = whole.removesuffix("_alone"), task or "last_letter", whole.endswith("_alone")
    if part not in (ALONE if is_alone else PARTS) or task not in STARTS or is_alone and task != "last_letter":
        raise ValueError(f"there is no {argument!r}: choose a part, {', '.join(PARTS)}, and perhaps a task, "
                         f"{' or '.join(STARTS)}; or {', '.join(f'{name}_alone' for name in ALONE)}")
    # State tracking as the relatives have it, with longer problems: as shipped, outcomes alone say enough.
    is_harder = task == "state_tracking"
    config = load_shipped("last_letter_family", "beside:state_tracking") if is_harder else load_shipped(task)
    config.rollouts.every = 0
    config.ablation.seeds = (0, 1, 2)
    config.ablation.arms, settings = PARTS[part]
    chosen = [int(start) for start in starts.split(",")] if starts else list(STARTS[task])
    grid = {"judgements": settings} if settings else {}
    if is_alone:
        config.ablation.seeds, config.rl.generator_steps = (0,), 1
        config.eval.problems, config.eval.pool = 12, 96
        grid["rl.warmup_steps"] = ALONE[part]
        grid["words"] = {str(words): {"task.test_words": (words, words)} for words in WORDS}
    if whole == "written":
        grid["task.data_seed"] = chosen
        config.ablation.grid = grid
        return config
    made = dict.fromkeys(("generator", "verifier"), "written/stage_one/data_seed={}")
    if part in OWN_VERIFIER:
        made["verifier"] = f"{part}/stage_one/{OWN_VERIFIER[part]}" if is_alone else None
    grid["start"] = {
        str(start): {"task.data_seed": start} | {f"{role}.init_from": f"runs/judgements/{task}/{name.format(start)}"
                                                 for role, name in made.items() if name}
        for start in chosen
    }
    config.ablation.grid = grid
    return config
