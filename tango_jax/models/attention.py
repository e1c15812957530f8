"""Attention over whole sequences: packed rows, and packed rows that continue shared prompts (training and scoring).

Plain XLA products with softmax in float32. Masks come from segment ids and lengths, never from token ids. Attention
against a growing cache is in `cache.py`.
"""

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row without any key gives uniform weights instead of NaN


def attend(q_BTHE: jax.Array, k_BSKE: jax.Array, v_BSKE: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Grouped-query attention of T queries over S keys: [B, T, H, E]."""
    B, T, H, E = q_BTHE.shape
    S, K = k_BSKE.shape[1:3]
    G = H // K
    # The G query heads that share a key head are rows of one matmul.
    q_BKXE = (q_BTHE * jnp.asarray(E**-0.5, q_BTHE.dtype)).reshape(B, T, K, G, E).transpose(0, 2, 3, 1, 4)
    q_BKXE = q_BKXE.reshape(B, K, G * T, E)
    k_BKES, v_BKSE = k_BSKE.transpose(0, 2, 3, 1), v_BSKE.transpose(0, 2, 1, 3)
    scores = jnp.matmul(q_BKXE, k_BKES, preferred_element_type=jnp.float32).reshape(B, K, G, T, S)
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores, MASKED), axis=-1).astype(v_BSKE.dtype)
    out_BKXE = jnp.matmul(weights.reshape(B, K, G * T, S), v_BKSE)
    return out_BKXE.reshape(B, K, G, T, E).transpose(0, 3, 1, 2, 4).reshape(B, T, H, E)


def packed_mask(segment_BT: jax.Array) -> jax.Array:
    """bool[B, T, T]: a query sees itself and earlier tokens of its own segment (segment 0 is padding)."""
    length = segment_BT.shape[1]
    causal_TT = jnp.tril(jnp.ones((length, length), bool))
    return causal_TT[None] & (segment_BT[:, :, None] == segment_BT[:, None, :])


def make_packed_attention(segment_BT: jax.Array):
    """`attend_fn` for rows that hold one or more whole sequences; its cache result is None."""
    mask_BTT = packed_mask(segment_BT)
    return lambda q, k, v: (attend(q, k, v, mask_BTT), None)


def make_shared_prefix_attention(
    prefix_length_ZQ: jax.Array, X: int, prefix_of_ZR: jax.Array, segment_ZRT: jax.Array
):
    """`attend_fn` for rows [Z, Q*X + R*T]: Q prompts of X tokens, then R rows of responses that continue them.

    Prompts attend to themselves; a response attends to its row's prompt and to itself. Everything else in a layer acts
    token by token, so a prompt's share of the work is done once for all its responses. Shards are independent.
    """
    Z, Q = prefix_length_ZQ.shape
    R, T = segment_ZRT.shape[1:]
    is_prefix_ZQX = jnp.arange(X)[None, None, :] < prefix_length_ZQ[..., None]
    prefix_mask = packed_mask(is_prefix_ZQX.reshape(Z * Q, X).astype(jnp.int32))
    own_mask = packed_mask(segment_ZRT.reshape(Z * R, T))

    def of_rows(x_ZQ):
        """What belongs to each row's prompt, from the row's own shard: [Z, Q, ...] -> [Z*R, ...]."""
        picked = jax.vmap(lambda x_Q, prefix_of_R: x_Q[prefix_of_R])(x_ZQ, prefix_of_ZR)
        return picked.reshape(Z * R, *x_ZQ.shape[2:])

    seen = jnp.broadcast_to(of_rows(is_prefix_ZQX)[:, None, :], (Z * R, T, X))
    mask = jnp.concatenate([seen, own_mask], axis=-1)

    def attend_fn(q, k, v):
        def split(x_ZNHE):
            heads = x_ZNHE.shape[2:]
            prefix = x_ZNHE[:, : Q * X].reshape(Z, Q, X, *heads)
            return prefix, x_ZNHE[:, Q * X :].reshape(Z * R, T, *heads)

        (prefix_q, own_q), (prefix_k, own_k), (prefix_v, own_v) = split(q), split(k), split(v)
        prefix_out = attend(*(x.reshape(Z * Q, *x.shape[2:]) for x in (prefix_q, prefix_k, prefix_v)), prefix_mask)
        keys = jnp.concatenate([of_rows(prefix_k), own_k], axis=1)
        values = jnp.concatenate([of_rows(prefix_v), own_v], axis=1)
        own_out = attend(own_q, keys, values, mask)
        flat = [out.reshape(Z, -1, *out.shape[2:]) for out in (prefix_out, own_out)]
        return jnp.concatenate(flat, axis=1), None

    return attend_fn
