"""The key/value cache of decoding, in two parts: a prefix per PROMPT, shared by its samples, and a suffix per row.

The prefix is written once by prefill. The suffix holds the new tokens; all rows are at the same suffix index, so a
decode step writes one slice instead of scattering per row. Keys are stored [.., E, S] and values [.., S, E]: the
layouts in which both products of attention read contiguous memory.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh

from tango_jax.models.attention import MASKED, make_row_attention
from tango_jax.models.transformer import ModelConfig


@struct.dataclass
class Prefix:
    """Keys and values of the prompts (P of them, S = prompt bucket), one array per layer."""

    k: tuple  # L x [P, K, E, S]
    v: tuple  # L x [P, K, S, E]
    length_P: jax.Array  # int32, tokens of each prompt


@struct.dataclass
class Suffix:
    """Keys and values of the new tokens (B = P x M rows, S = cache bucket), one array per layer."""

    k: tuple  # L x [B, K, E, S]
    v: tuple  # L x [B, K, S, E]


def init_suffix(config: ModelConfig, rows: int, length: int) -> Suffix:
    K, E, dtype = config.num_kv_heads, config.head_dim, jnp.dtype(config.compute_dtype)
    layers = range(config.num_layers)
    return Suffix(
        k=tuple(jnp.zeros((rows, K, E, length), dtype) for _ in layers),
        v=tuple(jnp.zeros((rows, K, length, E), dtype) for _ in layers),
    )


def make_prefill_attention(implementation: str = "xla", mesh: Mesh | None = None):
    """`attend_fn` of prefill: causal attention within each right-padded prompt; its cache result is (k, v)."""
    row_fn = make_row_attention(None, None, implementation, mesh)

    def attend_fn(q_BTHE, k_BTKE, v_BTKE):
        out_BTHE = row_fn(q_BTHE, k_BTKE, v_BTKE)
        return out_BTHE, (k_BTKE.transpose(0, 2, 3, 1), v_BTKE.transpose(0, 2, 1, 3))

    return attend_fn


def make_decode_attention(prefix_k, prefix_v, prefix_mask_PS, suffix_k, suffix_v, index):
    """`attend_fn` for one new token per row at suffix slot `index`; its cache result is the updated suffix pair.

    Softmax runs over the prompt's and the row's own keys together, so the result is that of plain attention.
    """

    def attend_fn(q_B1HE, k_B1KE, v_B1KE):
        B, _, H, E = q_B1HE.shape
        P, K, _, prefix_length = prefix_k.shape
        G, M = H // K, B // P
        suffix_k_new = lax.dynamic_update_slice(suffix_k, k_B1KE.transpose(0, 2, 3, 1), (0, 0, 0, index))
        suffix_v_new = lax.dynamic_update_slice(suffix_v, v_B1KE.transpose(0, 2, 1, 3), (0, 0, index, 0))
        q_BKGE = q_B1HE.reshape(B, K, G, E) * jnp.asarray(E**-0.5, q_B1HE.dtype)

        # The M samples of a prompt are rows of one product with the keys they share.
        q_PKXE = q_BKGE.reshape(P, M, K, G, E).transpose(0, 2, 1, 3, 4).reshape(P, K, M * G, E)
        shared = jnp.matmul(q_PKXE, prefix_k, preferred_element_type=jnp.float32)
        shared = jnp.where(prefix_mask_PS[:, None, None, :], shared, MASKED)
        shared = shared.reshape(P, K, M, G, prefix_length).transpose(0, 2, 1, 3, 4).reshape(B, K, G, prefix_length)
        own = jnp.matmul(q_BKGE, suffix_k_new, preferred_element_type=jnp.float32)
        own = jnp.where(jnp.arange(own.shape[-1])[None, None, None, :] <= index, own, MASKED)

        top = jnp.maximum(shared.max(-1, keepdims=True), own.max(-1, keepdims=True))
        shared, own = jnp.exp(shared - top), jnp.exp(own - top)
        total = shared.sum(-1, keepdims=True) + own.sum(-1, keepdims=True)
        shared, own = (shared / total).astype(q_B1HE.dtype), (own / total).astype(q_B1HE.dtype)

        shared = shared.reshape(P, M, K, G, prefix_length).transpose(0, 2, 1, 3, 4)
        out = jnp.matmul(shared.reshape(P, K, M * G, prefix_length), prefix_v)
        out = out.reshape(P, K, M, G, E).transpose(0, 2, 1, 3, 4).reshape(B, K, G, E)
        out = out + jnp.matmul(own, suffix_v_new)
        return out.reshape(B, 1, H, E), (suffix_k_new, suffix_v_new)

    return attend_fn
