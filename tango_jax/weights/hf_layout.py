"""Hugging Face's format and our parameters: families, tensor names and axes, for import and export.

Files have other axis orders and merge axes: `q` is [D, H, E] here and [H*E, D] there. Letters: tango_jax/README.md.
"""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from tango_jax.models.transformer import LayerKind, ModelConfig, init_params


class Family(NamedTuple):
    """How a supported architecture differs from Llama."""

    architecture: str  # class name in config.json's `architectures`
    fields: dict[str, Any] = {}  # of ModelConfig that are not as in Llama
    by_layer: tuple[str, ...] = ()  # fields of LayerKind in which its layers may differ


FAMILIES = {  # by config.json's `model_type`
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}),
    "smollm3": Family("SmolLM3ForCausalLM", by_layer=("rope_base",)),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {"qk_norm": True, "norm_places": ("before", "after"), "norm_offset": 1.0, "activation": "gelu",
         "scaled_embedding": True},
        by_layer=("rope_base", "rope_scaling", "window"),
    ),
    "olmo2": Family("Olmo2ForCausalLM", {"qk_norm_whole": True, "norm_places": ("after",), "norm_offset": 0.0}),
}
# Models of text and images, of which the text part is loaded: `text_config` of config.json, and tensors with a prefix
# that differs between versions of transformers.
TEXT_PARTS = {"gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text")}
TEXT_PREFIX = re.compile(r"(language_model\.model|model\.language_model)\.")
IMAGE_PART = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
_LLAMA = {field.name: field.default for field in dataclasses.fields(ModelConfig)
          if any(field.name in family.fields for family in FAMILIES.values())}


def differences(kind: str, config: ModelConfig) -> dict[str, Any]:
    """Fields in which a family differs from the model, with its values. Empty: the family can hold the model."""
    family = FAMILIES[kind]
    wanted = _LLAMA | family.fields
    found = {name: value for name, value in wanted.items() if getattr(config, name) != value}
    plain = LayerKind()
    is_other = any(getattr(layer, field.name) != getattr(plain, field.name) and field.name not in family.by_layer
                   for layer in config.pattern for field in dataclasses.fields(LayerKind))
    return found | ({"pattern": (plain,)} if is_other else {})


# Heads of process reward models: TRL's token classifiers, and Qwen2.5-Math-PRM's (config.json's `architectures`).
TOKEN_CLASSIFIER, PROCESS_REWARD_MODEL = "ForTokenClassification", "Qwen2ForProcessRewardModel"


def score_heads(kind: str) -> dict[str, str]:
    """{class name in config.json: ModelConfig.score_head} of a family's process reward models."""
    linear = FAMILIES[kind].architecture.removesuffix("ForCausalLM") + TOKEN_CLASSIFIER
    return {linear: "linear"} | ({PROCESS_REWARD_MODEL: "mlp"} if kind == "qwen2" else {})


class Layout(NamedTuple):
    """How a parameter, or one layer of a stacked one, is stored."""

    name: str  # in the files; {} stands for the layer
    stored: str  # axes in the files; spaces separate the dimensions, so "HE D" is a matrix [H*E, D]
    axes: str  # axes of the parameter, without the leading L of a stacked one

    @property
    def stacked(self) -> bool:
        return "{}" in self.name


LAYOUTS = {  # by the parameter's path in the tree
    "embed": Layout("model.embed_tokens.weight", "V D", "VD"),
    "final_norm": Layout("model.norm.weight", "D", "D"),
    "head": Layout("lm_head.weight", "V D", "DV"),
    "score": Layout("score.weight", "2 D", "D2"),
    "score_bias": Layout("score.bias", "2", "2"),
    "score_hidden": Layout("score.0.weight", "d D", "Dd"),
    "score_hidden_bias": Layout("score.0.bias", "d", "d"),
    "layers/attention_norm": Layout("model.layers.{}.input_layernorm.weight", "D", "D"),
    "layers/q": Layout("model.layers.{}.self_attn.q_proj.weight", "HE D", "DHE"),
    "layers/k": Layout("model.layers.{}.self_attn.k_proj.weight", "KE D", "DKE"),
    "layers/v": Layout("model.layers.{}.self_attn.v_proj.weight", "KE D", "DKE"),
    "layers/q_bias": Layout("model.layers.{}.self_attn.q_proj.bias", "HE", "HE"),
    "layers/k_bias": Layout("model.layers.{}.self_attn.k_proj.bias", "KE", "KE"),
    "layers/v_bias": Layout("model.layers.{}.self_attn.v_proj.bias", "KE", "KE"),
    "layers/q_norm": Layout("model.layers.{}.self_attn.q_norm.weight", "E", "E"),
    "layers/k_norm": Layout("model.layers.{}.self_attn.k_norm.weight", "E", "E"),
    "layers/q_whole_norm": Layout("model.layers.{}.self_attn.q_norm.weight", "HE", "HE"),
    "layers/k_whole_norm": Layout("model.layers.{}.self_attn.k_norm.weight", "KE", "KE"),
    "layers/o": Layout("model.layers.{}.self_attn.o_proj.weight", "D HE", "HED"),
    "layers/mlp_norm": Layout("model.layers.{}.post_attention_layernorm.weight", "D", "D"),
    "layers/attention_out_norm": Layout("model.layers.{}.post_attention_layernorm.weight", "D", "D"),
    "layers/mlp_out_norm": Layout("model.layers.{}.post_feedforward_layernorm.weight", "D", "D"),
    "layers/gate": Layout("model.layers.{}.mlp.gate_proj.weight", "F D", "DF"),
    "layers/up": Layout("model.layers.{}.mlp.up_proj.weight", "F D", "DF"),
    "layers/down": Layout("model.layers.{}.mlp.down_proj.weight", "D F", "FD"),
}


