"""Log-probabilities of given tokens: the trainer's view of a packed batch. Used by the update, and alone for the
reference policy and for old log-probs when one batch gets several updates."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tango_jax.models import transformer
from tango_jax.models.attention import make_packed_attention, make_shared_prefix_attention
from tango_jax.records import Batch


def micro_batch(batch: Batch, index) -> Batch:
    """Micro-batch number `index`: every field without its leading N axis."""
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False) if leaf.ndim else leaf, batch
    )


def hidden_states(model_config, params, micro: Batch) -> jax.Array:
    """Hidden states of the packed rows, [R, T, D]; shared prompts are computed once beside them."""
    R, T = micro.token_NRT.shape
    Q, X = micro.prefix_token_NQX.shape
    if Q == 0:
        attend_fn = make_packed_attention(micro.segment_NRT)
        return transformer.forward(model_config, params, micro.token_NRT, micro.position_NRT, attend_fn)
    token_1X = jnp.concatenate([micro.prefix_token_NQX.reshape(1, -1), micro.token_NRT.reshape(1, -1)], axis=1)
    prefix_position = jnp.broadcast_to(jnp.arange(X)[None], (Q, X)).reshape(1, -1)
    position_1X = jnp.concatenate([prefix_position, micro.position_NRT.reshape(1, -1)], axis=1)
    attend_fn = make_shared_prefix_attention(micro.prefix_length_NQ, X, micro.prefix_of_NR, micro.segment_NRT)
    x_1XD = transformer.forward(model_config, params, token_1X, position_1X, attend_fn)
    return x_1XD[0, Q * X :].reshape(R, T, -1)


def token_logps(model_config, params, micro: Batch, temperature: float, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Log-prob of every token given those before it, and the entropy of the distribution it came from.

    Returns float32[R, T] twice; `logp_RT[:, t]` scores token t (column 0 is 0). With `chunk` > 0 the logits exist for
    that many tokens at a time and are recomputed in the backward pass, so memory does not grow with T x V.
    """
    x_RTD = hidden_states(model_config, params, micro)
    R, T, D = x_RTD.shape
    # Gathered to its use layout once, before the loop: inside it, every chunk would gather it again.
    head_DV = transformer.head_matrix(model_config, params)

    def score_fn(x_CD, target_C):
        logits_CV = transformer.logits_from_hidden(model_config, params["final_norm"], head_DV, x_CD) / temperature
        normaliser_C = jax.nn.logsumexp(logits_CV, axis=-1)
        logp_C = jnp.take_along_axis(logits_CV, target_C[:, None], axis=-1)[:, 0] - normaliser_C
        probs_CV = jnp.exp(logits_CV - normaliser_C[:, None])
        return logp_C, normaliser_C - jnp.sum(probs_CV * logits_CV, axis=-1)

    x_XD = x_RTD.reshape(R * T, D)
    target_X = jnp.roll(micro.token_NRT, -1, axis=1).reshape(R * T)
    if 0 < chunk < R * T:
        padding = -(R * T) % chunk
        x_XD = jnp.pad(x_XD, ((0, padding), (0, 0))).reshape(-1, chunk, D)
        target_X = jnp.pad(target_X, (0, padding)).reshape(-1, chunk)
        body = jax.checkpoint(lambda _, xs: (None, score_fn(*xs)), prevent_cse=False)
        logp_X, entropy_X = (out.reshape(-1)[: R * T] for out in lax.scan(body, None, (x_XD, target_X))[1])
    else:
        logp_X, entropy_X = score_fn(x_XD, target_X)

    def shift(values_X):
        """From 'predicted at t' to 'scores token t'; padding and prompt stay finite."""
        return jnp.pad(values_X.reshape(R, T)[:, :-1], ((0, 0), (1, 0)))

    return shift(logp_X), shift(entropy_X)


def make_score(model_config, temperature: float, chunk: int):
    """Build the jitted `score(params, batch) -> logp_NRT`; micro-batches not in use are left at 0."""

    @functools.partial(jax.jit)
    def score(params, batch: Batch) -> jax.Array:
        def body(index, logp_NRT):
            with jax.named_scope("score"):
                logp_RT, _ = token_logps(model_config, params, micro_batch(batch, index), temperature, chunk)
            return lax.dynamic_update_index_in_dim(logp_NRT, logp_RT, index, 0)

        return lax.fori_loop(0, batch.num_micro, body, jnp.zeros(batch.token_NRT.shape, jnp.float32))

    return score
