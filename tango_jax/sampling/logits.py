"""From logits to one token per row and its log-probability under the sampling distribution.

Temperature, top-p and top-k are traced, so changing them compiles nothing. One uniform number per row picks the token
by the inverse cumulative distribution, far cheaper than Gumbel noise over the vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

CHUNK = 64  # the cumulative sum runs over chunk totals, then inside the chosen chunk only


@struct.dataclass
class SamplingParams:
    """Temperature 0 is greedy; top_p 1 and top_k 0 switch those filters off."""

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array


def sampling_params(temperature: float, top_p: float = 1.0, top_k: int = 0) -> SamplingParams:
    """In fixed types: Python's would cause a second trace."""
    return SamplingParams(np.float32(temperature), np.float32(top_p), np.int32(top_k))


def keep_mask_BV(logits_BV: jax.Array, params: SamplingParams) -> jax.Array:
    """Top-k, then top-p (arXiv 1904.09751). The likeliest token and all ties at the border are kept."""
    V = logits_BV.shape[-1]
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, V), V)
    in_k_BV = jnp.arange(V)[None, :] < k
    prob_BV = jax.nn.softmax(jnp.where(in_k_BV, sorted_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(prob_BV, axis=-1) - prob_BV
    is_kept_BV = in_k_BV & ((before_BV < params.top_p) | (params.top_p >= 1.0))
    floor_B1 = jnp.min(jnp.where(is_kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return logits_BV >= floor_B1


def _first_past(cumulative: jax.Array, weight: jax.Array, target_B: jax.Array) -> jax.Array:
    """The first place with weight whose cumulative weight exceeds the target, else the last with weight. Rounding can
    make the target negative or the parallel sum not monotone."""
    has_weight = weight > 0
    is_past = has_weight & (cumulative > target_B[:, None])
    last_B = weight.shape[-1] - 1 - jnp.argmax(has_weight[:, ::-1], axis=-1)
    return jnp.where(is_past.any(axis=-1), jnp.argmax(is_past, axis=-1), last_B)


def inverse_cdf(weight_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """int32[B]: the first token whose cumulative weight exceeds `uniform` x total; never one of weight zero. Weights
    that are not finite give some token of the vocabulary."""
    B, V = weight_BV.shape
    chunks = -(-V // CHUNK)
    by_chunk = jnp.pad(weight_BV, ((0, 0), (0, chunks * CHUNK - V))).reshape(B, chunks, CHUNK)
    total = by_chunk.sum(-1)
    cumulative = jnp.cumsum(total, axis=-1)
    target_B = uniform_B * cumulative[:, -1]
    chunk_B = _first_past(cumulative, total, target_B)
    before_B = jnp.take_along_axis(cumulative, jnp.maximum(chunk_B - 1, 0)[:, None], axis=1)[:, 0]
    rest_B = target_B - jnp.where(chunk_B > 0, before_B, 0.0)
    inside = jnp.take_along_axis(by_chunk, chunk_B[:, None, None], axis=1)[:, 0]
    offset_B = _first_past(jnp.cumsum(inside, axis=-1), inside, rest_B)
    # Without any weight above 0, as where all are NaN, the place found may be in the padding of the last chunk.
    return jnp.minimum(chunk_B * CHUNK + offset_B, V - 1).astype(jnp.int32)


def sample_token(logits_BV: jax.Array, uniform_B: jax.Array, params: SamplingParams) -> tuple[jax.Array, jax.Array]:
    """One token per row, int32[B], and its log-prob, float32[B], after temperature and filters. A greedy token's
    log-prob is the model's at temperature 1. It is NaN where a logit is NaN or infinite."""
    # Before the filters, which set -inf on purpose. The minimum shows NaN and -inf; +inf makes the log-prob NaN anyway.
    is_finite_B = jnp.isfinite(jnp.min(logits_BV, axis=-1))
    is_greedy = params.temperature <= 0.0
    scaled_BV = logits_BV / jnp.where(is_greedy, 1.0, params.temperature)
    is_filtered = ~is_greedy & ((params.top_p < 1.0) | (params.top_k > 0))
    # Behind a condition: sorting the vocabulary takes longest, and by default no filter is on. Without it XLA for CPUs
    # rounds log-probs differently.
    scaled_BV = lax.cond(
        is_filtered,
        lambda: jnp.where(keep_mask_BV(scaled_BV, params), scaled_BV, -jnp.inf),
        lambda: scaled_BV,
    )
    top_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True)
    weight_BV = jnp.exp(scaled_BV - top_B1)
    # Greedily only the largest logits have weight, and 0 draws the first of them. A condition would make a GPU wait.
    drawn_BV = jnp.where(is_greedy, (scaled_BV == top_B1).astype(jnp.float32), weight_BV)
    token_B = inverse_cdf(drawn_BV, jnp.where(is_greedy, 0.0, uniform_B))
    chosen_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=-1)[:, 0]
    logp_B = chosen_B - top_B1[:, 0] - jnp.log(weight_BV.sum(-1))
    return token_B, jnp.where(is_finite_B, logp_B, jnp.nan)


def sample_tokens(
    mesh: Mesh | None, logits_BV: jax.Array, uniform_B: jax.Array, sampling: SamplingParams
) -> tuple[jax.Array, jax.Array]:
    """`sample_token` for rows on a mesh, split over the devices that share the weights, too."""
    if _tensor(mesh) == 1:
        return sample_token(logits_BV, uniform_B, sampling)
    V = logits_BV.shape[1]
    sample_fn = jax.shard_map(
        functools.partial(sample_on_shard, mesh, V), mesh=mesh, in_specs=(logits_spec(mesh, V), P("rows"), P()),
        out_specs=(P("rows"), P("rows")), check_vma=False,
    )
    return sample_fn(logits_BV, uniform_B, sampling)


def logits_spec(mesh: Mesh | None, vocab_size: int) -> P:
    """Of logits [B, V]. Each device has a part of the vocabulary where it divides (sharding.layouts.fit_spec)."""
    return P("rows", "tensor" if vocab_size % _tensor(mesh) == 0 else None)


def sample_on_shard(
    mesh: Mesh | None, vocab_size: int, logits_BV: jax.Array, uniform_B: jax.Array, sampling: SamplingParams
) -> tuple[jax.Array, jax.Array]:
    """`sample_token` inside of `jax.shard_map`. Devices with parts of the vocabulary exchange them once: a sort or a
    sum over parts would gather all on every device."""
    tensor, B = _tensor(mesh), len(uniform_B)
    if tensor == 1:
        return sample_token(logits_BV, uniform_B, sampling)
    share = -(-B // tensor)
    first = lax.axis_index("tensor") * share
    logits_BV, uniform_B = (
        jnp.pad(x, ((0, tensor * share - B), *[(0, 0)] * (x.ndim - 1))) for x in (logits_BV, uniform_B)
    )
    if logits_spec(mesh, vocab_size)[1]:
        own_BV = lax.all_to_all(logits_BV, "tensor", split_axis=0, concat_axis=1, tiled=True)
    else:
        own_BV = lax.dynamic_slice_in_dim(logits_BV, first, share)
    own = sample_token(own_BV, lax.dynamic_slice_in_dim(uniform_B, first, share), sampling)
    return jax.tree.map(lambda x_B: lax.all_gather(x_B, "tensor", tiled=True)[:B], own)


def _tensor(mesh: Mesh | None) -> int:
    return mesh.shape["tensor"] if mesh else 1
