"""Checks of a configuration before any work. Each message names the value, the limit and the fix."""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import check_keys
from tango_jax.cli.ranges import check_values
from tango_jax.cli.task_validation import check_ranges, check_task
from tango_jax.config import ROLES, flatten
from tango_jax.method.load import check_rows, load_method, load_parts
from tango_jax.method.own_arm import alike, arm_name, arm_or_none, check_fixed, load_arm, make_schedule, shares_policy
from tango_jax.rl.algorithms import ALGORITHMS
from tango_jax.rl.packing import pack_shape
from tango_jax.runtime.checks import Mistakes, local_path
from tango_jax.text.templates import FIRST_ERROR, asks_to_stop, load_template
from tango_jax.tracking.evaluations import read_tables
from tango_jax.tracking.loggers import check_installed
from tango_jax.weights.peft_folder import check_lora_config
from tango_jax.weights.source import fields_of, kind_of, score_head_of, sized_model
from tango_jax.weights.workdir import settings_of

SIZES = (
    "max_", "prompt_buckets", "cache_buckets", "row_buckets", "pack_length", "loss.minibatches",
)


def validate(config: ConfigDict) -> None:
    """Raises SettingsError with everything that is wrong. Pairs of numbers are checked if each is in its range."""
    check_keys(config)
    mistakes = Mistakes()
    with mistakes.collected():
        check_values(flatten(config))
    _check_rl(config.rl, mistakes)
    _check_turns(config, mistakes)
    _check_watching(config.loggers, config.compare_with, mistakes)
    mistakes.require(not config.checkpoint.patience or bool(config.checkpoint.keep_best), "checkpoint.patience="
                     f"{config.checkpoint.patience} waits for a better value, and checkpoint.keep_best is empty: name "
                     "its metric, such as generator/accuracy")
    for name in ("arms", "seeds"):
        given = tuple(config.ablation[name])
        mistakes.require(len(given) > 0, f"ablation.{name} is empty: name at least one")
        mistakes.require(len(set(given)) == len(given), f"ablation.{name}={given} names one twice: take it out")
    names = [arm_name(arm) for arm in config.ablation.arms]
    mistakes.require(len(set(names)) == len(set(config.ablation.arms)), f"ablation.arms={tuple(config.ablation.arms)} "
                     "has two arms with the same name, and each arm needs its own folder: rename one")
    for arm in config.ablation.arms:
        with mistakes.collected():
            load_arm(arm, "ablation.arms")
    arm = arm_or_none(config)
    for role in ROLES:
        _check_role(role, config[role], config.fork_of, mistakes)
        _check_adapters(role, config, mistakes)
        if arm is None or role in arm.turns:
            _check_updates(role, config[role], config.rl, mistakes)
    if not mistakes.is_about("generate.", "generator.row_buckets"):
        check_rows(config, "generator", "generate.samples", config.generate.samples, mistakes)
    if config.verifier.sft.start == "generator" and not shares_policy(config):
        mistakes.require(all(config.generator[name] == config.verifier[name] for name in alike(config)),
                         "verifier.sft.start=generator needs model and checkpoint of both roles to be the same")
    if config.verifier.sft.start == "generator" or shares_policy(config):
        _check_same_stage_one(config, mistakes)
    if shares_policy(config):
        _check_one_policy(config, mistakes)
    with mistakes.collected():
        check_fixed(config, {role: score_head_of(config[role].checkpoint) for role in ROLES})
    method = None
    check_ranges(config.task, mistakes)
    with mistakes.collected():
        if mistakes.messages:
            load_parts(config)
        else:
            method = load_method(config)
    check_task(config, mistakes, method)
    mistakes.raise_all()


