"""Attention over whole sequences: packed rows, prompts, and packed rows that continue shared prompts.

    xla      plain products, softmax in float32: any platform; a row's scores are an array [H, T, S]
    cudnn    NVIDIA GPUs, through `jax.nn.dot_product_attention`: scores stay on the chip
    splash   TPUs (splash.py): scores stay on the chip; blocks that no query sees are skipped

Outputs at padding are finite and differ between them. Decoding is in cache.py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tango_jax.models.segments import prompt_end, segment_start

# (q_BTHE, k_BSKE, v_BSKE) -> out_BTHE; AttendFn adds the layer's cache or None. Layers with a window pass `window`.
RowAttention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
AttendFn = Callable[..., tuple[jax.Array, Any]]

MASKED = -1e30  # finite, so that a row without any key gives uniform weights instead of NaN
ATTENTION_KINDS = ("auto", "xla", "cudnn", "splash")  # values of ModelConfig.attention
KERNELS = {"gpu": "cudnn", "tpu": "splash"}  # that auto takes on a platform, where they can run
CUDNN_BLOCK = 64  # cuDNN wants even lengths where it is given a mask; this also aligns the rows of the mask


def resolve_attention(
    name: str, platform: str, compute_dtype: str, head_dim: int, capability: float | None = None
) -> str:
    """xla, cudnn or splash for ModelConfig.attention; ValueError if a named one cannot run. Uses no device."""
    if name == "auto":
        name = KERNELS.get(platform, "xla")
        return "xla" if unsupported_reason(name, platform, compute_dtype, head_dim, capability) else name
    reason = unsupported_reason(name, platform, compute_dtype, head_dim, capability)
    if reason:
        raise ValueError(f"model.attention={name} {reason}: use auto (what the machine has) or xla (runs everywhere)")
    return name


def unsupported_reason(name: str, platform: str, compute_dtype: str, head_dim: int, capability: float | None) -> str:
    """Why an implementation cannot run; empty where it can."""
    if name == "xla":
        return ""
    home, dtypes, widest = {
        "cudnn": ("gpu", ("bfloat16", "float16"), 256 if (capability or 0) >= 9 else 128),
        "splash": ("tpu", ("bfloat16", "float32"), 256),
    }[name]
    if platform != home:
        return f"runs on a {home}, and the devices are of platform {platform}"
    if home == "gpu" and (capability or 0) < 8:
        return f"needs an NVIDIA GPU of compute capability 8.0 or more, and this one has {capability}"
    if compute_dtype not in dtypes:
        return f"computes in {' or '.join(dtypes)}, and compute_dtype is {compute_dtype}"
    if head_dim % 8 or head_dim > widest:
        return f"takes a head_dim that is a multiple of 8 and at most {widest}, and it is {head_dim}"
    return ""


def attention_of(config: Any, device: jax.Device | None = None) -> str:
    """`resolve_attention` for a device, perhaps only a planned one. None: keep a (checked) name; auto: this machine."""
    if device is None and config.attention != "auto":
        return config.attention
    device = device or jax.local_devices()[0]
    capability = capability_of(device)
    return resolve_attention(config.attention, device.platform, config.compute_dtype, config.head_dim, capability)


def why_plain(config: Any, device: jax.Device) -> str:
    """Why the platform's kernel cannot run a ModelConfig; empty where it can, or where there is none."""
    name, numerics = KERNELS.get(device.platform), (config.compute_dtype, config.head_dim, capability_of(device))
    reason = name and unsupported_reason(name, device.platform, *numerics)
    return f"{name} {reason}" if reason else ""


def capability_of(device: jax.Device) -> float | None:
    """Compute capability of an NVIDIA GPU, 8.0 for an A100; None for other devices."""
    capability = str(getattr(device, "compute_capability", ""))  # "8.0"; other vendors name an architecture
    return float(capability) if capability[:1].isdigit() else None


