"""Relatives of RL Tango under one protocol: they vary who judges, whose weights, what follows a verdict, whose label.

Command:   python -m tango_jax.ablate --config=configs/last_letter_family.py:one_policy \
               --workdir=runs/family/last_letter/one_policy
           The other PARTS are run in the same way, each in a folder of that name. Run PART_beside after PART: it
           starts from the stage 1 in that folder. The other tasks of STARTS are run as one_policy:state_tracking and so
           on, in runs/family/state_tracking. --config.ablation.workers=2 uses two cores. This makes a table and a
           figure of a task:
           python -m tango_jax.ablate --figures runs/family/last_letter/*/ablation.csv --against=grpo
Hardware:  any CPU with two cores and 8 GiB of memory.
Time:      about a minute a run on one core, two to four minutes a run of second_try; 30 runs of relatives and 60 of
           baselines. Stage 1 takes two to ten minutes for each start, in state tracking up to an hour.
Expected:  results/family.md, results/family_state_tracking.md and results/family_long.md.
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped

TRUST = {"rl.trust": (0.4, 0.55), "rl.judge": "failed", "rl.alpha_schedule": "none"}
PARTS = {
    "beside": ("grpo", "gold_steps", "tango"),
    "trusted": ("tango",),
    "one_policy": ("self_verify", "no_labels"),
    "one_policy_beside": ("grpo", "gold_steps"),
    "second_try": ("second_try",),
    "second_try_beside": ("grpo", "gold_steps"),
    "taught": ("taught_verifier",),
    "taught_beside": ("grpo", "tango"),
    "judged": ("meta_judged",),
    "judged_beside": ("tango",),
}
# Parts with a stage 1 of their own, from which their controls, PART_beside, start as well. What it teaches beside the
# roles' own prompts, as part of a setting's name; and the same as part of its folder's name (method/load.py,
# Method.stage_one_kind).
STAGE_ONE = {
    "one_policy": ("both_roles", "one_policy"),
    "second_try": ("second_tries", "one_policy,second_try"),
    "taught": ("answers_shown", "informed"),
    "judged": ("second_judgements", "second_judgement"),
}
# By task. Of twelve words there are runs of `grpo`, `gold_steps` and `tango` from these starts in
# results/trust_long.csv.
STARTS = {"last_letter": (20, 21, 22), "last_letter_long": (10, 11, 12), "state_tracking": (20, 21, 22)}


def make_room(config: ConfigDict, part: str) -> None:
    """Room for the prompts that only some arms have, and as many examples of each role's own prompt in stage 1 as the
    other arms get."""
    generator, verifier = config.generator, config.verifier
    question, verification = generator.max_prompt, verifier.max_response
    if part == "second_try":
        generator.prompt_buckets = (question,)
        generator.max_prompt, generator.sft.pack_length = question + generator.max_response + verification + 2, 0
        verifier.sft.pack_length = generator.max_prompt + generator.max_response  # it learns second tries
        generator.sft.batch_size *= 2
    if part in ("taught", "judged"):
        verifier.prompt_buckets = (*verifier.prompt_buckets, verifier.max_prompt)
        verifier.max_prompt += verification + 2
        verifier.sft.pack_length = 0
        verifier.sft.batch_size *= 2


def make_harder(config: ConfigDict) -> None:
    """State tracking with the quickstart's schedule, longer problems and a worse teacher: as shipped, outcomes alone
    say enough (results/family.md)."""
    config.task.hard_error = 0.9
    config.task.rl_swaps, config.task.test_swaps, config.task.verifier_swaps = (8, 8), (), (2, 4)
    quickstart = load_shipped("last_letter").rl
    config.rl.update({key: quickstart[key] for key in ("generator_steps", "warmup_steps", "alpha_schedule")})


def get_config(argument: str = "") -> ConfigDict:
    """`argument`: a part of the comparison, or the part and its task, as in second_try:state_tracking; a third place
    names the starts, as in second_try:last_letter:4,5."""
    part, task, starts = ((argument or "one_policy").split(":") + ["", ""])[:3]
    task = task or "last_letter"
    if part not in PARTS or task not in STARTS:
        raise ValueError(f"there is no {argument!r}: choose a part, {', '.join(PARTS)}, and perhaps a task, "
                         f"{' or '.join(STARTS)}")
    config = load_shipped(task)
    config.rollouts.every = 0
    if task == "state_tracking":
        make_harder(config)
    made_by = part.removesuffix("_beside")  # the part that makes its stage 1
    make_room(config, made_by)
    if part in ("one_policy_beside", "second_try_beside"):
        config.verifier.adapter = "generator"
    config.ablation.arms, config.ablation.seeds = PARTS[part], (0, 1)
    chosen = [int(start) for start in starts.split(",")] if starts else list(STARTS[task])
    own = {"trust": {"on": TRUST}} if part == "trusted" else {}
    name, kind = STAGE_ONE.get(made_by, ("", ""))
    own |= {"stage_one": {name: {}}} if name else {}
    if part != made_by:
        made = {start: f"runs/family/{task}/{made_by}/stage_one/data_seed={start},{kind}" for start in chosen}
        own["start"] = {str(start): {"task.data_seed": start, "generator.init_from": folder,
                                     "verifier.init_from": folder} for start, folder in made.items()}
    else:
        own["task.data_seed"] = chosen
    config.ablation.grid = own
    return config
