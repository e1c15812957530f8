"""The decoder both policies share: token ids in, hidden states or logits out. Pure functions over a parameter tree.

By configuration it is Llama, Mistral, Qwen2/2.5 (q/k/v bias), Qwen3 (q/k norm) or SmolLM2: RMSNorm, rotary positions,
SwiGLU, grouped-query attention, tied or untied head.

Axis letters, here and in the whole package, are those of README.md (Reading the code).

The layers' parameters are stacked on a leading L axis. Training scans over them with rematerialisation; sampling loops
over them one by one (decode_layers.py).
"""

import dataclasses
import itertools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from tango_jax.models.attention import ATTENTION_KINDS, AttendFn
from tango_jax.models.decode_attention import DECODE_ATTENTION_KINDS
from tango_jax.models.head_precision import HEAD_PRECISIONS
from tango_jax.models.int8 import SAMPLE_DTYPES
from tango_jax.models.lora import LORA_A, LORA_B, LoraConfig, check_lora, freeze, init_adapters
from tango_jax.records import with_base
from tango_jax.sharding import collectives
from tango_jax.sharding.layouts import PARAM_SPECS

REMAT_MODES = ("none", "dots", "full")

Rope = tuple[jax.Array, jax.Array]  # sine and cosine of every position


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3 rotary scaling: low frequencies are stretched by `factor`, high ones kept, the band between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture and numerics of one decoder; hashable, so it can be a static argument."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tied_head: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    max_position: int = 32_768
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    head_dtype: str = "float32"
    head_precision: str = "highest"  # of a float32 head's products (HEAD_PRECISIONS)
    grad_reduce_dtype: str = "float32"  # in which gradients are summed over fsdp; never narrower than the dtype of use
    remat: str = "full"
    unroll: bool = False  # training scan fully unrolled: quicker steps for a small model, longer compiles
    attention: str = "auto"  # implementation for whole sequences (attention.py)
    decode_attention: str = "xla"  # and for decode steps (decode_attention.py)
    sample_cache_dtype: str = ""  # keys and values of sampling; "int8", or empty: compute_dtype
    sample_weight_dtype: str = ""  # the layers' matrices while sampling; values as above
    lora: LoraConfig | None = None  # adapters on frozen matrices; None: everything is trained

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary positions")
        if self.remat not in REMAT_MODES:
            raise ValueError(f"remat={self.remat!r} is not one of {', '.join(REMAT_MODES)}")
        if self.attention not in ATTENTION_KINDS:
            raise ValueError(f"attention={self.attention!r} is not one of {', '.join(ATTENTION_KINDS)}")
        if self.decode_attention not in DECODE_ATTENTION_KINDS:
            kinds = ", ".join(DECODE_ATTENTION_KINDS)
            raise ValueError(f"decode_attention={self.decode_attention!r} is not one of {kinds}")
        if self.head_precision not in HEAD_PRECISIONS:
            raise ValueError(f"head_precision={self.head_precision!r} is not one of {', '.join(HEAD_PRECISIONS)}")
        for name in ("sample_cache_dtype", "sample_weight_dtype"):
            if getattr(self, name) not in SAMPLE_DTYPES:
                raise ValueError(f"{name}={getattr(self, name)!r} is not int8; leave it empty for compute_dtype")
        if self.lora:
            check_lora(self)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis, D or E, with the statistics in float32, whatever the compute dtype."""
    x32 = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    # Hugging Face multiplies the scale in the model's dtype after the cast back; parity in bf16 needs the same order.
    return jnp.broadcast_to(scale, x.shape).astype(x.dtype) * (x32 * inverse).astype(x.dtype)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angular frequencies of the rotary embedding, float32 [E/2], after Llama-3 scaling where the config has it."""
    # Rounded where PyTorch rounds: one unit in the last place is already 3e-4 radians at position 5000.
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequency = 1 / np.power(config.rope_base, exponent.astype(np.float64)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    ratio = scaling.original_max_position / wavelength
    band = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((ratio - scaling.low_freq_factor) / band, 0.0, 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def rope_tables(config: ModelConfig, position_BT: jax.Array) -> Rope:
    """Sine and cosine of every position, each float32[B, T, 1, E/2]; computed once and shared by all layers."""
    angle = position_BT[..., None].astype(jnp.float32) * rope_frequencies(config)[None, None, :]
    return jnp.sin(angle)[:, :, None, :], jnp.cos(angle)[:, :, None, :]


def apply_rope(x_BTHE: jax.Array, rope: Rope) -> jax.Array:
    """Rotate the two halves of the head dim (Hugging Face's convention, not interleaved pairs)."""
    sin, cos = rope
    first, second = jnp.split(x_BTHE.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHE.dtype)


def matmul(x: jax.Array, w: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """x [B, T, inputs] @ w [inputs, outputs], and times the scales of an int8 w, [outputs].

    Rows are flattened first. Otherwise the weight's gradient contracts two axes at once, a form for which XLA's CPU
    backend has no fast kernel (8 times slower).
    """
    flat = x.reshape(-1, x.shape[-1])
    if scale is None:
        out = flat @ w
    else:
        out = jnp.matmul(flat, w.astype(flat.dtype), preferred_element_type=jnp.float32)
        out = (out * scale[None]).astype(flat.dtype)
    return out.reshape(*x.shape[:-1], w.shape[-1])


class Block(nn.Module):
    """One decoder layer. `attend_fn(q, k, v) -> (out_BTHE, cache)` is handed in, so that training, prefill and
    decoding share every other line. With a mesh, it is one device's part of the layer (see sharding.py)."""

    config: ModelConfig
    mesh: Mesh | None = None

    def _param(self, name: str, shape: tuple[int, ...], fan_in: int = 0, scale: float = 1.0) -> jax.Array:
        """A parameter in the compute dtype: norm scales (fan_in 0) start at one, matrices at N(0, scale^2 / fan_in)."""
        init = nn.initializers.normal(scale * fan_in**-0.5) if fan_in else nn.initializers.ones
        return self.param(name, init, shape, jnp.dtype(self.config.param_dtype)).astype(self.config.compute_dtype)

    def _bias(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        value = self.param(name, nn.initializers.zeros, shape, jnp.dtype(self.config.param_dtype))
        return value.astype(self.config.compute_dtype)

    def _scale(self, name: str) -> jax.Array | None:
        """The scales of a matrix's outputs, where `decode_layers.split_layers` has made it int8."""
        is_int8 = self.has_variable("params", f"{name}_scale")
        return self.get_variable("params", f"{name}_scale").reshape(-1) if is_int8 else None

    def _with_adapter(self, name: str, x: jax.Array, out: jax.Array) -> jax.Array:
        """x @ w, and (alpha / r) (x @ A) @ B where the matrix has an adapter; x [B, T, inputs]."""
        if not self.has_variable("params", name + LORA_A):
            return out
        # B of a joined matrix has more rows than r, of which each sees only its own part of x @ A.
        lora, dtype = self.config.lora, jnp.dtype(self.config.compute_dtype)
        wide, narrow = (self.get_variable("params", name + part).astype(dtype) for part in (LORA_A, LORA_B))
        wide, narrow = wide.reshape(x.shape[-1], -1), narrow.reshape(-1, out.shape[-1])
        # Tensor parallelism splits the side of the adapter that faces heads or the mlp's width; the other is whole.
        if name in ("o", "down"):
            narrow = collectives.copy_to_tensor(narrow, self.mesh)
        else:
            wide = collectives.copy_to_tensor(wide, self.mesh)
        return out + matmul(matmul(x, wide) * jnp.asarray(lora.alpha / lora.rank, dtype), narrow)

    def _products(self, joined: str, x_BTD: jax.Array, shapes: dict[str, tuple[int, ...]]) -> list[jax.Array]:
        """x @ w for several matrices: a single product where `split_layers` has joined them under that name."""
        sizes = {name: math.prod(shape[1:]) for name, shape in shapes.items()}
        if self.has_variable("params", joined):
            out = matmul(x_BTD, self.get_variable("params", joined), self._scale(joined))
            out = self._with_adapter(joined, x_BTD, out)
            return jnp.split(out, list(itertools.accumulate(sizes.values()))[:-1], axis=-1)
        weights = {name: self._param(name, shape, fan_in=shape[0]) for name, shape in shapes.items()}
        outs = {name: matmul(x_BTD, w.reshape(-1, sizes[name]), self._scale(name)) for name, w in weights.items()}
        return [self._with_adapter(name, x_BTD, out) for name, out in outs.items()]

    @nn.compact
    def __call__(self, x_BTD: jax.Array, rope: Rope, attend_fn: AttendFn) -> tuple[jax.Array, Any]:
        c = self.config
        # Under tensor parallelism a device has its share of the heads and of the mlp's width.
        tensor = collectives.tensor_size(self.mesh)
        D, F, H, K, E = c.width, c.mlp_width // tensor, c.num_heads // tensor, c.num_kv_heads // tensor, c.head_dim
        # What a layer adds to the residual stream starts small against the embedding, as in GPT-2: token identity
        # survives to the last layer, and copying is learned sooner.
        residual_scale = (2 * c.num_layers) ** -0.5

        x_norm_BTD = rms_norm(x_BTD, self._param("attention_norm", (D,)), c.norm_eps)
        x_norm_BTD = collectives.copy_to_tensor(x_norm_BTD, self.mesh)
        heads = {"q": H, "k": K, "v": K}
        flat = self._products("qkv", x_norm_BTD, {name: (D, count, E) for name, count in heads.items()})
        split = {name: out.reshape(*out.shape[:-1], heads[name], E) for name, out in zip(heads, flat, strict=True)}
        if c.qkv_bias:
            split = {n: out + self._bias(f"{n}_bias", (heads[n], E))[None, None] for n, out in split.items()}
        q_BTHE, k_BTKE, v_BTKE = split["q"], split["k"], split["v"]
        if c.qk_norm:
            # Entered as [E]: their gradients are then summed over tensor as such, not for every token and head.
            norms = (self._param(name, (E,)) for name in ("q_norm", "k_norm"))
            q_norm_E, k_norm_E = (collectives.copy_to_tensor(norm_E, self.mesh) for norm_E in norms)
            q_BTHE, k_BTKE = rms_norm(q_BTHE, q_norm_E, c.norm_eps), rms_norm(k_BTKE, k_norm_E, c.norm_eps)
        out_BTHE, cache = attend_fn(apply_rope(q_BTHE, rope), apply_rope(k_BTKE, rope), v_BTKE)
        heads_out = out_BTHE.reshape(*x_BTD.shape[:-1], H * E)
        o = self._param("o", (H, E, D), H * E, residual_scale).reshape(H * E, D)
        out_BTD = self._with_adapter("o", heads_out, matmul(heads_out, o, self._scale("o")))
        x_BTD = x_BTD + collectives.sum_over_tensor(out_BTD, self.mesh)

        x_norm_BTD = rms_norm(x_BTD, self._param("mlp_norm", (D,)), c.norm_eps)
        x_norm_BTD = collectives.copy_to_tensor(x_norm_BTD, self.mesh)
        gate_BTF, up_BTF = self._products("gate_up", x_norm_BTD, {"gate": (D, F), "up": (D, F)})
        down_FD = self._param("down", (F, D), F, residual_scale)
        hidden_BTF = nn.silu(gate_BTF) * up_BTF
        out_BTD = self._with_adapter("down", hidden_BTF, matmul(hidden_BTF, down_FD, self._scale("down")))
        return x_BTD + collectives.sum_over_tensor(out_BTD, self.mesh), cache


def init_params(config: ModelConfig, key: jax.Array) -> dict:
    """A fresh parameter tree: `embed` [V, D], `layers` (each leaf stacked on L), `final_norm` [D], `head` [D, V]."""
    embed_key, head_key, layers_key = jax.random.split(key, 3)
    block, dtype = Block(config), jnp.dtype(config.param_dtype)
    K, E, H = config.num_kv_heads, config.head_dim, config.num_heads

    def init_layer(layer_key: jax.Array) -> dict:
        x_BTD = jnp.zeros((1, 1, config.width), config.compute_dtype)
        rope = rope_tables(config, jnp.zeros((1, 1), jnp.int32))

        def attend_fn(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
            assert q.shape[2:] == (H, E) and k.shape[2:] == (K, E), (q.shape, k.shape)
            return q, None

        return block.init(layer_key, x_BTD, rope, attend_fn)["params"]

    # Hidden states leave the final norm with numbers of about 1. With a head of this scale, tied or not, logits begin
    # at about 1, too, and so the distribution near the uniform one.
    params = {
        "embed": config.width**-0.5 * jax.random.normal(embed_key, (config.vocab_size, config.width), dtype),
        "layers": jax.vmap(init_layer)(jax.random.split(layers_key, config.num_layers)),
        "final_norm": jnp.ones((config.width,), dtype),
    }
    if not config.tied_head:
        params["head"] = config.width**-0.5 * jax.random.normal(head_key, (config.width, config.vocab_size), dtype)
    return params


def init_weights(config: ModelConfig, key: jax.Array) -> dict:
    """What forward passes take: the result of `init_params`; with adapters, frozen and with fresh adapters in it."""
    params = init_params(config, key)
    return with_base(freeze(config, params), init_adapters(config, key)) if config.lora else params


def embed_tokens(config: ModelConfig, params: dict, token_BT: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """Rows of the embedding table, [B, T, D]; `params` are those of training or the result of `split_layers`."""
    dtypes = (config.compute_dtype, config.grad_reduce_dtype)
    embed_VD = collectives.gather_table(params["embed"], mesh, PARAM_SPECS["embed"], *dtypes)
    if embed_VD.shape[0] == config.vocab_size:
        return embed_VD[token_BT]
    # Each device looks up the tokens of its part of the vocabulary and adds zeros for the others.
    row_BT, is_here_BT = vocabulary_shard_index(config, token_BT, mesh)
    x_BTD = jnp.where(is_here_BT[..., None], embed_VD[row_BT], 0)
    return collectives.sum_over_tensor(x_BTD, mesh)


def vocabulary_shard_index(config: ModelConfig, token_BT: jax.Array, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Each token's place in this device's part of a vocabulary that is split over tensor, and whether it is there."""
    size = config.vocab_size // collectives.tensor_size(mesh)
    row_BT = token_BT - size * collectives.tensor_index(mesh)
    is_here_BT = (row_BT >= 0) & (row_BT < size)
    return jnp.where(is_here_BT, row_BT, 0), is_here_BT


def apply_layers(
    config: ModelConfig, layers: dict, x_BTD: jax.Array, rope: Rope, attend_fn: AttendFn, mesh: Mesh | None = None
) -> jax.Array:
    """All layers by a rematerialised scan over the stacked parameters: the training path, no cache.

    On a mesh, a layer's parameters are gathered inside the scan (and again in the backward pass): one layer at a time.
    """
    block = Block(config, mesh)

    def layer_fn(x_BTD: jax.Array, layer_params: dict) -> tuple[jax.Array, None]:
        layer_params = collectives.gather_layer(layer_params, mesh, config.compute_dtype, config.grad_reduce_dtype)
        return block.apply({"params": layer_params}, x_BTD, rope, attend_fn)[0], None

    if config.remat != "none":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if config.remat == "dots" else None
        # Inside a scan XLA cannot undo the rematerialisation by common-subexpression elimination.
        layer_fn = jax.checkpoint(layer_fn, prevent_cse=False, policy=policy)
    return lax.scan(layer_fn, x_BTD, layers, unroll=config.num_layers if config.unroll else 1)[0]


def head_matrix(config: ModelConfig, params: dict, mesh: Mesh | None = None) -> jax.Array:
    """The output projection [D, V] in the head's dtype, tied or not."""
    name = "embed" if config.tied_head else "head"
    dtypes = (config.head_dtype, config.grad_reduce_dtype)
    matrix = collectives.gather(params[name], mesh, PARAM_SPECS[name], *dtypes)
    return matrix.T if config.tied_head else matrix


def logits_from_hidden(
    config: ModelConfig, final_norm_D: jax.Array, head_DV: jax.Array, x_BTD: jax.Array
) -> jax.Array:
    """Final norm and head; logits are float32 whatever the head's dtype.

    By default XLA multiplies float32 in TF32 on GPUs and in bfloat16 on TPUs. A head of float32 asks for
    `head_precision`, here and (since a product's gradients inherit it) in the backward pass: sampler and trainer then
    agree on log-probs as far as their hidden states do.
    """
    precision = HEAD_PRECISIONS[config.head_precision] if config.head_dtype == "float32" else None
    x_BTD = rms_norm(x_BTD, final_norm_D.astype(x_BTD.dtype), config.norm_eps)
    x_BTD = x_BTD.astype(config.head_dtype)
    return jnp.matmul(x_BTD, head_DV, precision=precision, preferred_element_type=jnp.float32)


def forward(
    config: ModelConfig,
    params: dict,
    token_BT: jax.Array,
    position_BT: jax.Array,
    attend_fn: AttendFn,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Hidden states [B, T, D] before the final norm, for whole sequences (training and scoring)."""
    x_BTD = embed_tokens(config, params, token_BT, mesh)
    return apply_layers(config, params["layers"], x_BTD, rope_tables(config, position_BT), attend_fn, mesh)