def query_blocks(T: int) -> tuple[slice, ...]:
    """Blocks of T queries, each without later keys. More blocks compile more slowly."""
    count = min(max(2, T // 256), 8) if T >= 96 else 1
    size = -(-T // count)
    return tuple(slice(start, min(start + size, T)) for start in range(0, T, size))


def attend_causally(
    q_BTHE: jax.Array, k_BSKE: jax.Array, v_BSKE: jax.Array, mask_BTS: jax.Array, window: int = 0
) -> jax.Array:
    """`attend` where the last T keys are the queries' tokens, in blocks that skip most keys out of sight."""
    T, S = q_BTHE.shape[1], k_BSKE.shape[1]
    out = []
    for queries in query_blocks(T):
        first = max(0, queries.start - window + 1) if window and T == S else 0
        keys = slice(first, S - T + queries.stop)
        out.append(attend(q_BTHE[:, queries], k_BSKE[:, keys], v_BSKE[:, keys], mask_BTS[:, queries, keys]))
    return jnp.concatenate(out, axis=1)


def attend(q_BTHE: jax.Array, k_BSKE: jax.Array, v_BSKE: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Grouped-query attention of T queries over S keys: [B, T, H, E]."""
    B, T, H, E = q_BTHE.shape
    S, K = k_BSKE.shape[1:3]
    G = H // K
    # The G query heads of a key head are rows of one matmul (W = G x T), so keys and values are not repeated.
    q_BKWE = (q_BTHE * jnp.asarray(E**-0.5, q_BTHE.dtype)).reshape(B, T, K, G, E).transpose(0, 2, 3, 1, 4)
    q_BKWE = q_BKWE.reshape(B, K, G * T, E)
    k_BKES, v_BKSE = k_BSKE.transpose(0, 2, 3, 1), v_BSKE.transpose(0, 2, 1, 3)
    # float32 until after the softmax: exponentials lose most digits in bfloat16.
    score_BKGTS = jnp.matmul(q_BKWE, k_BKES, preferred_element_type=jnp.float32).reshape(B, K, G, T, S)
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, MASKED)
    weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(v_BSKE.dtype)
    out_BKWE = jnp.matmul(weight_BKGTS.reshape(B, K, G * T, S), v_BKSE)
    return out_BKWE.reshape(B, K, G, T, E).transpose(0, 3, 1, 2, 4).reshape(B, T, H, E)


def packed_mask(segment_BT: jax.Array, window: int = 0, prompt_BT: jax.Array | None = None) -> jax.Array:
    """bool[B, T, T]: a query sees itself, earlier tokens of its segment, and the segment of its prompt if it continues
    one (Batch.prompt_NZRT); segment 0 is padding."""
    T = segment_BT.shape[1]
    own_BTT = _causal_mask(T, window) & (segment_BT[:, :, None] == segment_BT[:, None, :])
    if prompt_BT is None:
        return own_BTT
    is_prompt_BTT = (prompt_BT[:, :, None] == segment_BT[:, None, :]) & (prompt_BT[:, :, None] > 0)
    if window:  # other responses may stand between
        index_T = jnp.arange(T)
        column_BT = prompt_end(segment_BT, prompt_BT) + index_T[None] - segment_start(segment_BT)
        is_prompt_BTT &= column_BT[:, :, None] - index_T[None, None] < window
    return own_BTT | is_prompt_BTT


def _causal_mask(length: int, window: int = 0) -> jax.Array:
    mask_1TT = jnp.tril(jnp.ones((1, length, length), bool))
    return jnp.triu(mask_1TT, 1 - window) if window else mask_1TT


def make_row_attention(
    segment_BT: jax.Array | None,
    is_prefix_BX: jax.Array | None = None,
    implementation: str = "xla",
    mesh: Mesh | None = None,
    window: int = 0,
    prompt_BT: jax.Array | None = None,
) -> RowAttention:
    """Attention of rows of T tokens over S = X + T keys: a prefix that every segment of the row sees, and the row.

    Masks are made once for all layers. Without `segment_BT` a row is one sequence, padded on the right.

    Args:
        prompt_BT: Batch.prompt_NZRT of rows without a prefix.
        implementation: xla, cudnn, splash, or splash_interpret (splash without a TPU, for tests).
        mesh: splits heads over `tensor` and rows over other axes (XLA cannot split a kernel). None in a `shard_map`.
        window: tokens that a query sees, itself the last; 0: all.
    """
    if implementation == "xla":
        mask_BTS = _mask(segment_BT, is_prefix_BX, window, prompt_BT)
        return lambda q, k, v: attend_causally(
            q, k, v, _causal_mask(q.shape[1], window) if mask_BTS is None else mask_BTS, window
        )
    if implementation == "cudnn":
        mask = _pad_mask(_mask(segment_BT, is_prefix_BX, window, prompt_BT))
        kernel_fn = functools.partial(_cudnn_attend, window=window)
    elif implementation in ("splash", "splash_interpret"):
        from tango_jax.models import splash  # here, because no other platform needs Pallas

        mask = None if segment_BT is None else splash.mask_inputs(segment_BT, is_prefix_BX, window, prompt_BT)
        kernel_fn = functools.partial(splash.attend, window=window, interpret=implementation == "splash_interpret")
    else:
        raise ValueError(f"attention {implementation!r} is none of {', '.join(ATTENTION_KINDS[1:])}")
    if mesh is not None and mesh.size > 1:
        rows = tuple(name for name in mesh.axis_names if name != "tensor")
        by_head, by_row = P(rows, None, "tensor", None), P(rows)
        # Kernels do not declare what varies over which axes.
        kernel_fn = jax.shard_map(
            kernel_fn, mesh=mesh, in_specs=(by_head, by_head, by_head, by_row), out_specs=by_head, check_vma=False
        )
    return lambda q, k, v: kernel_fn(q, k, v, mask)


def _mask(
    segment_BT: jax.Array | None, is_prefix_BX: jax.Array | None, window: int, prompt_BT: jax.Array | None
) -> jax.Array | None:
    """bool[B, T, X + T]; None: causality alone."""
    if segment_BT is None:
        return None
    row_BTT = packed_mask(segment_BT, window, prompt_BT)
    if is_prefix_BX is None:
        return row_BTT
    T, X = segment_BT.shape[1], is_prefix_BX.shape[1]
    prefix_BTX = jnp.broadcast_to(is_prefix_BX[:, None, :], (*segment_BT.shape, X))
    if window:
        position_BT = is_prefix_BX.sum(axis=1)[:, None] + jnp.arange(T)[None, :] - segment_start(segment_BT)
        prefix_BTX &= position_BT[:, :, None] - jnp.arange(X)[None, None, :] < window
    return jnp.concatenate([prefix_BTX, row_BTT], axis=-1)


def _pad_mask(mask_BTS: jax.Array | None) -> jax.Array | None:
    """bool[B, 1, T', S'], both lengths rounded up: no query sees an added key, added queries see something."""
    if mask_BTS is None:
        return None
    extra_queries, extra_keys = (-size % CUDNN_BLOCK for size in mask_BTS.shape[1:])
    mask_BTS = jnp.pad(mask_BTS, ((0, 0), (0, 0), (0, extra_keys)))
    return jnp.pad(mask_BTS, ((0, 0), (0, extra_queries), (0, 0)), constant_values=True)[:, None]


def _cudnn_attend(
    q_BTHE: jax.Array, k_BSKE: jax.Array, v_BSKE: jax.Array, mask_B1TS: jax.Array | None, window: int
) -> jax.Array:
    T, S = q_BTHE.shape[1], k_BSKE.shape[1]
    q_BTHE, k_BSKE, v_BSKE = (
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % CUDNN_BLOCK), (0, 0), (0, 0))) for x in (q_BTHE, k_BSKE, v_BSKE)
    )
    # cuDNN skips later keys if told is_causal, but its diagonal starts at the first key: not with a prefix. It takes
    # no window with a mask, so a mask includes it.
    own_window = (window - 1, 0) if window and mask_B1TS is None else None
    out_BTHE = jax.nn.dot_product_attention(
        q_BTHE, k_BSKE, v_BSKE, mask=mask_B1TS, is_causal=T == S, local_window_size=own_window, implementation="cudnn"
    )
    return out_BTHE[:, :T]


def make_packed_attention(
    segment_BT: jax.Array,
    implementation: str = "xla",
    windows: Sequence[int] = (0,),
    prompt_BT: jax.Array | None = None,
) -> AttendFn:
    """`attend_fn` for rows that hold their prompts; its cache is None. `windows`: ModelConfig.windows; prompt_BT:
    Batch.prompt_NZRT."""
    row_fns = {
        window: make_row_attention(segment_BT, None, implementation, window=window, prompt_BT=prompt_BT)
        for window in windows
    }
    return lambda q, k, v, window=0: (row_fns[window](q, k, v), None)


def make_shared_prefix_attention(
    prefix_length_ZQ: jax.Array,
    X: int,
    prefix_of_ZR: jax.Array,
    segment_ZRT: jax.Array,
    implementation: str = "xla",
    windows: Sequence[int] = (0,),
) -> AttendFn:
    """`attend_fn` for rows [Z, Q*X + R*T]: Q prompts of X tokens, then R rows of responses that continue them.

    A prompt is computed once for all its responses. Shards (Z) are independent. `windows`: ModelConfig.windows.
    """
    Z, Q = prefix_length_ZQ.shape
    R, T = segment_ZRT.shape[1:]
    is_prefix_ZQX = jnp.arange(X)[None, None, :] < prefix_length_ZQ[..., None]

    def for_rows(x_ZQ: jax.Array) -> jax.Array:
        """Each row's prompt: [Z, Q, ...] -> [Z*R, ...]."""
        picked_ZR = jax.vmap(lambda x_Q, prefix_of_R: x_Q[prefix_of_R])(x_ZQ, prefix_of_ZR)
        return picked_ZR.reshape(Z * R, *x_ZQ.shape[2:])

    row_masks = segment_ZRT.reshape(Z * R, T), for_rows(is_prefix_ZQX)
    prompt_fns = {window: make_row_attention(None, None, implementation, window=window) for window in windows}
    row_fns = {window: make_row_attention(*row_masks, implementation, window=window) for window in windows}

    def split(x_ZYHE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Prompts [Z, Q, X, H, E] and rows [B, T, H, E], B = Z*R."""
        heads = x_ZYHE.shape[2:]
        return x_ZYHE[:, : Q * X].reshape(Z, Q, X, *heads), x_ZYHE[:, Q * X :].reshape(Z * R, T, *heads)

    def attend_fn(
        q_ZYHE: jax.Array, k_ZYKE: jax.Array, v_ZYKE: jax.Array, window: int = 0
    ) -> tuple[jax.Array, None]:
        prompt_q, row_q_BTHE = split(q_ZYHE)
        prompt_k, row_k_BTKE = split(k_ZYKE)
        prompt_v, row_v_BTKE = split(v_ZYKE)
        prompt_out = prompt_fns[window](*(x.reshape(Z * Q, *x.shape[2:]) for x in (prompt_q, prompt_k, prompt_v)))
        # Repeated because kernels take one set of keys per row. Decoding shares them (cache.py).
        k_BSKE = jnp.concatenate([for_rows(prompt_k), row_k_BTKE], axis=1)
        v_BSKE = jnp.concatenate([for_rows(prompt_v), row_v_BTKE], axis=1)
        row_out = row_fns[window](row_q_BTHE, k_BSKE, v_BSKE)
        return jnp.concatenate([out.reshape(Z, -1, *out.shape[2:]) for out in (prompt_out, row_out)], axis=1), None

    return attend_fn