def _check_one_policy(config: ConfigDict, mistakes: Mistakes) -> None:
    generator, verifier = config.generator, config.verifier
    names = [*alike(config)]
    # If only one role has a stage 1, both start from it.
    if (verifier.sft.steps or verifier.init_from) and (generator.sft.steps or generator.init_from):
        names.append("init_from")
    different = [name for name in names if generator[name] != verifier[name]]
    said = "verifier.adapter=generator" if config.verifier.adapter == "generator" else f"arm={config.arm}"
    mistakes.require(not different, f"{said} makes both roles one policy, but generator and verifier differ in "
                     f"{', '.join(different)}: give both the same")
    arm = arm_or_none(config)
    mistakes.require(
        arm is None or arm.is_one_policy or not arm.uses_verifier or (len(arm.turns) == 2 and arm.is_interleaved),
        f"arm={config.arm} keeps a role fixed, and with verifier.adapter=generator whatever trains one role trains "
        "both: choose another arm, or leave verifier.adapter empty",
    )
    mistakes.require(
        verifier.adapter in ("", "generator", generator.adapter), f"{said} makes both roles one policy, which starts "
        f"from generator.adapter={generator.adapter!r}, and verifier.adapter={verifier.adapter} is another: leave it "
        "empty, or give both the same",
    )


def _check_same_stage_one(config: ConfigDict, mistakes: Mistakes) -> None:
    """A verifier that continues the generator's stage 1 must train the same: adapters, or all parameters."""
    both = [config[role] for role in ROLES if config[role].sft.steps and not config[role].init_from]
    mistakes.require(
        len(both) < 2 or not both[0].model.lora.rank or both[0].sft.full == both[1].sft.full,
        f"generator.sft.full={config.generator.sft.full} and verifier.sft.full={config.verifier.sft.full}: the "
        "verifier's stage 1 continues from the generator's, and both train adapters or all parameters: set both alike",
    )


def _check_watching(loggers: ConfigDict, compare_with: str, mistakes: Mistakes) -> None:
    letters = sorted(set("/\\#?%:") & set(loggers.wandb))
    mistakes.require(not letters,
                     f"loggers.wandb={loggers.wandb!r} is no project name: W&B allows no {' '.join(letters)} in it")
    with mistakes.collected():
        check_installed(loggers)
    if compare_with:
        with mistakes.collected("compare_with: "):
            read_tables([compare_with], "compare_with")


def _check_rl(rl: ConfigDict, mistakes: Mistakes) -> None:
    mistakes.require(
        not rl.trust or (len(rl.trust) == 2 and rl.trust[0] < rl.trust[1]),
        f"rl.trust={tuple(rl.trust)} must be two F1 scores that ascend, such as (0.4, 0.55), or empty",
    )
    mistakes.require(
        bool(rl.trust) or not rl.warmup_until,
        f"rl.warmup_until={rl.warmup_until} waits for trust in the verifier, and rl.trust=() does not measure it: set "
        "rl.trust, such as (0.4, 0.55), or rl.warmup_until=0",
    )
    mistakes.require(
        rl.practice != "half_right" or not rl.dynamic_sampling,
        f"rl.practice=half_right counts right answers, and rl.dynamic_sampling={rl.dynamic_sampling} drops problems "
        "whose answers are all right or all wrong before they are counted: set rl.practice=all, or "
        "rl.dynamic_sampling=0",
    )


def _check_turns(config: ConfigDict, mistakes: Mistakes) -> None:
    rl, arm = config.rl, arm_or_none(config)
    if arm is None or mistakes.is_about("rl."):
        return
    for role in arm.turns:
        algorithm, norm = config[role].loss.algorithm, config[role].loss.step_norm
        mistakes.require(
            norm == "elements" or algorithm in ALGORITHMS, f"{role}.loss.step_norm={norm} works with "
            f"{', '.join(ALGORITHMS)}, not with {role}.loss.algorithm={algorithm}: set step_norm=elements",
        )
    mistakes.require(
        arm.is_interleaved or "verifier" not in arm.turns or rl.warmup_steps > 0 or bool(config.fork_of),
        f"arm={config.arm} trains the verifier only in its warm-up, and rl.warmup_steps=0 has none: raise it, or "
        "choose an arm that does not train the verifier",
    )
    mistakes.require(
        make_schedule(config).num_turns > 0,
        f"arm={config.arm} has no turn with rl.warmup_steps={rl.warmup_steps}, rl.generator_steps={rl.generator_steps} "
        f"and rl.generator_turns_per_cycle={rl.generator_turns_per_cycle}: raise one of the first two",
    )


