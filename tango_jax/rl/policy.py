"""One policy. Generator and verifier differ only in config, prompt and reward."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.models.attention import attention_of
from tango_jax.models.decode_attention import decode_attention_of
from tango_jax.models.head_precision import check_head_precision
from tango_jax.models.lora import freeze, init_adapters, split
from tango_jax.models.transformer import ModelConfig, init_params, init_weights
from tango_jax.records import Batch, TrainState, with_base
from tango_jax.rl.loss_term import load_loss_term
from tango_jax.rl.optimizer import make_optimizer
from tango_jax.rl.packing import pack_shape
from tango_jax.rl.score import make_score
from tango_jax.rl.update import LossConfig, init_state, make_policy_loss, make_update
from tango_jax.runtime.ahead import quick_options
from tango_jax.runtime.checks import cut
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.given_text import TextReader, make_text_reader
from tango_jax.sampling.sampler import Sampler, make_sampler
from tango_jax.sharding.layouts import check_host_memory, fetch, offload, param_shardings, with_shardings
from tango_jax.sharding.placement import Placement, check_model, make_placement
from tango_jax.text.templates import check_template, load_template
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights.source import Source
from tango_jax.weights.workdir import start_source


@dataclasses.dataclass(frozen=True)
class Policy:
    """The jitted functions of one role, and what they were built from."""

    role: str  # generator or verifier
    config: ConfigDict  # the role's part of the config
    model_config: ModelConfig
    tokenizer: Tokenizer
    load_params: Callable | None  # () -> the checkpoint's parameters, in place; None: there is no checkpoint
    template: str
    placement: Placement
    sampler: Sampler
    reader: TextReader  # of given text, see `score_head` of the model
    init: Callable  # (key_data) -> TrainState with fresh parameters, or fresh adapters and no base
    restart: Callable  # (weights) -> TrainState with fresh optimizer moments
    freeze: Callable  # (a checkpoint's parameters) -> base; see models/lora.py
    score: Callable  # (weights, Batch) -> logp_NZRT
    update: Callable  # (TrainState without base, Batch, base) -> (TrainState, metrics); the state is donated

    shardings: TrainState  # of the state, without base
    is_shared: bool = False  # one policy in both roles

    def abstract_state(self) -> TrainState:
        """Shapes and shardings of a state as it is saved, without base."""
        return with_shardings(jax.eval_shape(self.init, np.zeros((2,), np.uint32)), self.shardings)

    def abstract_weights(self) -> dict:
        """Shapes and shardings of what forward passes take."""
        weights = jax.eval_shape(lambda: init_weights(self.model_config, jax.random.key(0)))
        return with_shardings(weights, param_shardings(self.placement.train, weights))

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose state its updates change: both with `verifier.adapter=generator`."""
        return ROLES if self.is_shared else (self.role,)

    @property
    def trains_adapters(self) -> bool:
        return self.model_config.lora is not None and not self.config.sft.full

    @property
    def full_model(self) -> ModelConfig:
        return dataclasses.replace(self.model_config, lora=None, param_dtype=self.config.model.param_dtype)

    def abstract_full_params(self) -> dict:
        params = jax.eval_shape(lambda: init_params(self.full_model, jax.random.key(0)))
        return with_shardings(params, self.full_shardings)

    @property
    def full_shardings(self) -> dict:
        params = jax.eval_shape(lambda: init_params(self.full_model, jax.random.key(0)))
        return param_shardings(self.placement.train, params)

    def offloaded(self, state: TrainState) -> TrainState:
        """With `mesh.offload`, moments move to host memory between updates."""
        return state.replace(opt_state=offload(state.opt_state)) if self.config.mesh.offload else state

    def fetched(self, state: TrainState) -> TrainState:
        if not self.config.mesh.offload:
            return state
        return state.replace(opt_state=fetch(state.opt_state, self.shardings.opt_state))

    def reference_fn(self, weights: dict) -> Callable[[], dict]:
        """() -> weights of a reference policy, on the devices. With `mesh.offload` they stay in host memory between
        calls, except a base, which the policy needs too."""
        params, base = split(weights)
        kept = offload(params) if self.config.mesh.offload else params
        return lambda: with_base(base, fetch(kept, self.shardings.params))

    def updated(self, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, list[dict]]:
        """After `loss.epochs` passes. The metrics of every update stay on the devices: reading one would wait for its
        update."""
        state, base, updates = self.fetched(state).replace(base={}), state.base, []
        for _ in range(self.config.loss.epochs):
            for batch in batches:
                state, metrics = self.update(state, batch, base)
                updates.append(metrics)
        return self.offloaded(state).replace(base=base), updates

    def with_scores(
        self, batch: Batch, weights: dict, reference_fn: Callable | None, score_fn: Callable | None = None
    ) -> Batch:
        """Add log-probs of the reference, for a KL term, and of the policy before any update."""
        score_fn, scored = score_fn or self.score, batch
        if self.config.loss.kl_coef > 0:
            scored = scored.replace(ref_logp_NZRT=score_fn(reference_fn(), batch))
        if self.updates_per_batch > 1:
            # Of the batch as it was: with log-probs that lie on devices it would take another program.
            scored = scored.replace(old_logp_NZRT=score_fn(weights, batch))
        return scored

    @property
    def updates_per_batch(self) -> int:
        return self.config.loss.minibatches * self.config.loss.epochs


