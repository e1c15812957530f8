"""Checks of a configuration, made before any work. Each error names the value, the limit and the fix."""

from ml_collections import ConfigDict

from tango_jax.checks import at_least, one_of, require, within
from tango_jax.config import ARMS
from tango_jax.data.teacher_rows import MAX_SAMPLES
from tango_jax.loggers import check_installed
from tango_jax.models.attention import KINDS as ATTENTION_KINDS
from tango_jax.models.transformer import REMAT_MODES
from tango_jax.prompts.templates import load_template
from tango_jax.rl.advantages import ALGORITHMS
from tango_jax.rl.losses import KL_KINDS, WEIGHT_KINDS
from tango_jax.rl.optimizer import SCHEDULES
from tango_jax.rl.policy import model_config, pack_shape
from tango_jax.rl.schedule import ALPHA_KINDS
from tango_jax.rl.update import RATIO_LEVELS
from tango_jax.source import kind_of
from tango_jax.task_validation import check_task

DTYPES = ("float32", "bfloat16")


def check(config: ConfigDict) -> None:
    """Raises ValueError on the first mistake."""
    one_of("arm", config.arm, ARMS)
    at_least("seed", config.seed, 0)
    _check_rl(config.rl)
    _check_generate(config.generate, config.generator)
    for name in ("every", "problems", "pool"):
        at_least(f"eval.{name}", config.eval[name], 1)
    for name in ("every", "keep"):
        at_least(f"checkpoint.{name}", config.checkpoint[name], 1)
    at_least("rollouts.every", config.rollouts.every, 0)
    at_least("rollouts.max_mb", config.rollouts.max_mb, 1)
    at_least("transcripts", config.transcripts, 0)
    _check_watching(config.alarms, config.loggers)
    for name in ("arms", "seeds"):
        require(len(config.ablation[name]) > 0, f"ablation.{name} is empty: name at least one")
    for arm in config.ablation.arms:
        one_of("ablation.arms", arm, ARMS)
    for role in ("generator", "verifier"):
        _check_role(role, config[role], config.rl)
    if config.verifier.sft.start == "generator":
        same = ("model", "checkpoint")
        require(all(config.generator[name] == config.verifier[name] for name in same),
                "verifier.sft.start=generator needs model and checkpoint of both roles to be the same")
    check_task(config)


def _check_watching(limits: ConfigDict, loggers: ConfigDict) -> None:
    at_least("alarms.window", limits.window, 1)
    require(0 < limits.margin <= 1, f"alarms.margin={limits.margin} must be above 0 and at most 1")
    for name in ("verdict_rate", "verdict_accuracy", "truncation", "shortened", "logprob_gap_share", "grader_failures",
                 "groups_without_signal"):
        within(f"alarms.{name}", limits[name], 0.0, 1.0)
    for name in ("logprob_gap", "first_kl", "kl", "still_kl"):
        at_least(f"alarms.{name}", limits[name], 0.0)
    for name in ("entropy", "steps"):
        low, high = limits[f"{name}_low"], limits[f"{name}_high"]
        require(0 <= low < 1 < high, f"alarms.{name}_low={low} and alarms.{name}_high={high} must lie below and above "
                "1, where a role begins")
    letters = sorted(set("/\\#?%:") & set(loggers.wandb))
    require(not letters, f"loggers.wandb={loggers.wandb!r} is no project name: W&B allows no {' '.join(letters)} in it")
    check_installed(loggers)


def _check_generate(generate: ConfigDict, teacher: ConfigDict) -> None:
    within("generate.samples", generate.samples, 1, MAX_SAMPLES)
    rows = tuple(teacher.row_buckets)
    require(
        not rows or rows[-1] % generate.samples == 0,
        f"generator.row_buckets={rows} ends in no multiple of generate.samples={generate.samples}: "
        "samples of a prompt share its cache and stay in one batch",
    )
    at_least("generate.temperature", generate.temperature, 0.0)
    require(0 < generate.top_p <= 1, f"generate.top_p={generate.top_p} must lie in (0, 1]")
    at_least("generate.problems", generate.problems, 0)
    at_least("generate.shard_problems", generate.shard_problems, 1)
    keep = generate.keep
    within("generate.keep.min_format", keep.min_format, 0.0, 1.0)
    within("generate.keep.best", keep.best, 0, generate.samples)
    require(0 <= keep.validation_share < 1,
            f"generate.keep.validation_share={keep.validation_share} must be at least 0 and below 1")


