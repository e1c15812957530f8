"""Checks of a configuration, made before any work. Each error names the value, the limit and the fix."""

from ml_collections import ConfigDict

from tango_jax.config import ARMS
from tango_jax.data.problems import TASKS
from tango_jax.models.transformer import REMAT_MODES
from tango_jax.prompts.templates import load_template
from tango_jax.rl.advantages import ALGORITHMS
from tango_jax.rl.losses import KL_KINDS, WEIGHT_KINDS
from tango_jax.rl.optimizer import SCHEDULES
from tango_jax.rl.policy import model_config, pack_shape, sft_pack_shape
from tango_jax.rl.schedule import ALPHA_KINDS
from tango_jax.rl.update import RATIO_LEVELS

DTYPES = ("float32", "bfloat16", "float16")


def check(config: ConfigDict) -> None:
    """Raises ValueError on the first mistake."""
    _one_of("arm", config.arm, ARMS)
    _at_least("seed", config.seed, 0)
    _at_least("task.data_seed", config.task.data_seed, 0)
    _check_task(config.task)
    _check_rl(config.rl)
    for name in ("every", "problems", "pool"):
        _at_least(f"eval.{name}", config.eval[name], 1)
    for name in ("every", "keep"):
        _at_least(f"checkpoint.{name}", config.checkpoint[name], 1)
    _at_least("transcripts", config.transcripts, 0)
    for name in ("arms", "seeds"):
        _require(len(config.ablation[name]) > 0, f"ablation.{name} is empty: name at least one")
    for arm in config.ablation.arms:
        _one_of("ablation.arms", arm, ARMS)
    for role in ("generator", "verifier"):
        _check_role(role, config[role], config.rl)
    if config.verifier.sft.start == "generator":
        _require(config.generator.model == config.verifier.model,
                 "verifier.sft.start=generator needs generator.model and verifier.model to be the same")
    if config.task.name == "last_letter":
        _check_last_letter_lengths(config)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _one_of(name: str, value, choices) -> None:
    _require(value in choices, f"{name}={value!r} is not one of {', '.join(choices)}")


def _at_least(name: str, value, limit) -> None:
    _require(value >= limit, f"{name}={value} must be at least {limit}")


def _within(name: str, value, low, high) -> None:
    _require(low <= value <= high, f"{name}={value} must lie between {low} and {high}")


def _check_task(task: ConfigDict) -> None:
    _one_of("task.name", task.name, TASKS)
    for name in ("sft_words", "sft_letters", "rl_words", "rl_letters", "test_words", "test_letters"):
        value = tuple(task[name])
        _require(
            len(value) == 2 and 1 <= value[0] <= value[1],
            f"task.{name}={value} must be (low, high) with 1 <= low <= high",
        )
    for name in ("hard_error", "easy_error", "reading_error", "claim_noise"):
        _within(f"task.{name}", task[name], 0.0, 1.0)


def _check_rl(rl: ConfigDict) -> None:
    for name in (
        "generator_steps",
        "generator_turns_per_cycle",
        "verifier_turns_per_cycle",
        "prompts_per_step",
        "samples_per_prompt",
        "verifications_per_solution",
    ):
        _at_least(f"rl.{name}", rl[name], 1)
    _at_least("rl.warmup_steps", rl.warmup_steps, 0)
    for name in ("outcome_weight", "format_weight", "gamma"):
        _within(f"rl.{name}", rl[name], 0.0, 100.0)
    for name in ("alpha_initial", "alpha_final", "label_count_decay"):
        _within(f"rl.{name}", rl[name], 0.0, 1.0)
    _one_of("rl.alpha_schedule", rl.alpha_schedule, ALPHA_KINDS)
    if rl.alpha_schedule == "exponential":
        _require(
            min(rl.alpha_initial, rl.alpha_final) > 0,
            f"an exponential alpha schedule cannot start or end at 0 (alpha_initial={rl.alpha_initial}, "
            f"alpha_final={rl.alpha_final}): use rl.alpha_schedule=linear, or arm=grpo for no step rewards",
        )


