"""Import of Hugging Face checkpoints.

Llama 2 to 3.2, SmolLM2 and SmolLM3, Mistral, Qwen2/2.5, Qwen3 (dense), OLMo 2 and Gemma 3 (only the text part of models
that read images), and process reward models that are built on them. Host memory: one stacked parameter, or this
process's share of it, and the open file.
"""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

from tango_jax.models.rotary import RopeScaling
from tango_jax.models.transformer import LayerKind, ModelConfig
from tango_jax.runtime import hub
from tango_jax.runtime.checks import read_json_object
from tango_jax.runtime.trees import BROKEN_VALUES, first_not_finite
from tango_jax.runtime.unread import Unread, load_all, read_array
from tango_jax.weights import hf_layout, safetensors_files
from tango_jax.weights.hf_layout import (
    FAMILIES,
    IMAGE_PART,
    LAYOUTS,
    TEXT_PARTS,
    TEXT_PREFIX,
    Layout,
    score_heads,
)
from tango_jax.weights.model_card import CARD_FILE
from tango_jax.weights.prompting import TEMPLATE_FILE
from tango_jax.weights.safetensors_files import StoredTensor, tensor_problems

HEAD_ROWS = 4096  # of a head and of the embedding that are in memory at once while they are compared
_DOWNLOADED = ["*.json", TEMPLATE_FILE, "model*.safetensors", "*.model", "*.jinja", "merges.txt", "LICENSE*",
               CARD_FILE]
# Rotary frequencies in old checkpoints; the config determines them.
_LEFTOVERS = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def resolve_folder(name: str) -> Path:
    """The folder `name`, or a download of owner/name[@revision] without pickles and code. ValueError: neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{name} is a file; give the folder that holds config.json and the safetensors files")
    hub_id = hub.parse_hub_id(str(name))
    if hub_id is None:
        raise ValueError(f"{name} is neither a folder nor a hub id such as Qwen/Qwen2.5-1.5B")
    return hub.download(hub_id, _DOWNLOADED)


def model_config_from_hf(folder: str | Path, **numerics) -> ModelConfig:
    """The ModelConfig of a folder's config.json, or ValueError. `numerics`: source.NUMERICS."""
    file = Path(folder) / "config.json"
    return model_config_from_json(read_json_object(file, "a checkpoint folder needs it"), str(file), **numerics)


def model_config_from_json(raw: dict, file: str, **numerics) -> ModelConfig:
    """`model_config_from_hf` for contents of a config.json; error messages name `file`."""
    if raw.get("model_type") in TEXT_PARTS:
        raw = _text_part(file, raw)
    score_head = _check_architecture(file, raw)
    # Here, because the import takes a second.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    try:  # transformers' classes know each family's defaults and both spellings of the rotary settings
        hf = _read_by_model(CONFIG_MAPPING[raw["model_type"]].from_dict(json.loads(json.dumps(raw))))
        _check_options(file, hf)
        return _model_config(hf, numerics | {"score_head": score_head})
    except (StrictDataclassError, KeyError, AttributeError) as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from error


def load_hf(folder: str | Path, config: ModelConfig, shardings: dict | None = None) -> dict:
    """`open_hf`, read."""
    return load_all(open_hf(folder, config, shardings))


