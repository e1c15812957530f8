"""The decoder of both policies: token ids in, hidden states or logits out. Pure functions over a parameter tree.

By configuration it is Llama, Mistral, Qwen2/2.5 (q/k/v bias), Qwen3 (q/k norm), SmolLM2, SmolLM3 (some layers without
rotary positions), Gemma 3 (norms before and after, windows, GeGLU) or OLMo 2 (norms after, q/k norm over all heads).

Axis letters are defined in tango_jax/README.md. Layers are stacked on a leading L axis: training scans over them with
rematerialisation, sampling loops over them (decode_layers.py).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from tango_jax.models.attention import ATTENTION_KINDS, AttendFn
from tango_jax.models.decode_attention import DECODE_ATTENTION_KINDS
from tango_jax.models.head_precision import HEAD_PRECISIONS
from tango_jax.models.int8 import SAMPLE_DTYPES
from tango_jax.models.lora import LORA_A, LORA_B, LoraConfig, check_lora, freeze, init_adapters
from tango_jax.models.rotary import Rope, Ropes, RopeScaling, apply_rope, rope_tables
from tango_jax.records import with_base
from tango_jax.sharding import collectives
from tango_jax.sharding.layouts import PARAM_SPECS

REMAT_MODES = ("none", "dots", "full")
SCORE_HEADS = ("", "linear", "mlp")
SCORE_PARAMS = ("score", "score_bias", "score_hidden", "score_hidden_bias")  # of the head of a process reward model
PRODUCT = "product"  # name of what remat=dots keeps of a layer: one result of each matrix, with what its adapter adds


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Attention settings that differ between layers."""

    window: int = 0  # tokens that a query sees, of which it is the last; 0: all before it
    rope_base: float | None = None  # a rotary base; 0: nothing is rotated; None: base and scaling are the model's
    rope_scaling: RopeScaling | None = None  # of a `rope_base`


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
    # In the place of the vocabulary, a process reward model has two classes: "linear", or "mlp" with a hidden layer
    # (`class_logits`). Empty: a language model.
    score_head: str = ""
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False  # of all heads as one vector, in the place of a norm of each head
    pattern: tuple[LayerKind, ...] = (LayerKind(),)  # kinds of the first layers, repeated up to the last one
    norm_places: tuple[str, ...] = ("before",)  # of attention and MLP: before, after, or both
    norm_offset: float | None = None  # added to a norm's scale, which then multiplies in float32; None: see `rms_norm`
    activation: str = "silu"  # of the MLP's gate (ACTIVATIONS)
    scaled_embedding: bool = False  # rows of the embedding are multiplied by the root of the width
    query_width: float = 0.0  # scores are divided by its root; 0: head_dim
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
        assert self.score_head in SCORE_HEADS, self.score_head
        if self.lora:
            check_lora(self)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(itertools.islice(itertools.cycle(self.pattern), self.num_layers))

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows; 0: none."""
        return tuple(dict.fromkeys(kind.window for kind in self.pattern))


def _gelu(x: jax.Array) -> jax.Array:
    """The tanh approximation, rounded once as in PyTorch."""
    return nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


ACTIVATIONS = {"silu": nn.silu, "gelu": _gelu}


def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, offset: float | None = None, mesh: Mesh | None = None
) -> jax.Array:
    """RMSNorm over the scale's axes (the last of x) in float32. `offset` is added to the scale: Gemma 1, OLMo 2 0."""
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=tuple(range(-scale.ndim, 0)), keepdims=True)
    inverse = lax.rsqrt(collectives.mean_over_tensor(mean_square, mesh) + eps)
    if offset is not None:
        return (x32 * inverse * (offset + jnp.broadcast_to(scale, x.shape).astype(jnp.float32))).astype(x.dtype)
    # Hugging Face multiplies after the cast back; parity in bf16 needs this order.
    return jnp.broadcast_to(scale, x.shape).astype(x.dtype) * (x32 * inverse).astype(x.dtype)


