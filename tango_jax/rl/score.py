"""Log-probabilities of given tokens, by the trainer on a packed batch."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tango_jax.models import transformer
from tango_jax.models.attention import attention_of, make_packed_attention, make_shared_prefix_attention
from tango_jax.models.transformer import ModelConfig
from tango_jax.records import Batch
from tango_jax.runtime.ahead import quick_options
from tango_jax.sharding import collectives
from tango_jax.sharding.placement import BATCH_AXES


def micro_batch(batch: Batch, index: jax.Array | int) -> Batch:
    """Every field without its leading N axis."""
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False) if leaf.ndim else leaf, batch
    )


def hidden_states(model_config: ModelConfig, params: dict, micro: Batch, mesh: Mesh | None = None) -> jax.Array:
    """[Z, R, T, D]; shared prompts are computed once."""
    Z, R, T = micro.token_NZRT.shape
    Q, X = micro.prefix_token_NZQX.shape[1:]
    attention = attention_of(model_config)
    if Q == 0:
        token_BT, position_BT, segment_BT = (
            leaf.reshape(Z * R, T) for leaf in (micro.token_NZRT, micro.position_NZRT, micro.segment_NZRT)
        )
        prompt_BT = None if micro.prompt_NZRT is None else micro.prompt_NZRT.reshape(Z * R, T)
        attend_fn = make_packed_attention(segment_BT, attention, model_config.windows, prompt_BT)
        x_BTD = transformer.forward(model_config, params, token_BT, position_BT, attend_fn, mesh)
        return x_BTD.reshape(Z, R, T, -1)
    # A shard's prompts and rows stand in one long row, [Z, Q*X + R*T]: token-wise work is one matmul, and attention
    # alone takes them apart.
    token_ZY = jnp.concatenate([micro.prefix_token_NZQX.reshape(Z, -1), micro.token_NZRT.reshape(Z, -1)], axis=1)
    prefix_position = jnp.broadcast_to(jnp.arange(X)[None, None], (Z, Q, X)).reshape(Z, -1)
    position_ZY = jnp.concatenate([prefix_position, micro.position_NZRT.reshape(Z, -1)], axis=1)
    attend_fn = make_shared_prefix_attention(
        micro.prefix_length_NZQ, X, micro.prefix_of_NZR, micro.segment_NZRT, attention, model_config.windows
    )
    x_ZYD = transformer.forward(model_config, params, token_ZY, position_ZY, attend_fn, mesh)
    return x_ZYD[:, Q * X :].reshape(Z, R, T, -1)


def token_logps(
    model_config: ModelConfig,
    params: dict,
    micro: Batch,
    temperature: float,
    chunk: int,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of every action, and the entropy of its distribution; float32[B, T] each, B = Z x R.

    `logp_BT[:, t]` scores token t (column 0 is 0). What other tokens have is of no use. With `chunk` > 0 the logits of
    that many tokens exist at a time and are recomputed in the backward pass, so memory does not grow with T x V; chunks
    without an action are skipped. With `Batch.other_NZRT` the distributions are over two words.
    """
    x_ZRTD = hidden_states(model_config, params, micro, mesh)
    Z, R, T, D = x_ZRTD.shape
    # Gathered once, before the loop: inside it, every chunk would gather it again.
    head_DV = transformer.head_matrix(model_config, params, mesh)
    # None where tensor does not divide the vocabulary: every device then does the same.
    vocabulary_mesh = mesh if head_DV.shape[1] < model_config.vocab_size else None
    # Outside the loop, so that its gradient is summed once.
    final_norm_D = collectives.copy_to_tensor(params["final_norm"], vocabulary_mesh)

    def score_fn(x_ZYD: jax.Array, *words_ZY: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_ZYD = collectives.copy_to_tensor(x_ZYD, vocabulary_mesh)
        # At the sampler's temperature: the distributions that tokens were drawn from are scored and trained.
        logits_ZYV = transformer.logits_from_hidden(model_config, final_norm_D, head_DV, x_ZYD) / temperature

        def chosen(word_ZY: jax.Array) -> jax.Array:
            if vocabulary_mesh is None:
                return _chosen_logits(logits_ZYV, word_ZY, True, None)
            here = transformer.vocabulary_shard_index(model_config, word_ZY, vocabulary_mesh)
            return _chosen_logits(logits_ZYV, *here, vocabulary_mesh)

        chosen_ZY, *other_ZY = map(chosen, words_ZY)
        if other_ZY:
            return _score_two(chosen_ZY, *other_ZY)
        return _score_logits(logits_ZYV, chosen_ZY, vocabulary_mesh)

    # The hidden state of token t predicts token t + 1. The last one of a row gets the row's first token as its target;
    # `shift` drops that score.
    x_ZYD = x_ZRTD.reshape(Z, R * T, D)
    words = [micro.token_NZRT] if micro.other_NZRT is None else [micro.token_NZRT, micro.other_NZRT]
    words_ZY = [jnp.roll(word, -1, axis=-1).reshape(Z, R * T) for word in words]
    if is_chunked(R * T, chunk):
        is_scored_ZY = jnp.roll(micro.is_action_NZRT, -1, axis=-1).reshape(Z, R * T)
        logp_ZY, entropy_ZY = _in_chunks(score_fn, chunk, x_ZYD, is_scored_ZY, *words_ZY)
    else:
        logp_ZY, entropy_ZY = score_fn(x_ZYD, *words_ZY)

    def shift(values_ZY: jax.Array) -> jax.Array:
        """From 'predicted at t' to 'scores token t'; padding and prompt stay finite."""
        return jnp.pad(values_ZY.reshape(Z * R, T)[:, :-1], ((0, 0), (1, 0)))

    return shift(logp_ZY), shift(entropy_ZY)


def _in_chunks(
    score_fn: Callable, chunk: int, x_ZYD: jax.Array, is_scored_ZY: jax.Array, *words_ZY: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`score_fn` of what is scored, in chunks that hold it first; 0 elsewhere."""
    Z, padding = x_ZYD.shape[0], -x_ZYD.shape[1] % chunk
    order_ZY = jnp.argsort(~is_scored_ZY, axis=1, stable=True)
    x_ZYD = jnp.take_along_axis(x_ZYD, order_ZY[..., None], axis=1)

    def chunks(leaf: jax.Array) -> jax.Array:
        """[chunks, Z, tokens of a chunk, ...]"""
        padded = jnp.pad(leaf, ((0, 0), (0, padding), *[(0, 0)] * (leaf.ndim - 2)))
        return padded.reshape(Z, -1, chunk, *leaf.shape[2:]).swapaxes(0, 1)

    def score_chunk(_: None, xs: tuple) -> tuple[None, tuple[jax.Array, jax.Array]]:
        x_ZCD, is_scored_ZC, *words_ZC = xs
        zeros_ZC = jnp.zeros_like(x_ZCD[..., 0], jnp.float32)
        return None, lax.cond(is_scored_ZC.any(), score_fn, lambda *_: (zeros_ZC, zeros_ZC), x_ZCD, *words_ZC)

    of_tokens = (jnp.take_along_axis(leaf, order_ZY, axis=1) for leaf in (is_scored_ZY, *words_ZY))
    # The checkpoint keeps no chunk's logits for the backward pass, which is the point of the chunks.
    body = jax.checkpoint(score_chunk, prevent_cse=False)
    _, outs = lax.scan(body, None, tuple(map(chunks, (x_ZYD, *of_tokens))))
    place_ZY = jnp.argsort(order_ZY, axis=1)
    return tuple(jnp.take_along_axis(out.swapaxes(0, 1).reshape(Z, -1), place_ZY, axis=1) for out in outs)


def is_chunked(num_tokens: int, chunk: int) -> bool:
    """Whether logits are made in chunks; the last one is padded to the size of the others."""
    return 0 < chunk < num_tokens


def _chosen_logits(
    logits_ZYV: jax.Array, word_ZY: jax.Array, is_here_ZY: jax.Array | bool, mesh: Mesh | None
) -> jax.Array:
    """With a mesh, V is this device's part of the vocabulary; `is_here`: words in it."""
    chosen_ZY = jnp.take_along_axis(logits_ZYV, word_ZY[..., None], axis=-1)[..., 0]
    return collectives.sum_over_tensor(jnp.where(is_here_ZY, chosen_ZY, 0.0), mesh)


def _score_logits(logits_ZYV: jax.Array, chosen_ZY: jax.Array, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    """Log-prob of the targets with these logits, and entropy. With a mesh, V is this device's part."""
    # Not jax.nn.log_softmax: one number per token crosses devices, never logits.
    top_ZY = collectives.max_over_tensor(logits_ZYV.max(-1), mesh)
    total_ZY = collectives.sum_over_tensor(jnp.exp(logits_ZYV - top_ZY[..., None]).sum(-1), mesh)
    normaliser_ZY = top_ZY + jnp.log(total_ZY)
    probs_ZYV = jnp.exp(logits_ZYV - normaliser_ZY[..., None])
    mean_logit_ZY = collectives.sum_over_tensor(jnp.sum(probs_ZYV * logits_ZYV, axis=-1), mesh)
    # The entropy -sum(p log p), with log p = logit - normaliser, without an array of all log-probs.
    return chosen_ZY - normaliser_ZY, normaliser_ZY - mean_logit_ZY


def _score_two(chosen_ZY: jax.Array, other_ZY: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-prob of the first of two words by their logits, and the entropy of the choice."""
    logp_ZY, other_logp_ZY = jax.nn.log_sigmoid(chosen_ZY - other_ZY), jax.nn.log_sigmoid(other_ZY - chosen_ZY)
    return logp_ZY, -(jnp.exp(logp_ZY) * logp_ZY + jnp.exp(other_logp_ZY) * other_logp_ZY)


def make_score(model_config: ModelConfig, temperature: float, chunk: int, mesh: Mesh | None = None) -> Callable:
    """Build the jitted `score(params, batch) -> logp_NZRT`; unused micro-batches stay 0."""
    out_sharding = None if mesh is None else NamedSharding(mesh, P(None, BATCH_AXES))

    def score_shard(params: dict, micro: Batch) -> jax.Array:
        logp_BT, _ = token_logps(model_config, params, micro, temperature, chunk, mesh)
        return logp_BT.reshape(micro.token_NZRT.shape)

    score_micro = collectives.over_shards(score_shard, mesh, P(BATCH_AXES))

    @functools.partial(jax.jit, out_shardings=out_sharding, compiler_options=quick_options(mesh))
    def score(params: dict, batch: Batch) -> jax.Array:
        def body(index: jax.Array, logp_NZRT: jax.Array) -> jax.Array:
            with jax.named_scope("score"):
                logp_ZRT = score_micro(params, micro_batch(batch, index))
            return lax.dynamic_update_index_in_dim(logp_NZRT, logp_ZRT, index, 0)

        return lax.fori_loop(0, batch.num_micro, body, jnp.zeros(batch.token_NZRT.shape, jnp.float32))

    return score