def layout_of(config: ModelConfig, path: str) -> Layout:
    """With norms after attention, the norm before the MLP has another name; in a score head with a hidden layer, the
    last one has."""
    if config.score_head == "mlp" and path in ("score", "score_bias"):
        return LAYOUTS[path]._replace(name=LAYOUTS[path].name.replace("score.", "score.2."))
    if path == "layers/mlp_norm" and "after" in config.norm_places:
        return LAYOUTS[path]._replace(name="model.layers.{}.pre_feedforward_layernorm.weight")
    return LAYOUTS[path]


def abstract_params(config: ModelConfig) -> dict:
    """The parameter tree as shapes and dtypes."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def path_name(path: tuple) -> str:
    """A leaf's key in LAYOUTS, such as "layers/q"."""
    return "/".join(key.key for key in path)


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "V": config.vocab_size, "D": config.width, "F": config.mlp_width,
        "H": config.num_heads, "K": config.num_kv_heads, "E": config.head_dim,
        "2": 2, "d": config.width,  # classes of a score head, and its hidden layer
    }


def stored_tensors(config: ModelConfig) -> dict[str, tuple[str, int | None, tuple[int, ...]]]:
    """Tensor name in a checkpoint -> (path of its parameter, layer or None, shape)."""
    sizes, tensors = axis_sizes(config), {}
    paths = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]]
    flat = [path for path in paths if not LAYOUTS[path].stacked]
    by_layer = [(path, i) for i in range(config.num_layers) for path in paths if LAYOUTS[path].stacked]
    for path, layer in [*((path, None) for path in flat), *by_layer]:
        layout = layout_of(config, path)
        shape = tuple(int(np.prod([sizes[axis] for axis in group])) for group in layout.stored.split())
        tensors[layout.name.format(layer)] = (path, layer, shape)
    return tensors


def stored_slices(layout: Layout, sizes: dict[str, int], index: tuple[slice, ...]) -> tuple[slice, ...]:
    """The slices of a tensor to read for the part `index` of its parameter. Inner merged axes are read whole."""
    wanted = dict(zip(layout.axes, index, strict=True))
    slices = []
    for outer, *inner in layout.stored.split():
        step = int(np.prod([sizes[axis] for axis in inner]))
        slices.append(slice(wanted[outer].start * step, wanted[outer].stop * step))
    return tuple(slices)


def from_stored(layout: Layout, sizes: dict[str, int], index: tuple[slice, ...], block: np.ndarray) -> np.ndarray:
    """The part `index` of a parameter (a view) of a block read with `stored_slices`."""
    wanted = dict(zip(layout.axes, index, strict=True))
    stored_axes = layout.stored.replace(" ", "")
    shape, cut = [], []
    for outer, *inner in layout.stored.split():
        shape += [wanted[outer].stop - wanted[outer].start, *(sizes[axis] for axis in inner)]
        cut += [slice(None), *(wanted[axis] for axis in inner)]
    return block.reshape(shape)[tuple(cut)].transpose([stored_axes.index(axis) for axis in layout.axes])


def to_stored(layout: Layout, value: np.ndarray) -> np.ndarray:
    """A parameter, or one layer of it, as a contiguous tensor of the files."""
    order = [layout.axes.index(axis) for axis in layout.stored.replace(" ", "")]
    sizes = dict(zip(layout.axes, value.shape, strict=True))
    shape = [int(np.prod([sizes[axis] for axis in group])) for group in layout.stored.split()]
    return np.ascontiguousarray(value.transpose(order)).reshape(shape)