def make_policy(
    role: str,
    config: ConfigDict,
    source: Source,
    devices: Sequence[jax.Device] | None = None,
    num_local: int | None = None,
    is_shared: bool = False,
) -> Policy:
    """`devices`: all of the job; the first `num_local` are this process's. `is_shared`: its state serves both roles.
    Raises ValueError: lengths, mesh, model and devices do not fit each other."""
    model, tokenizer = source.model_config, source.tokenizer
    total = config.max_prompt + config.max_response * (not model.score_head)
    if total > model.max_position:
        raise ValueError(
            f"{role}: max_prompt {config.max_prompt} + max_response {config.max_response} = {total} exceeds the "
            f"{model.max_position} positions of {source.name or 'the model'}: lower one of them"
        )
    sampler_config = sampler_sizes(config)
    try:
        placement = make_placement(config.mesh, devices, num_local)
        check_model(model, config.mesh, placement)
        sampler_config.with_row_multiple(placement.row_multiple).check_cache_tokens()
        if config.mesh.offload and devices is None:
            check_host_memory(placement)
        device, buckets = placement.train.devices.flat[0], sampler_config.buckets
        check_head_precision(model.head_precision, device)
        model = dataclasses.replace(
            model,
            attention=attention_of(model, device),
            decode_attention=decode_attention_of(model, buckets, device),
            grad_reduce_dtype=config.mesh.grad_reduce_dtype,
        )
        if model.attention == "splash":
            from tango_jax.models import splash  # here, because no other platform needs Pallas

            shape = pack_shape(config)
            splash.check_row(shape.row_length, shape.joins_prompts)
    except ValueError as error:
        raise ValueError(f"{role}: {error}") from error
    template, sampler = load_template(role, config.template), make_sampler(
        model, sampler_config, tokenizer.stop_ids, placement)
    check_template(f"{role}.template={cut(config.template)}", template, model.score_head, tokenizer)
    mesh = placement.train
    optimizer = make_optimizer(config.optimizer, model.lora is not None, role if is_shared else "")
    if model.score_head:  # it is never trained: no moments
        optimizer = optax.set_to_zero()
    init, restart, shardings = make_state(model, optimizer, placement)
    checkpoint_shardings = param_shardings(mesh, jax.eval_shape(lambda: init_params(model, jax.random.key(0))))
    return Policy(
        role=role,
        config=config,
        model_config=model,
        tokenizer=tokenizer,
        load_params=source.open_params and (lambda: source.load_params(checkpoint_shardings)),
        template=template,
        placement=placement,
        sampler=sampler,
        reader=make_text_reader(model, sampler),
        init=init,
        restart=restart,
        freeze=make_freeze(model, placement),
        score=make_score(model, config.temperature, config.logp_chunk, mesh),
        update=make_update(optimizer, make_policy_loss(model, loss_config(role, config), mesh), shardings),
        shardings=shardings,
        is_shared=is_shared,
    )


def sampler_sizes(config: ConfigDict) -> SamplerConfig:
    """Before row buckets are rounded up to what the devices share."""
    return SamplerConfig(
        prompt_buckets=(*config.prompt_buckets, config.max_prompt),
        cache_buckets=(*config.cache_buckets, config.max_response),
        row_buckets=tuple(config.row_buckets),
        cache_tokens=config.cache_tokens,
    )


def make_policies(config: ConfigDict, is_shared: bool) -> dict[str, Policy]:
    """With `is_shared`, one has both roles. Runs that differ in seed or arm can share them, and all that is
    compiled."""
    sources = {role: start_source(config, role, is_one_policy=is_shared) for role in ROLES}
    return {role: make_policy(role, config[role], sources[role], is_shared=is_shared) for role in ROLES}


def loss_config(role: str, config: ConfigDict) -> LossConfig:
    """Settings of the loss. Raises ValueError as `load_loss_term`."""
    loss = config.loss
    return LossConfig(
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
        term_fn=load_loss_term(role, loss),
    )


def make_state(
    model: ModelConfig, optimizer: optax.GradientTransformation, placement: Placement
) -> tuple[Callable, Callable, TrainState]:
    """(init, restart, shardings) of a train state."""

    def fresh(key_data: jax.Array) -> TrainState:
        key = jax.random.wrap_key_data(key_data)
        return init_state(optimizer, init_adapters(model, key) if model.lora else init_params(model, key))

    shardings = param_shardings(placement.train, jax.eval_shape(fresh, np.zeros((2,), np.uint32)))
    # The update donates its state: what is handed to `restart` must not be part of it.
    copied = jax.jit(lambda params: init_state(optimizer, jax.tree.map(jnp.copy, params)), out_shardings=shardings)

    def restart(weights: dict) -> TrainState:
        params, base = split(weights)
        return copied(params).replace(base=base)

    fresh_fn = jax.jit(fresh, out_shardings=shardings, compiler_options=quick_options(placement.train))
    return fresh_fn, restart, shardings


def make_freeze(model: ModelConfig, placement: Placement) -> Callable:
    """The jitted `freeze(params) -> base` of a model with adapters."""
    if not model.lora:
        return lambda params: {}
    _, base = split(jax.eval_shape(lambda: init_weights(model, jax.random.key(0))))
    return jax.jit(functools.partial(freeze, model), out_shardings=param_shardings(placement.train, base))
