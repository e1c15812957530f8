"""Checks of a configuration, made before any work. Each error names the value, the limit and the fix."""

from ml_collections import ConfigDict

from tango_jax.arms import ARMS
from tango_jax.cli.config_file import check_keys
from tango_jax.cli.ranges import check_numbers
from tango_jax.cli.task_validation import check_task
from tango_jax.config import flatten
from tango_jax.models.attention import ATTENTION_KINDS
from tango_jax.models.transformer import REMAT_MODES, ModelConfig
from tango_jax.rl.advantages import ALGORITHMS
from tango_jax.rl.losses import KL_KINDS, WEIGHT_KINDS
from tango_jax.rl.optimizer import SCHEDULES
from tango_jax.rl.own_reward import load_own_rewards
from tango_jax.rl.packing import pack_shape
from tango_jax.rl.schedule import ALPHA_KINDS
from tango_jax.rl.update import RATIO_LEVELS
from tango_jax.runtime.checks import local_path, one_of, require
from tango_jax.text.templates import load_template
from tango_jax.tracking.loggers import check_installed
from tango_jax.weights.source import kind_of

DTYPES = ("float32", "bfloat16")


def validate(config: ConfigDict) -> None:
    """Raises ValueError on the first mistake."""
    check_keys(config)
    check_numbers(flatten(config))
    one_of("arm", config.arm, ARMS)
    _check_rl(config.rl)
    _check_generate(config.generate, config.generator)
    _check_watching(config.alarms, config.loggers)
    for name in ("arms", "seeds"):
        given = tuple(config.ablation[name])
        require(len(given) > 0, f"ablation.{name} is empty: name at least one")
        require(len(set(given)) == len(given), f"ablation.{name}={given} names one twice: take it out")
    for arm in config.ablation.arms:
        one_of("ablation.arms", arm, ARMS)
    for role in ("generator", "verifier"):
        _check_role(role, config[role], config.rl)
    if config.verifier.sft.start == "generator":
        same = ("model", "checkpoint")
        require(all(config.generator[name] == config.verifier[name] for name in same),
                "verifier.sft.start=generator needs model and checkpoint of both roles to be the same")
    load_own_rewards(config)
    check_task(config)


def _check_watching(limits: ConfigDict, loggers: ConfigDict) -> None:
    for name in ("entropy", "steps"):
        low, high = limits[f"{name}_low"], limits[f"{name}_high"]
        require(low < 1 < high, f"alarms.{name}_low={low} and alarms.{name}_high={high} must lie below and above "
                "1, where a role begins")
    letters = sorted(set("/\\#?%:") & set(loggers.wandb))
    require(not letters, f"loggers.wandb={loggers.wandb!r} is no project name: W&B allows no {' '.join(letters)} in it")
    check_installed(loggers)


def _check_generate(generate: ConfigDict, teacher: ConfigDict) -> None:
    rows = tuple(teacher.row_buckets)
    require(
        not rows or bool(teacher.cache_tokens) or rows[-1] % generate.samples == 0,
        f"generator.row_buckets={rows} ends in no multiple of generate.samples={generate.samples}: "
        "choose one, as samples of a prompt share its cache and stay in one batch",
    )
    best = generate.keep.best
    require(best <= generate.samples, f"generate.keep.best={best} is more than generate.samples={generate.samples} "
            "solutions of a problem: lower it, or set it to 0 for all")


def _check_rl(rl: ConfigDict) -> None:
    one_of("rl.alpha_schedule", rl.alpha_schedule, ALPHA_KINDS)
    if rl.alpha_schedule == "exponential":
        require(
            min(rl.alpha_initial, rl.alpha_final) > 0,
            f"an exponential alpha schedule cannot start or end at 0 (alpha_initial={rl.alpha_initial}, "
            f"alpha_final={rl.alpha_final}): use rl.alpha_schedule=linear, or arm=grpo for no step rewards",
        )


def _check_role(role: str, config: ConfigDict, rl: ConfigDict) -> None:
    load_template(role, config.template)
    _check_start(role, config)
    one_of(f"{role}.model.remat", config.model.remat, REMAT_MODES)
    one_of(f"{role}.model.attention", config.model.attention, ATTENTION_KINDS)
    for name in ("param_dtype", "compute_dtype", "head_dtype"):
        require(config.model[name] != "float16", f"{role}.model.{name}=float16 is not supported: gradients below 6e-8 "
                "vanish in it without loss scaling, which is not done here; use bfloat16, or float32")
        one_of(f"{role}.model.{name}", config.model[name], DTYPES)
    one_of(f"{role}.mesh.grad_reduce_dtype", config.mesh.grad_reduce_dtype, DTYPES)
    ModelConfig(vocab_size=1, **config.model)  # its own checks of the heads
    _check_lengths(role, config)
    _check_rows(role, config, rl)
    _check_loss(role, config.loss)
    _check_schedule(f"{role}.optimizer", config.optimizer, is_stage_one=False)
    one_of(f"{role}.sft.start", config.sft.start, ("fresh", "generator") if role == "verifier" else ("fresh",))
    _check_schedule(f"{role}.sft.optimizer", config.sft.optimizer, is_stage_one=True)