def open_hf(folder: str | Path, config: ModelConfig, shardings: dict | None = None) -> dict:
    """The parameters of a folder's safetensors files, as the tree of `init_params`, in `config.param_dtype`; `Unread`.

    With `shardings`, each process reads its part. ValueError: tensors (all named) or files are wrong; from `load`,
    also values.
    """
    folder = Path(folder)
    # The text part of a model of text and images, under a text model's names.
    tensors = {TEXT_PREFIX.sub("model.", name, count=1): tensor
               for name, tensor in safetensors_files.find_tensors(folder).items() if not IMAGE_PART.fullmatch(name)}
    _check_tensors(folder, config, tensors)
    _check_tied_head(folder, config, tensors)
    sizes = hf_layout.axis_sizes(config)

    def open_leaf(path, leaf, sharding=None):
        name = hf_layout.path_name(path)

        def load():
            layout = hf_layout.layout_of(config, name)
            array = read_array(leaf, sharding, lambda index: _read_leaf(tensors, sizes, layout, index, leaf.dtype))
            if first_not_finite({name: array}) is not None:
                raise ValueError(f"{folder}: the array {name} holds {BROKEN_VALUES}, so it cannot be used: use another "
                                 "checkpoint, or fetch or convert this one again")
            return array

        return Unread(leaf.shape, leaf.dtype, load)

    rest = [] if shardings is None else [shardings]
    return jax.tree_util.tree_map_with_path(open_leaf, hf_layout.abstract_params(config), *rest)


def _text_part(file: str, raw: dict) -> dict:
    """The config of the text part of a model of text and images."""
    own_class, kind = TEXT_PARTS[raw["model_type"]]
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"{file}: model_type={raw['model_type']!r} without a text_config, which describes the part "
                         "that is loaded: fetch the file again")
    if raw.get("architectures", [own_class]) != [own_class]:
        raise ValueError(f"{file}: architectures={raw['architectures']} is not supported: for model_type="
                         f"{raw['model_type']} the files must hold a {own_class}")
    above = {name: raw[name] for name in ("tie_word_embeddings", "quantization_config") if name in raw}
    return above | text | {"model_type": kind, "architectures": [FAMILIES[kind].architecture]}


def _check_architecture(file: str, raw: dict) -> str:
    """All checks that need no transformers. Returns the `score_head` of a process reward model, or ""."""
    kind, supported = raw.get("model_type"), ", ".join(FAMILIES)
    if kind not in FAMILIES:
        raise ValueError(f"{file}: model_type={kind!r} is not supported; choose a model of type {supported}")
    heads = {FAMILIES[kind].architecture: ""} | score_heads(kind)
    architectures = raw.get("architectures") or [FAMILIES[kind].architecture]
    for architecture in architectures:
        if architecture not in heads:
            raise ValueError(f"{file}: architectures={architecture} is not supported: for model_type={kind} the files "
                             f"must hold a {FAMILIES[kind].architecture}, or a process reward model "
                             f"({' or '.join(score_heads(kind))})")
    score_head, classes = heads[architectures[0]], raw.get("num_labels", len(raw.get("id2label") or (0, 1)))
    if score_head and classes != 2:
        raise ValueError(f"{file}: a process reward model has 2 labels, incorrect (0) and correct (1), and this one "
                         f"({architectures[0]}) has {classes}: choose another checkpoint")
    if raw.get("quantization_config"):
        raise ValueError(f"{file}: quantization_config is set, and quantized weights are not supported; use the "
                         "original checkpoint in bfloat16, float16 or float32")
    rotates, layers = raw.get("no_rope_layers"), raw.get("num_hidden_layers")
    if kind == "smollm3" and isinstance(rotates, list) and isinstance(layers, int) and len(rotates) < layers:
        raise ValueError(f"{file}: no_rope_layers has {len(rotates)} entries for num_hidden_layers={layers}; it needs "
                         "one for each layer: correct config.json")
    for name in ("rope_parameters", "rope_scaling"):  # transformers merges them where a file has both
        rope = raw.get(name) or {}
        of_kinds = [own for own in rope.values() if isinstance(own, dict)] if isinstance(rope, dict) else []
        for own in of_kinds or [rope]:
            rope_type = own.get("rope_type", own.get("type", "default")) if isinstance(own, dict) else own
            if rope_type not in ("default", "llama3", "linear"):
                raise ValueError(f"{file}: rotary scaling {rope_type!r} is not supported, only default, linear and "
                                 f"llama3; if no more than the original context is needed, remove {name} from "
                                 "config.json")
    return score_head


