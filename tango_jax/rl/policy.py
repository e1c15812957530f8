"""One policy: all that generator and verifier have in common. They differ in config, prompt and reward only."""

import dataclasses
from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from tango_jax.data.tokenizer import Tokenizer
from tango_jax.models.transformer import ModelConfig, init_params
from tango_jax.prompts.collate import PackShape
from tango_jax.prompts.templates import load_template
from tango_jax.rl.optimizer import make_optimizer
from tango_jax.rl.score import make_score
from tango_jax.rl.update import LossConfig, init_state, make_nll_loss, make_policy_loss, make_update
from tango_jax.sampling.sampler import Sampler, SamplerConfig, make_sampler
from tango_jax.source import Source


@dataclasses.dataclass(frozen=True)
class Policy:
    """The jitted functions of one role (init, sample, score, update) with what they were built from."""

    role: str  # generator or verifier
    config: ConfigDict  # the role's part of the config
    model_config: ModelConfig
    tokenizer: Tokenizer
    load_params: Callable | None  # () -> the parameters that it starts from; None: those of `init`
    template: str
    sampler: Sampler
    init: Callable  # (key_data) -> TrainState
    restart: Callable  # (params) -> TrainState with fresh optimizer moments
    score: Callable  # (params, Batch) -> logp_NRT
    update: Callable  # (TrainState, Batch) -> (TrainState, metrics); the state is donated

    @property
    def updates_per_batch(self) -> int:
        return self.config.loss.minibatches * self.config.loss.epochs


def model_config(role_config: ConfigDict, vocab_size: int) -> ModelConfig:
    return ModelConfig(vocab_size=vocab_size, **role_config.model)


def pack_shape(role_config: ConfigDict) -> PackShape:
    """Shape of the reinforcement-learning batches of a role."""
    if not role_config.share_prompts:
        length = role_config.pack_length or role_config.max_prompt + role_config.max_response
        return PackShape(length, role_config.rows_per_micro_batch)
    return PackShape(
        row_length=role_config.pack_length or role_config.max_response + 1,
        rows=role_config.rows_per_micro_batch,
        prompts=role_config.prompts_per_micro_batch,
        prompt_buckets=(*role_config.prompt_buckets, role_config.max_prompt),
    )


def sft_pack_shape(role_config: ConfigDict) -> PackShape:
    """Shape of the stage-1 batches of a role, where every prompt has one response."""
    length = role_config.sft.pack_length or role_config.max_prompt + role_config.max_response
    return PackShape(length, role_config.sft.rows_per_micro_batch)


def make_policy(role: str, config: ConfigDict, source: Source) -> Policy:
    """Build a policy of the `role` ("generator" or "verifier") from that role's config and what it starts from.

    Raises:
        ValueError: prompt and response are longer than the model's positions.
    """
    model, tokenizer = source.model_config, source.tokenizer
    total = config.max_prompt + config.max_response
    if total > model.max_position:
        raise ValueError(
            f"{role}: max_prompt {config.max_prompt} + max_response {config.max_response} = {total} exceeds the "
            f"{model.max_position} positions of {source.name or 'the model'}: lower one of them"
        )
    loss, optimizer = config.loss, make_optimizer(config.optimizer)
    loss_config = LossConfig(
        temperature=config.temperature,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        ratio=loss.ratio,
        kl_coef=loss.kl_coef,
        kl_kind=loss.kl_kind,
        entropy_coef=loss.entropy_coef,
        importance_cap=loss.importance_cap,
        has_old_logp=loss.minibatches * loss.epochs > 1,
        logp_chunk=config.logp_chunk,
    )
    sampler_config = SamplerConfig(
        prompt_buckets=(*config.prompt_buckets, config.max_prompt),
        cache_buckets=(*config.cache_buckets, config.max_response),
        row_buckets=tuple(config.row_buckets),
    )
    return Policy(
        role=role,
        config=config,
        model_config=model,
        tokenizer=tokenizer,
        load_params=source.load_params,
        template=load_template(role, config.template),
        sampler=make_sampler(model, sampler_config, tokenizer.stop_ids),
        init=jax.jit(lambda key_data: init_state(optimizer, init_params(model, jax.random.wrap_key_data(key_data)))),
        restart=jax.jit(lambda params: init_state(optimizer, params)),
        score=make_score(model, config.temperature, config.logp_chunk),
        update=make_update(optimizer, make_policy_loss(model, loss_config)),
    )


def make_sft(policy: Policy) -> tuple[Callable, Callable, Callable, Callable]:
    """(init, restart, update, score) of supervised fine-tuning for the policy's model, with stage 1's own optimizer."""
    sft, model = policy.config.sft, policy.model_config
    settings = sft.optimizer.copy_and_resolve_references()
    settings.decay_steps = settings.decay_steps or sft.steps
    optimizer = make_optimizer(settings)
    init = jax.jit(lambda key_data: init_state(optimizer, init_params(model, jax.random.wrap_key_data(key_data))))
    loss_fn = make_nll_loss(model, policy.config.logp_chunk)
    restart = jax.jit(lambda params: init_state(optimizer, params))
    return init, restart, make_update(optimizer, loss_fn), make_score(model, 1.0, policy.config.logp_chunk)