def _check_start(role: str, config: ConfigDict) -> None:
    if config.checkpoint:
        try:
            kind_of(config.checkpoint)
        except ValueError as error:
            raise ValueError(f"{role}.checkpoint: {error}") from error
    if config.init_from:
        local_path(f"{role}.init_from", config.init_from)
    require(
        bool(config.checkpoint) or not config.use_chat,
        f"{role}.use_chat=True needs a {role}.checkpoint: a model from scratch has no chat template",
    )


def _check_lengths(role: str, config: ConfigDict) -> None:
    for name, limit in (("prompt_buckets", config.max_prompt), ("cache_buckets", config.max_response)):
        buckets = (*config[name], limit)
        last = "max_prompt" if name == "prompt_buckets" else "max_response"
        require(
            all(a < b for a, b in zip(buckets, buckets[1:], strict=False)),
            f"{role}.{name}={tuple(config[name])} must ascend and stay below {last}={limit}",
        )
    total = config.max_prompt + config.max_response
    require(  # of a checkpoint's own limit, `make_policy` knows
        bool(config.checkpoint) or total <= config.model.max_position,
        f"{role}: max_prompt {config.max_prompt} + max_response {config.max_response} = {total} exceeds "
        f"{role}.model.max_position={config.model.max_position}",
    )
    if config.share_prompts:
        require(
            pack_shape(config).row_length > config.max_response,
            f"{role}.pack_length={config.pack_length} cannot hold a response of max_response={config.max_response} "
            "and the prompt's last token: set it to 0 or raise it",
        )
    elif role == "verifier" or config.checkpoint:  # the task knows the longest prompt of a generator from scratch
        require(
            pack_shape(config).row_length >= total,
            f"{role}.pack_length={config.pack_length} cannot hold the longest sequence that a model may write, of "
            f"max_prompt {config.max_prompt} + max_response {config.max_response} = {total} tokens: set it to 0 or "
            "raise it",
        )


def _check_rows(role: str, config: ConfigDict, rl: ConfigDict) -> None:
    rows, M = tuple(config.row_buckets), rl.samples_per_prompt
    require(
        bool(rows) and all(a < b for a, b in zip(rows, rows[1:], strict=False)),
        f"{role}.row_buckets={rows} must ascend and not be empty",
    )
    require(
        bool(config.cache_tokens) or rows[-1] % M == 0,
        f"{role}.row_buckets ends in {rows[-1]}, which is not a multiple of "
        f"rl.samples_per_prompt={M}: choose one, as samples of a prompt share its cache and stay in one batch",
    )
    longest = config.max_prompt + config.max_response
    require(  # of the rows on each device, `make_policy` knows
        config.cache_tokens == 0 or config.cache_tokens >= longest,
        f"{role}.cache_tokens={config.cache_tokens} has no room for one row of max_prompt {config.max_prompt} + "
        f"max_response {config.max_response} = {longest} tokens: raise it, or set it to 0",
    )
    B, minibatches = rl.prompts_per_step * M, config.loss.minibatches
    require(
        rl.prompts_per_step % minibatches == 0,
        f"{role}.loss.minibatches={minibatches} does not divide rl.prompts_per_step={rl.prompts_per_step} "
        f"(batch of {B} rows): groups stay whole",
    )


def _check_loss(role: str, loss: ConfigDict) -> None:
    one_of(f"{role}.loss.algorithm", loss.algorithm, ALGORITHMS)
    one_of(f"{role}.loss.aggregation", loss.aggregation, WEIGHT_KINDS)
    one_of(f"{role}.loss.ratio", loss.ratio, RATIO_LEVELS)
    one_of(f"{role}.loss.kl_kind", loss.kl_kind, KL_KINDS)


def _check_schedule(name: str, optimizer: ConfigDict, is_stage_one: bool) -> None:
    one_of(f"{name}.schedule", optimizer.schedule, SCHEDULES)
    if optimizer.schedule == "cosine" and not (is_stage_one and optimizer.decay_steps == 0):
        require(
            optimizer.decay_steps > optimizer.warmup_steps,
            f"{name}.decay_steps={optimizer.decay_steps} must be above {name}.warmup_steps={optimizer.warmup_steps}: "
            "with schedule=cosine the learning rate is zero from there on",
        )