def _check_role(role: str, config: ConfigDict, fork_of: str, mistakes: Mistakes) -> None:
    with mistakes.collected():
        load_template(role, config.template)
    _check_stop(role, config, mistakes)
    _check_start(role, config, fork_of, mistakes)
    _check_model(role, config, mistakes)
    if not mistakes.is_about(*(f"{role}.{name}" for name in SIZES)):
        _check_lengths(role, config, mistakes)
        _check_rows(role, config, mistakes)
    mistakes.require(role == "verifier" or config.sft.start != "generator",
                     f"{role}.sft.start=generator: only the verifier's stage 1 can continue from the generator's")


def _check_stop(role: str, config: ConfigDict, mistakes: Mistakes) -> None:
    stops = config.stop_at_first_error
    mistakes.require(role == "verifier" or not stops,
                     f"{role}.stop_at_first_error=True: only the verifier judges steps; set it to False")
    asks = asks_to_stop(config.template, stops)
    mistakes.require(
        role != "verifier" or asks == stops, f"verifier.stop_at_first_error={stops}, and verifier.template="
        f"{config.template} asks {'to stop at the first error' if asks else 'to judge all steps'}: set "
        f"verifier.template={FIRST_ERROR if stops else 'math'}, or your own",
    )


def _check_model(role: str, config: ConfigDict, mistakes: Mistakes) -> None:
    if not config.checkpoint and not mistakes.is_about(f"{role}.model."):  # `make_policy` knows a checkpoint's sizes
        with mistakes.collected(f"{role}.model: "):
            sized_model(config, vocab_size=1)  # its own checks of heads and adapters
    if config.adapter == "generator":
        mistakes.require(role == "verifier",
                         "generator.adapter=generator: only the verifier can be the generator's policy")
    elif config.adapter:
        mistakes.require(
            config.model.lora.rank > 0 and bool(config.checkpoint) and not config.sft.full
            and (not config.init_from or _has_read(config.init_from, role, config)),
            f"{role}.adapter={config.adapter} needs {role}.model.lora.rank above 0, the {role}.checkpoint that it "
            f"belongs to, {role}.sft.full=False, and an empty {role}.init_from or one that began with it: set these",
        )
        with mistakes.collected(f"{role}.adapter: "):
            check_lora_config(local_path(f"{role}.adapter", config.adapter), fields_of(config).get("lora"))


def _has_read(init_from: str, role: str, config: ConfigDict) -> bool:
    """Whether the stage 1 in this workdir started from the role's adapter, as in experiments and forks."""
    return settings_of(init_from).get(f"{role}.adapter") == config.adapter


def _check_adapters(role: str, config: ConfigDict, mistakes: Mistakes) -> None:
    either = [config[name] for name in (ROLES if shares_policy(config) else (role,))]
    has_base = any(own.checkpoint or (own.sft.full and own.sft.steps > 0) or own.init_from for own in either)
    own, verifier = config[role], config.verifier
    rank, continues = own.model.lora.rank, own.sft.start == "generator" and own.sft.steps > 0
    is_left_out = verifier.sft.full or (bool(verifier.init_from) and not _has_read(verifier.init_from, role, own))
    is_left_out = is_left_out if shares_policy(config) else continues
    mistakes.require(
        own.adapter in ("", "generator") or not is_left_out, f"{role}.adapter={own.adapter} would not be read: its "
        "policy starts from another stage 1. Leave the adapter empty, or leave verifier.init_from empty and set "
        "verifier.sft.start=fresh and verifier.sft.full=False",
    )
    mistakes.require(
        not rank or has_base, f"{role}.model.lora.rank={rank} puts adapters on a model of random weights: name a "
        f"{role}.checkpoint, or set {role}.sft.full=True and {role}.sft.steps, so that stage 1 trains all of it first",
    )