def _read_by_model(hf) -> SimpleNamespace:
    """Settings that transformers reads for this family: a config object also holds whatever else its file has."""
    names = {field.name for field in dataclasses.fields(hf)} | {"head_dim", "layer_types"}
    read = {name: getattr(hf, name) for name in names if hasattr(hf, name)}
    return SimpleNamespace(model_type=hf.model_type, **read)


def _ropes(hf) -> dict[str, dict]:
    """Rotary settings by kind of layer. Gemma 3's file may have others at the top, which transformers ignores."""
    rope = hf.rope_parameters
    if "window" not in FAMILIES[hf.model_type].by_layer:
        return {"full_attention": rope}
    return {kind: rope[kind] for kind in ("full_attention", "sliding_attention")}


def _check_options(file: str, hf) -> None:
    """Options that change what the model computes."""
    for option in ("attention_bias", "mlp_bias"):
        if getattr(hf, option, False):
            raise ValueError(f"{file}: {option}=true is not supported (qwen2 has its biases on q, k and v); choose "
                             "a checkpoint without")
    for option in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(hf, option, None):
            raise ValueError(f"{file}: {option}={getattr(hf, option)} is not supported; choose a checkpoint without")
    name, wanted = ("hidden_act", ("silu", "swish"))
    if FAMILIES[hf.model_type].fields.get("activation") == "gelu":
        name, wanted = "hidden_activation", ("gelu_pytorch_tanh",)
    if getattr(hf, name) not in wanted:
        raise ValueError(f"{file}: {name}={getattr(hf, name)!r} is not supported, only {wanted[0]}; choose another "
                         "checkpoint")
    for rope in _ropes(hf).values():
        _check_rope(file, rope)
    if "window" in FAMILIES[hf.model_type].by_layer:
        if not (hf.sliding_window or 0) >= 1:
            raise ValueError(f"{file}: sliding_window={hf.sliding_window} must be at least 1; correct config.json")
        return
    window, layer_types = getattr(hf, "sliding_window", None), getattr(hf, "layer_types", None)
    in_use = "sliding_attention" in layer_types if layer_types else window is not None
    if in_use and window is None:
        raise ValueError(f"{file}: layer_types has sliding_attention, but there is no sliding_window: correct "
                         "config.json, with full_attention for all layers or a sliding_window that is in use")
    if in_use and window < hf.max_position_embeddings:
        raise ValueError(
            f"{file}: sliding_window={window} with max_position_embeddings={hf.max_position_embeddings} is not "
            f"supported; sequences of up to {window} tokens never reach the window: set max_position_embeddings to "
            f"{window} in config.json"
        )


def _check_rope(file: str, rope: dict) -> None:
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"{file}: partial_rotary_factor={rope['partial_rotary_factor']} is not supported, only 1; "
                         "choose another checkpoint")
    for key, value in rope.items():
        if key not in ("rope_type", "type", "partial_rotary_factor") and not isinstance(value, int | float):
            raise ValueError(f"{file}: {key}={value!r} of the rotary settings must be a number; correct config.json")
    if rope["rope_type"] == "llama3":
        low, high = (rope[f"{band}_freq_factor"] for band in ("low", "high"))
        if low >= high:
            raise ValueError(f"{file}: high_freq_factor={high} of the rotary settings must be above low_freq_factor="
                             f"{low}; correct config.json")


def _scaling(rope: dict) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] == "linear":
        return RopeScaling(float(rope["factor"]))
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=rope["original_max_position_embeddings"],
    )


def _model_config(hf, numerics: dict) -> ModelConfig:
    rope, family = _ropes(hf)["full_attention"], FAMILIES[hf.model_type]
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    query_width = float(getattr(hf, "query_pre_attn_scalar", head_dim))
    return ModelConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        mlp_width=hf.intermediate_size,
        rope_base=float(rope["rope_theta"]),
        rope_scaling=_scaling(rope),
        norm_eps=hf.rms_norm_eps,
        tied_head=hf.tie_word_embeddings,
        pattern=_pattern(hf),
        query_width=0.0 if query_width == head_dim else query_width,
        max_position=hf.max_position_embeddings,
        **family.fields,
        **numerics,
    )