def matmul(x: jax.Array, w: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """x [B, T, inputs] @ w. Rows are flattened: gradients that contract two axes are 8 times slower on CPUs."""
    flat = x.reshape(-1, x.shape[-1])
    if scale is None:
        out = flat @ w
    else:
        out = jnp.matmul(flat, w.astype(flat.dtype), preferred_element_type=jnp.float32)
        out = (out * scale[None]).astype(flat.dtype)
    return out.reshape(*x.shape[:-1], w.shape[-1])


class Block(nn.Module):
    """One decoder layer, or a device's part of it on a mesh. `attend_fn` differs in training, prefill and decoding."""

    config: ModelConfig
    mesh: Mesh | None = None

    def _param(self, name: str, shape: tuple[int, ...], fan_in: int = 0, scale: float = 1.0) -> jax.Array:
        """In the compute dtype. Norm scales (fan_in 0) start at 1 - offset, matrices at N(0, scale^2 / fan_in)."""
        start = nn.initializers.constant(1.0 - (self.config.norm_offset or 0.0))
        init = nn.initializers.normal(scale * fan_in**-0.5) if fan_in else start
        return self.param(name, init, shape, jnp.dtype(self.config.param_dtype)).astype(self.config.compute_dtype)

    def _norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return rms_norm(x, scale, self.config.norm_eps, self.config.norm_offset)

    def _norm_of_width(self, name: str, place: str, x_BTD: jax.Array) -> jax.Array:
        """A norm before or after attention or MLP, if the model has it."""
        if place not in self.config.norm_places:
            return x_BTD
        return self._norm(x_BTD, self._param(name, (self.config.width,)))

    def _bias(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        value = self.param(name, nn.initializers.zeros, shape, jnp.dtype(self.config.param_dtype))
        return value.astype(self.config.compute_dtype)

    def _scale(self, name: str) -> jax.Array | None:
        """The output scales of an int8 matrix."""
        is_int8 = self.has_variable("params", f"{name}_scale")
        return self.get_variable("params", f"{name}_scale").reshape(-1) if is_int8 else None

    def _with_adapter(self, name: str, x: jax.Array, out: jax.Array) -> jax.Array:
        """out + (alpha / r) (x @ A) @ B if the matrix has an adapter; x [B, T, inputs]. remat=dots keeps it."""
        if not self.has_variable("params", name + LORA_A):
            return checkpoint_name(out, PRODUCT)
        lora, dtype = self.config.lora, jnp.dtype(self.config.compute_dtype)
        wide, narrow = (self.get_variable("params", name + part).astype(dtype) for part in (LORA_A, LORA_B))
        wide, narrow = wide.reshape(x.shape[-1], -1), narrow.reshape(-1, out.shape[-1])
        # Tensor parallelism splits only the side that faces heads or the mlp width.
        if name in ("o", "down"):
            narrow = collectives.copy_to_tensor(narrow, self.mesh)
        else:
            wide = collectives.copy_to_tensor(wide, self.mesh)
        if x.shape[1] == 1:  # XLA for GPUs would join A to a copy of the frozen matrix in every step, for one product
            x = jax.lax.optimization_barrier(x)
        out += matmul(matmul(x, wide) * jnp.asarray(lora.alpha / lora.rank, dtype), narrow)
        return checkpoint_name(out, PRODUCT)

    def _products(self, joined: str, x_BTD: jax.Array, shapes: dict[str, tuple[int, ...]]) -> list[jax.Array]:
        """x @ w for several matrices, as one product where `split_layers` joined them."""
        sizes = {name: math.prod(shape[1:]) for name, shape in shapes.items()}
        if self.has_variable("params", joined):
            out = matmul(x_BTD, self.get_variable("params", joined), self._scale(joined))
            out = self._with_adapter(joined, x_BTD, out)
            return jnp.split(out, list(itertools.accumulate(sizes.values()))[:-1], axis=-1)
        weights = {name: self._param(name, shape, fan_in=shape[0]) for name, shape in shapes.items()}
        outs = {name: matmul(x_BTD, w.reshape(-1, sizes[name]), self._scale(name)) for name, w in weights.items()}
        return [self._with_adapter(name, x_BTD, out) for name, out in outs.items()]

    @nn.compact
    def __call__(self, x_BTD: jax.Array, rope: Rope | None, attend_fn: AttendFn) -> tuple[jax.Array, Any]:
        c = self.config
        tensor = collectives.tensor_size(self.mesh)
        D, F, H, K, E = c.width, c.mlp_width // tensor, c.num_heads // tensor, c.num_kv_heads // tensor, c.head_dim
        # Small residual additions, as in GPT-2: token identity reaches the last layer, copying is learned sooner.
        residual_scale = (2 * c.num_layers) ** -0.5

        x_norm_BTD = self._norm_of_width("attention_norm", "before", x_BTD)
        x_norm_BTD = collectives.copy_to_tensor(x_norm_BTD, self.mesh)
        heads = {"q": H, "k": K, "v": K}
        flat = self._products("qkv", x_norm_BTD, {name: (D, count, E) for name, count in heads.items()})
        split = {name: out.reshape(*out.shape[:-1], heads[name], E) for name, out in zip(heads, flat, strict=True)}
        if c.qkv_bias:
            split = {n: out + self._bias(f"{n}_bias", (heads[n], E))[None, None] for n, out in split.items()}
        q_BTHE, k_BTKE, v_BTKE = split["q"], split["k"], split["v"]
        if c.qk_norm:
            # As [E], gradients are summed over tensor once, not for every token and head.
            norms = (self._param(name, (E,)) for name in ("q_norm", "k_norm"))
            q_norm_E, k_norm_E = (collectives.copy_to_tensor(norm_E, self.mesh) for norm_E in norms)
            q_BTHE, k_BTKE = self._norm(q_BTHE, q_norm_E), self._norm(k_BTKE, k_norm_E)
        if c.qk_norm_whole:
            q_norm_HE, k_norm_KE = self._param("q_whole_norm", (H, E)), self._param("k_whole_norm", (K, E))
            q_BTHE = rms_norm(q_BTHE, q_norm_HE, c.norm_eps, c.norm_offset, self.mesh)
            k_BTKE = rms_norm(k_BTKE, k_norm_KE, c.norm_eps, c.norm_offset, self.mesh)
        if c.query_width:  # attention itself divides by the root of head_dim
            q_BTHE *= jnp.asarray((E / c.query_width) ** 0.5, q_BTHE.dtype)
        out_BTHE, cache = attend_fn(apply_rope(q_BTHE, rope), apply_rope(k_BTKE, rope), v_BTKE)
        heads_out = out_BTHE.reshape(*x_BTD.shape[:-1], H * E)
        o = self._param("o", (H, E, D), H * E, residual_scale).reshape(H * E, D)
        out_BTD = self._with_adapter("o", heads_out, matmul(heads_out, o, self._scale("o")))
        out_BTD = collectives.sum_over_tensor(out_BTD, self.mesh)
        x_BTD = x_BTD + self._norm_of_width("attention_out_norm", "after", out_BTD)

        x_norm_BTD = self._norm_of_width("mlp_norm", "before", x_BTD)
        x_norm_BTD = collectives.copy_to_tensor(x_norm_BTD, self.mesh)
        gate_BTF, up_BTF = self._products("gate_up", x_norm_BTD, {"gate": (D, F), "up": (D, F)})
        down_FD = self._param("down", (F, D), F, residual_scale)
        hidden_BTF = ACTIVATIONS[c.activation](gate_BTF) * up_BTF
        out_BTD = self._with_adapter("down", hidden_BTF, matmul(hidden_BTF, down_FD, self._scale("down")))
        out_BTD = collectives.sum_over_tensor(out_BTD, self.mesh)
        return x_BTD + self._norm_of_width("mlp_out_norm", "after", out_BTD), cache


def init_params(config: ModelConfig, key: jax.Array) -> dict:
    """Fresh parameters: `embed` [V, D], `layers` (each leaf stacked on L), `final_norm` [D], `head` [D, V]; in its
    place, a process reward model has some of SCORE_PARAMS."""
    embed_key, head_key, layers_key = jax.random.split(key, 3)
    block, dtype = Block(config), jnp.dtype(config.param_dtype)
    K, E, H = config.num_kv_heads, config.head_dim, config.num_heads

    def init_layer(layer_key: jax.Array) -> dict:
        x_BTD = jnp.zeros((1, 1, config.width), config.compute_dtype)

        def attend_fn(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
            assert q.shape[2:] == (H, E) and k.shape[2:] == (K, E), (q.shape, k.shape)
            return q, None

        return block.init(layer_key, x_BTD, None, attend_fn)["params"]

    # Normed hidden states are about 1. At this scale logits are too, so the first distribution is near uniform.
    params = {
        "embed": config.width**-0.5 * jax.random.normal(embed_key, (config.vocab_size, config.width), dtype),
        "layers": jax.vmap(init_layer)(jax.random.split(layers_key, config.num_layers)),
        "final_norm": jnp.full((config.width,), 1.0 - (config.norm_offset or 0.0), dtype),
    }
    if config.score_head:
        params |= _init_score_head(config, head_key)
    elif not config.tied_head:
        params["head"] = config.width**-0.5 * jax.random.normal(head_key, (config.width, config.vocab_size), dtype)
    return params


def _init_score_head(config: ModelConfig, key: jax.Array) -> dict:
    widths = {"score": 2} | ({"score_hidden": config.width} if config.score_head == "mlp" else {})
    params = {}
    for name, own_key in zip(widths, jax.random.split(key, len(widths)), strict=True):
        shape = (config.width, widths[name])
        params[name] = config.width**-0.5 * jax.random.normal(own_key, shape, jnp.dtype(config.param_dtype))
        params[f"{name}_bias"] = jnp.zeros(shape[1:], config.param_dtype)
    return params


def init_weights(config: ModelConfig, key: jax.Array) -> dict:
    """Fresh weights for forward passes: `init_params`, or a frozen base with fresh adapters."""
    params = init_params(config, key)
    return with_base(freeze(config, params), init_adapters(config, key)) if config.lora else params


def embed_tokens(config: ModelConfig, params: dict, token_BT: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """Embeddings [B, T, D]; `params` of training or of `split_layers`."""
    dtypes = (config.compute_dtype, config.grad_reduce_dtype)
    embed_VD = collectives.gather_table(params["embed"], mesh, PARAM_SPECS["embed"], *dtypes)
    if embed_VD.shape[0] == config.vocab_size:
        x_BTD = embed_VD[token_BT]
    else:
        row_BT, is_here_BT = vocabulary_shard_index(config, token_BT, mesh)
        x_BTD = collectives.sum_over_tensor(jnp.where(is_here_BT[..., None], embed_VD[row_BT], 0), mesh)
    return x_BTD * jnp.asarray(config.width**0.5, x_BTD.dtype) if config.scaled_embedding else x_BTD


def vocabulary_shard_index(config: ModelConfig, token_BT: jax.Array, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Each token's row in this device's part of the vocabulary, and whether it is there."""
    size = config.vocab_size // collectives.tensor_size(mesh)
    row_BT = token_BT - size * collectives.tensor_index(mesh)
    is_here_BT = (row_BT >= 0) & (row_BT < size)
    return jnp.where(is_here_BT, row_BT, 0), is_here_BT


def apply_layers(
    config: ModelConfig, layers: dict, x_BTD: jax.Array, ropes: Ropes, attend_fn: AttendFn, mesh: Mesh | None = None
) -> jax.Array:
    """All layers by a rematerialised scan over the stacked parameters, without a cache (training).

    A scan step is one repeat of the pattern, so windows and rotary bases are constants. On a mesh, it gathers
    parameters layer by layer, again in the backward pass.
    """
    block, period = Block(config, mesh), len(config.pattern)

    def make_layer_fn(kind: LayerKind, rope: Rope | None, prevent_cse: bool) -> Callable:
        own_attend_fn = functools.partial(attend_fn, window=kind.window) if kind.window else attend_fn

        def layer_fn(x_BTD: jax.Array, layer_params: dict) -> tuple[jax.Array, None]:
            layer_params = collectives.gather_layer(layer_params, mesh, config.compute_dtype, config.grad_reduce_dtype)
            return block.apply({"params": layer_params}, x_BTD, rope, own_attend_fn)[0], None

        if config.remat == "none":
            return layer_fn
        policy = jax.checkpoint_policies.save_only_these_names(PRODUCT) if config.remat == "dots" else None
        return jax.checkpoint(layer_fn, prevent_cse=prevent_cse, policy=policy)

    def scan_layers(x_BTD: jax.Array, layers: dict, count: int, repeats: int) -> jax.Array:
        # Only outside a loop can XLA's common-subexpression elimination undo rematerialisation.
        prevent_cse, own = repeats == 1 < period, zip(config.pattern[:count], ropes[:count], strict=True)
        layer_fns = [make_layer_fn(kind, rope, prevent_cse) for kind, rope in own]
        step_fn = layer_fns[0]
        if period > 1:
            layers = jax.tree.map(lambda leaf: leaf.reshape(repeats, count, *leaf.shape[1:]), layers)
            step_fn = functools.partial(_each_layer, layer_fns)
        return lax.scan(step_fn, x_BTD, layers, unroll=repeats if config.unroll else 1)[0]

    whole, rest = divmod(config.num_layers, period)
    parts = [(count, repeats) for count, repeats in ((period, whole), (rest, 1)) if count and repeats]
    stacks = [layers] if len(parts) == 1 else _split_stack(layers, [count * repeats for count, repeats in parts])
    for stack, (count, repeats) in zip(stacks, parts, strict=True):
        x_BTD = scan_layers(x_BTD, stack, count, repeats)
    return x_BTD


def _each_layer(layer_fns: Sequence[Callable], x_BTD: jax.Array, layers: dict) -> tuple[jax.Array, None]:
    for layer_fn, layer in zip(layer_fns, _split_stack(layers, [1] * len(layer_fns)), strict=True):
        x_BTD, _ = layer_fn(x_BTD, jax.tree.map(lambda leaf: leaf.squeeze(0), layer))
    return x_BTD, None


def _split_stack(layers: dict, sizes: list[int]) -> list[dict]:
    """`lax.split`: its gradient is a concatenation; slices would sum as many padded stacks."""
    leaves, tree = jax.tree.flatten(layers)
    return [tree.unflatten(part) for part in zip(*(lax.split(leaf, sizes) for leaf in leaves), strict=True)]


def head_matrix(config: ModelConfig, params: dict, mesh: Mesh | None = None) -> jax.Array:
    """The output projection [D, V], tied or not."""
    name = "embed" if config.tied_head else "head"
    dtypes = (config.head_dtype, config.grad_reduce_dtype)
    matrix = collectives.gather(params[name], mesh, PARAM_SPECS[name], *dtypes)
    return matrix.T if config.tied_head else matrix


def logits_from_hidden(
    config: ModelConfig, final_norm_D: jax.Array, head_DV: jax.Array, x_BTD: jax.Array
) -> jax.Array:
    """Final norm and head; logits are float32.

    By default XLA multiplies float32 in TF32 on GPUs and in bfloat16 on TPUs. `head_precision` holds for gradients too.
    """
    x_BTD = rms_norm(x_BTD, final_norm_D.astype(x_BTD.dtype), config.norm_eps, config.norm_offset)
    return _head_product(config, x_BTD, head_DV)


def class_logits(config: ModelConfig, params: dict, x_BTD: jax.Array) -> jax.Array:
    """Final norm and head of a process reward model: float32 [B, T, 2], whether the step that a token ends is incorrect
    (0) or correct (1). `params`: leaves of `SCORE_PARAMS` and the final norm."""
    final_norm_D = params["final_norm"].astype(x_BTD.dtype)
    x_BTD = rms_norm(x_BTD, final_norm_D, config.norm_eps, config.norm_offset)
    if config.score_head == "mlp":
        x_BTD = nn.relu(_head_product(config, x_BTD, params["score_hidden"]) + params["score_hidden_bias"][None, None])
    return _head_product(config, x_BTD, params["score"]) + params["score_bias"][None, None]


def _head_product(config: ModelConfig, x_BTD: jax.Array, matrix: jax.Array) -> jax.Array:
    precision = HEAD_PRECISIONS[config.head_precision] if config.head_dtype == "float32" else None
    return jnp.matmul(x_BTD.astype(config.head_dtype), matrix, precision=precision, preferred_element_type=jnp.float32)


def forward(
    config: ModelConfig,
    params: dict,
    token_BT: jax.Array,
    position_BT: jax.Array,
    attend_fn: AttendFn,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Hidden states [B, T, D] before the final norm, for whole sequences."""
    x_BTD = embed_tokens(config, params, token_BT, mesh)
    return apply_layers(config, params["layers"], x_BTD, rope_tables(config, position_BT), attend_fn, mesh)