def _check_start(role: str, config: ConfigDict, fork_of: str, mistakes: Mistakes) -> None:
    if config.checkpoint:
        with mistakes.collected(f"{role}.checkpoint: "):
            mistakes.require(
                kind_of(config.checkpoint) != "workdir" or config.sft.steps == 0 or bool(config.init_from),
                f"{role}.checkpoint={config.checkpoint} is a run, and {role}.sft.steps={config.sft.steps} would train "
                "its policy by stage 1 once more: set the steps to 0 to go on from it, or export it and name the "
                "folder",
            )
    if config.init_from:
        with mistakes.collected():
            local_path(f"{role}.init_from", config.init_from)
    mistakes.require(
        not fork_of or config.sft.steps == 0 or bool(config.init_from), f"fork_of={fork_of} begins after stage 1, and "
        f"{role}.sft.steps={config.sft.steps} would make one: set {role}.init_from={fork_of}, or use train --from",
    )
    mistakes.require(
        bool(config.checkpoint) or not config.use_chat,
        f"{role}.use_chat=True needs a {role}.checkpoint: a model from scratch has no chat template",
    )


def _check_lengths(role: str, config: ConfigDict, mistakes: Mistakes) -> None:
    for name, last in (("prompt_buckets", "max_prompt"), ("cache_buckets", "max_response")):
        buckets = (*config[name], config[last])
        mistakes.require(
            all(a < b for a, b in zip(buckets, buckets[1:], strict=False)),
            f"{role}.{name}={tuple(config[name])} must ascend and stay below {last}={config[last]}",
        )
    of_prompt = 1 if config.prompts_per_micro_batch else config.max_prompt
    prompt = "the prompt's last token" if config.prompts_per_micro_batch else f"a prompt of max_prompt={of_prompt}"
    mistakes.require(
        pack_shape(config).row_length >= config.max_response + of_prompt,
        f"{role}.pack_length={config.pack_length} cannot hold a response of max_response={config.max_response} "
        f"and {prompt}: set it to 0 or raise it",
    )


def _check_rows(role: str, config: ConfigDict, mistakes: Mistakes) -> None:
    rows = tuple(config.row_buckets)
    mistakes.require(bool(rows) and all(a < b for a, b in zip(rows, rows[1:], strict=False)),
                     f"{role}.row_buckets={rows} must ascend and not be empty")
    longest = config.max_prompt + config.max_response
    mistakes.require(  # of the rows on each device, `make_policy` knows
        config.cache_tokens == 0 or config.cache_tokens >= longest,
        f"{role}.cache_tokens={config.cache_tokens} has no room for one row of max_prompt {config.max_prompt} + "
        f"max_response {config.max_response} = {longest} tokens: raise it, or set it to 0",
    )


def _check_updates(role: str, config: ConfigDict, rl: ConfigDict, mistakes: Mistakes) -> None:
    minibatches = config.loss.minibatches
    if not mistakes.is_about("rl.prompts_per_step", "rl.samples_per_prompt", f"{role}.loss.minibatches"):
        mistakes.require(
            rl.prompts_per_step % minibatches == 0,
            f"{role}.loss.minibatches={minibatches} does not divide rl.prompts_per_step={rl.prompts_per_step} "
            f"(batch of {rl.prompts_per_step * rl.samples_per_prompt} rows): choose a divisor, since the samples of a "
            "prompt stay together",
        )
    if mistakes.is_about(f"{role}.model.", f"{role}.loss.importance_cap") or config.loss.importance_cap > 0:
        return
    for name in ("sample_cache_dtype", "sample_weight_dtype"):
        mistakes.require(
            not config.model[name],
            f"{role}.model.{name}={config.model[name]} makes the sampler's log-probs differ from the trainer's, and "
            f"{role}.loss.importance_cap=0 does not correct for this: set it to 2, or leave {name} empty",
        )