def _check_rl(rl: ConfigDict) -> None:
    for name in (
        "generator_steps",
        "generator_turns_per_cycle",
        "verifier_turns_per_cycle",
        "prompts_per_step",
        "samples_per_prompt",
        "verifications_per_solution",
    ):
        at_least(f"rl.{name}", rl[name], 1)
    at_least("rl.warmup_steps", rl.warmup_steps, 0)
    for name in ("outcome_weight", "format_weight", "gamma"):
        within(f"rl.{name}", rl[name], 0.0, 100.0)
    for name in ("alpha_initial", "alpha_final", "label_count_decay"):
        within(f"rl.{name}", rl[name], 0.0, 1.0)
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
    for name in ("width", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_width"):
        at_least(f"{role}.model.{name}", config.model[name], 1)
    one_of(f"{role}.mesh.grad_reduce_dtype", config.mesh.grad_reduce_dtype, DTYPES)
    model_config(config, vocab_size=1)  # its own checks of the heads
    _check_lengths(role, config)
    _check_rows(role, config, rl)
    _check_loss(role, config.loss)
    require(
        config.temperature > 0,
        f"{role}.temperature={config.temperature} must be above 0: a greedy policy has "
        "nothing to learn from (evaluation is greedy by itself)",
    )
    require(0 < config.top_p <= 1, f"{role}.top_p={config.top_p} must lie in (0, 1]")
    at_least(f"{role}.top_k", config.top_k, 0)
    _check_optimizer(f"{role}.optimizer", config.optimizer)
    at_least(f"{role}.sft.steps", config.sft.steps, 0)
    one_of(f"{role}.sft.start", config.sft.start, ("fresh", "generator") if role == "verifier" else ("fresh",))
    for name in ("batch_size", "eval_every", "eval_examples", "checkpoint_every"):
        at_least(f"{role}.sft.{name}", config.sft[name], 1)
    _check_optimizer(f"{role}.sft.optimizer", config.sft.optimizer)


def _check_start(role: str, config: ConfigDict) -> None:
    if config.checkpoint:
        try:
            kind_of(config.checkpoint)
        except ValueError as error:
            raise ValueError(f"{role}.checkpoint: {error}") from error
    require(
        bool(config.checkpoint) or not config.use_chat,
        f"{role}.use_chat=True needs a {role}.checkpoint: a model from scratch has no chat template",
    )


def _check_lengths(role: str, config: ConfigDict) -> None:
    for name, limit in (("prompt_buckets", config.max_prompt), ("cache_buckets", config.max_response)):
        buckets = (*config[name], limit)
        last = "max_prompt" if name == "prompt_buckets" else "max_response"
        require(
            all(a < b for a, b in zip(buckets, buckets[1:], strict=False)) and buckets[0] >= 1,
            f"{role}.{name}={tuple(config[name])} must ascend and stay below {last}={limit}",
        )
    total = config.max_prompt + config.max_response
    require(  # of a checkpoint's own limit, `make_policy` knows
        bool(config.checkpoint) or total <= config.model.max_position,
        f"{role}: max_prompt {config.max_prompt} + max_response {config.max_response} = {total} exceeds "
        f"{role}.model.max_position={config.model.max_position}",
    )
    at_least(f"{role}.rows_per_micro_batch", config.rows_per_micro_batch, 1)
    at_least(f"{role}.logp_chunk", config.logp_chunk, 0)
    at_least(f"{role}.prompts_per_micro_batch", config.prompts_per_micro_batch, 1)
    at_least(f"{role}.sft.rows_per_micro_batch", config.sft.rows_per_micro_batch, 1)
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
        bool(rows) and all(a < b for a, b in zip(rows, rows[1:], strict=False)) and rows[0] >= 1,
        f"{role}.row_buckets={rows} must ascend and not be empty",
    )
    require(
        rows[-1] % M == 0,
        f"{role}.row_buckets ends in {rows[-1]}, which is not a multiple of "
        f"rl.samples_per_prompt={M}: samples of a prompt share its cache and stay in one batch",
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
    within(f"{role}.loss.clip_low", loss.clip_low, 0.0, 1.0)
    for name in ("clip_high", "kl_coef", "importance_cap"):
        at_least(f"{role}.loss.{name}", loss[name], 0.0)
    for name in ("minibatches", "epochs"):
        at_least(f"{role}.loss.{name}", loss[name], 1)


def _check_optimizer(name: str, optimizer: ConfigDict) -> None:
    one_of(f"{name}.schedule", optimizer.schedule, SCHEDULES)
    require(optimizer.lr > 0, f"{name}.lr={optimizer.lr} must be above 0")
    require(optimizer.clip_norm > 0, f"{name}.clip_norm={optimizer.clip_norm} must be above 0")
    for key in ("b1", "b2"):
        require(0 <= optimizer[key] < 1, f"{name}.{key}={optimizer[key]} must lie in [0, 1)")
    for key in ("warmup_steps", "decay_steps", "weight_decay"):
        at_least(f"{name}.{key}", optimizer[key], 0)