def _pattern(hf) -> tuple[LayerKind, ...]:
    """The kinds of the layers up to where they repeat."""
    if "window" in FAMILIES[hf.model_type].by_layer:
        rope = _ropes(hf)["sliding_attention"]
        local = LayerKind(hf.sliding_window, float(rope["rope_theta"]), _scaling(rope))
        kinds = [local if name == "sliding_attention" else LayerKind() for name in hf.layer_types]
    else:
        rotates = getattr(hf, "no_rope_layers", [True] * hf.num_hidden_layers)
        kinds = [LayerKind(rope_base=None if rotates[i] else 0.0) for i in range(hf.num_hidden_layers)]
    period = next(size for size in range(1, len(kinds) + 1) if kinds[size:] == kinds[:-size])
    return tuple(kinds[:period])


def _check_tensors(folder: Path, config: ModelConfig, tensors: dict[str, StoredTensor]) -> None:
    expected = {name: shape for name, (_, _, shape) in hf_layout.stored_tensors(config).items()}
    head = LAYOUTS["head"].name  # with a tied head, a second copy of the embedding; with a score head, not used
    found = {name: tensor.shape for name, tensor in tensors.items()
             if not _LEFTOVERS.fullmatch(name) and not ((config.tied_head or config.score_head) and name == head)}
    missing, problems = tensor_problems(found, expected)
    if problems:
        hint = "the weights and config.json do not belong together"
        if missing == [head]:
            hint = "if the model's head is its embedding, set tie_word_embeddings to true in config.json"
        raise ValueError(f"{folder}: tensors {problems}. Check the folder: {hint}")


def _check_tied_head(folder: Path, config: ModelConfig, tensors: dict[str, StoredTensor]) -> None:
    """A stored head that is tied must equal the embedding."""
    names = [LAYOUTS[name].name for name in ("head", "embed")]
    if not config.tied_head or config.score_head or names[0] not in tensors:
        return
    difference, (head, embedding) = "", (tensors[name] for name in names)
    if head.shape != embedding.shape:
        difference = f"its shape is {list(head.shape)}, and the embedding's {list(embedding.shape)}"
    count = 0 if difference else head.shape[0]
    for start in range(0, count, HEAD_ROWS):
        rows = slice(start, min(start + HEAD_ROWS, count)), slice(None)
        parts = [(name, rows, np.empty(0)) for name in names]
        first, second = (block for block, _ in safetensors_files.read_parts(tensors, parts))
        if (is_other := (first != second).any(axis=1)).any():
            difference = f"row {start + int(is_other.argmax())} of {count} differs"
            break
    if difference:
        raise ValueError(f"{folder}: tie_word_embeddings=true, but {names[0]} differs from the embedding "
                         f"({difference}): set it to false in config.json, or fetch the checkpoint again")


def _read_leaf(tensors, sizes: dict[str, int], layout: Layout, bounds: tuple[slice, ...], dtype) -> np.ndarray:
    """The part `bounds` of a parameter, allocated once and filled tensor by tensor."""
    out = np.empty([part.stop - part.start for part in bounds], dtype)
    index = bounds[1:] if layout.stacked else bounds
    slices = hf_layout.stored_slices(layout, sizes, index)
    if layout.stacked:
        layers = range(bounds[0].start, bounds[0].stop)
        parts = [(layout.name.format(layer), slices, out[i]) for i, layer in enumerate(layers)]
    else:
        parts = [(layout.name, slices, out)]
    for block, target in safetensors_files.read_parts(tensors, parts):
        target[...] = hf_layout.from_stored(layout, sizes, index, block)
    return out