def _check_role(role: str, config: ConfigDict, rl: ConfigDict) -> None:
    load_template(role, config.template)
    _one_of(f"{role}.model.remat", config.model.remat, REMAT_MODES)
    for name in ("param_dtype", "compute_dtype", "head_dtype"):
        _one_of(f"{role}.model.{name}", config.model[name], DTYPES)
    for name in ("width", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_width"):
        _at_least(f"{role}.model.{name}", config.model[name], 1)
    model_config(config, vocab_size=1)  # its own checks of the heads
    _check_lengths(role, config)
    _check_rows(role, config, rl)
    _check_loss(role, config.loss)
    _require(
        config.temperature > 0,
        f"{role}.temperature={config.temperature} must be above 0: a greedy policy has "
        "nothing to learn from (evaluation is greedy by itself)",
    )
    _require(0 < config.top_p <= 1, f"{role}.top_p={config.top_p} must lie in (0, 1]")
    _at_least(f"{role}.top_k", config.top_k, 0)
    _check_optimizer(f"{role}.optimizer", config.optimizer)
    _at_least(f"{role}.sft.steps", config.sft.steps, 0)
    _one_of(f"{role}.sft.start", config.sft.start, ("fresh", "generator") if role == "verifier" else ("fresh",))
    for name in ("batch_size", "eval_every", "eval_examples", "checkpoint_every"):
        _at_least(f"{role}.sft.{name}", config.sft[name], 1)
    _check_optimizer(f"{role}.sft.optimizer", config.sft.optimizer)


def _check_lengths(role: str, config: ConfigDict) -> None:
    for name, limit in (("prompt_buckets", config.max_prompt), ("cache_buckets", config.max_response)):
        buckets = (*config[name], limit)
        last = "max_prompt" if name == "prompt_buckets" else "max_response"
        _require(
            all(a < b for a, b in zip(buckets, buckets[1:], strict=False)) and buckets[0] >= 1,
            f"{role}.{name}={tuple(config[name])} must ascend and stay below {last}={limit}",
        )
    total = config.max_prompt + config.max_response
    _require(
        total <= config.model.max_position,
        f"{role}: max_prompt {config.max_prompt} + max_response {config.max_response} = {total} exceeds "
        f"{role}.model.max_position={config.model.max_position}",
    )
    _at_least(f"{role}.rows_per_micro_batch", config.rows_per_micro_batch, 1)
    _at_least(f"{role}.logp_chunk", config.logp_chunk, 0)
    _at_least(f"{role}.prompts_per_micro_batch", config.prompts_per_micro_batch, 1)
    _at_least(f"{role}.sft.rows_per_micro_batch", config.sft.rows_per_micro_batch, 1)
    if config.share_prompts:
        _require(
            pack_shape(config).row_length > config.max_response,
            f"{role}.pack_length={config.pack_length} cannot hold a response of max_response={config.max_response} "
            "and the prompt's last token: set it to 0 or raise it",
        )


def _check_rows(role: str, config: ConfigDict, rl: ConfigDict) -> None:
    rows, M = tuple(config.row_buckets), rl.samples_per_prompt
    _require(
        bool(rows) and all(a < b for a, b in zip(rows, rows[1:], strict=False)) and rows[0] >= 1,
        f"{role}.row_buckets={rows} must ascend and not be empty",
    )
    _require(
        rows[-1] % M == 0,
        f"{role}.row_buckets ends in {rows[-1]}, which is not a multiple of "
        f"rl.samples_per_prompt={M}: samples of a prompt share its cache and stay in one batch",
    )
    B, minibatches = rl.prompts_per_step * M, config.loss.minibatches
    _require(
        rl.prompts_per_step % minibatches == 0,
        f"{role}.loss.minibatches={minibatches} does not divide rl.prompts_per_step={rl.prompts_per_step} "
        f"(batch of {B} rows): groups stay whole",
    )


def _check_loss(role: str, loss: ConfigDict) -> None:
    _one_of(f"{role}.loss.algorithm", loss.algorithm, ALGORITHMS)
    _one_of(f"{role}.loss.aggregation", loss.aggregation, WEIGHT_KINDS)
    _one_of(f"{role}.loss.ratio", loss.ratio, RATIO_LEVELS)
    _one_of(f"{role}.loss.kl_kind", loss.kl_kind, KL_KINDS)
    _within(f"{role}.loss.clip_low", loss.clip_low, 0.0, 1.0)
    for name in ("clip_high", "kl_coef", "importance_cap"):
        _at_least(f"{role}.loss.{name}", loss[name], 0.0)
    for name in ("minibatches", "epochs"):
        _at_least(f"{role}.loss.{name}", loss[name], 1)


def _check_optimizer(name: str, optimizer: ConfigDict) -> None:
    _one_of(f"{name}.schedule", optimizer.schedule, SCHEDULES)
    _require(optimizer.lr > 0, f"{name}.lr={optimizer.lr} must be above 0")
    _require(optimizer.clip_norm > 0, f"{name}.clip_norm={optimizer.clip_norm} must be above 0")
    for key in ("b1", "b2"):
        _require(0 <= optimizer[key] < 1, f"{name}.{key}={optimizer[key]} must lie in [0, 1)")
    for key in ("warmup_steps", "decay_steps", "weight_decay"):
        _at_least(f"{name}.{key}", optimizer[key], 0)


def longest_last_letter(words: int, letters: int) -> dict[str, int]:
    """Tokens of the longest texts of a last_letter split: question, solution, verification (BOS and EOS included)."""
    question = 1 + words * (letters + 2)
    solution = 6 * words + 7
    return {
        "generator prompt": question,
        "generator response": solution,
        "verifier prompt": question + solution + 3,
        "verifier response": 11 * words + 8,
    }


def _check_last_letter_lengths(config: ConfigDict) -> None:
    """No problem of any split may be longer than its role's limits."""
    task = config.task
    for split in ("sft", "rl", "test"):
        words, letters = task[f"{split}_words"][1], task[f"{split}_letters"][1]
        for what, tokens in longest_last_letter(words, letters).items():
            role, kind = what.split()
            limit = config[role][f"max_{kind}"]
            # A sampled response is cut at its limit and a sampled solution may be longer than the gold one; what must
            # fit is the material itself.
            _require(
                tokens <= limit,
                f"{role}.max_{kind}={limit} cannot hold the longest {what} of task.{split}_words="
                f"{tuple(task[f'{split}_words'])}, task.{split}_letters={tuple(task[f'{split}_letters'])}: "
                f"{tokens} tokens; raise the limit or shorten the problems",
            )
        sizes = longest_last_letter(words, letters)
        for role in ("generator", "verifier"):
            length = {
                "sft": (sft_pack_shape(config[role]).row_length, "sft.pack_length", sizes[f"{role} response"]),
                "rl": (pack_shape(config[role]).row_length, "pack_length", config[role].max_response),
            }.get(split)
            if length is None or (split == "rl" and config[role].share_prompts):
                continue
            limit, key, response = length
            longest = sizes[f"{role} prompt"] + response
            _require(
                longest <= limit,
                f"{role}.{key}={limit} cannot hold the longest training sequence of the {split} "
                f"split: {longest} tokens; raise it or set it to 0",
            )
