"""Export to a Hugging Face folder. It is written under another name and renamed when complete."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from tango_jax.models.transformer import LayerKind, ModelConfig
from tango_jax.runtime.sealed import SAVING, commit
from tango_jax.runtime.unread import Unread
from tango_jax.weights import hf_layout
from tango_jax.weights.hf_layout import FAMILIES, TEXT_PARTS, Layout, differences
from tango_jax.weights.model_card import CARD_FILE, model_card
from tango_jax.weights.prompting import Prompting
from tango_jax.weights.safetensors_files import INDEX_FILE, SINGLE_FILE, Place, create_file, write_tensor

MAX_SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)
_STORED_DTYPES = ("float32", "float16", "bfloat16")
# Also in config.json, for readers that ignore generation_config.json.
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def family_of(config: ModelConfig) -> str:
    """The first supported `model_type` that can hold this model, or ValueError."""
    for kind in FAMILIES:
        if not differences(kind, config):
            return kind
    raise ValueError("a model with qkv_bias and qk_norm both true has no Hugging Face architecture: it cannot be "
                     "exported; train with one of them")


def hf_config(config: ModelConfig, architecture: str, dtype: str, special_ids: dict | None = None) -> dict:
    """Contents of config.json. `architecture`: a model_type or class name; ValueError if it cannot hold the model."""
    names = {family.architecture: kind for kind, family in FAMILIES.items()}
    names |= {whole: kind for whole, (_, kind) in TEXT_PARTS.items()}  # of which the text part was loaded
    kind = names.get(architecture, architecture)
    if kind not in FAMILIES:
        raise ValueError(f"architecture={architecture!r} is not one of {', '.join([*FAMILIES, *names])}")
    family = FAMILIES[kind]
    if other := differences(kind, config):
        theirs = " and ".join(f"{name}={value}" for name, value in other.items())
        ours = " and ".join(f"{name}={getattr(config, name)}" for name in other)
        raise ValueError(f"a {kind} has {theirs}, but this model has {ours}: export it as {family_of(config)}")
    rope = _rope_parameters(config)
    # Here, because the import takes a second.
    from transformers import CONFIG_MAPPING

    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "max_position_embeddings": config.max_position,
        "rope_parameters": rope,
        "architectures": [family.architecture],
        "dtype": dtype,
        **dict.fromkeys(_SPECIAL_IDS),
        **(special_ids or {}),
    }
    if kind == "mistral":
        fields["sliding_window"] = None  # its default is 4096
    if kind == "smollm3":
        fields["no_rope_layers"] = [int(layer.rope_base != 0) for layer in config.layer_kinds]
    fields |= _gemma3_fields(config, rope) if kind == "gemma3_text" else {"hidden_act": "silu"}
    out = json.loads(CONFIG_MAPPING[kind](**fields).to_json_string())
    # transformers 4 reads these names; without them it silently uses a base of 10000.
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    legacy = {"rope_theta": config.rope_base, "torch_dtype": dtype}
    local = [layer.rope_base for layer in config.pattern if layer.window]
    legacy |= {"rope_local_base_freq": local[0]} if local else {}
    return out | legacy | ({"rope_scaling": scaling} if config.rope_scaling is not None else {})


def _rope_parameters(own: ModelConfig | LayerKind) -> dict:
    rope = {"rope_type": "default", "rope_theta": own.rope_base}
    if scaling := own.rope_scaling:
        rope |= {"rope_type": "linear", "factor": scaling.factor}
        if scaling.original_max_position:
            rope |= {
                "rope_type": "llama3",
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
    return rope


def _gemma3_fields(config: ModelConfig, rope: dict) -> dict:
    local = next((layer for layer in config.pattern if layer.window), None)
    types = ["sliding_attention" if layer.window else "full_attention" for layer in config.layer_kinds]
    fields = {
        "layer_types": types,
        "rope_parameters": {"full_attention": rope},
        "query_pre_attn_scalar": int(config.query_width or config.head_dim),
        "hidden_activation": "gelu_pytorch_tanh",
    }
    if local is not None:
        fields["rope_parameters"]["sliding_attention"] = _rope_parameters(local)
        fields["sliding_window"] = local.window
    return fields


def export_hf(
    folder: str | Path,
    config: ModelConfig,
    params: dict,
    architecture: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_folder: str | Path | None = None,
    generation_config: dict | None = None,
    card: str = "",
    promptings: Sequence[Prompting] = (),
    dtype: str | None = None,
) -> Path:
    """Write a folder that transformers and `load_hf` read; return it. Every process must call this.

    Args:
        params: arrays, or `Unread` ones, which are read one at a time.
        architecture: see `hf_config`; default: `family_of` the model.
        tokenizer_folder: its tokenizer files are copied.
        generation_config: of transformers; default: the file in the tokenizer's folder.
        promptings: as in training, the exported role's first.
        dtype: of the stored weights; default: as in `params`, stored bit by bit.

    ValueError: the folder is not empty, or model, dtype or tokenizer folder do not fit.
    """
    folder = Path(folder).expanduser()
    dtype = dtype or str(params["embed"].dtype)
    if dtype not in _STORED_DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(_STORED_DTYPES)}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists and is not an empty folder: choose another one, or remove it")
    sources = _tokenizer_files(tokenizer_folder)
    generation = _generation_config(generation_config, tokenizer_folder)
    special_ids = {name: generation[name] for name in _SPECIAL_IDS if name in generation}
    contents = hf_config(config, architecture or family_of(config), dtype, special_ids)
    _check_params(config, params)

    saving = folder.with_name(f"{folder.name}{SAVING}")
    writes = jax.process_index() == 0
    try:
        if writes:
            shutil.rmtree(saving, ignore_errors=True)  # left behind by an export that was killed
            saving.mkdir(parents=True)
            _write_json(saving / "config.json", contents)
            _write_json(saving / "generation_config.json", generation)
            (saving / CARD_FILE).write_text(card or model_card(folder.name, {}, None), encoding="utf-8")
            for prompting in promptings:
                prompting.write(saving, is_other=prompting is not promptings[0])
            for source in sources:
                shutil.copyfile(source, saving / source.name)
        _write_tensors(saving if writes else None, config, params, np.dtype(dtype), max_shard_bytes)
        if writes:
            commit(saving, folder)
    except OSError:
        if writes:
            shutil.rmtree(saving, ignore_errors=True)  # a partial model is useless and takes up disk space
        raise
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"export to {folder}")
    return folder


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tokenizer_files(folder: str | Path | None) -> list[Path]:
    if folder is None:
        return []
    found = [Path(folder) / name for name in TOKENIZER_FILES if (Path(folder) / name).is_file()]
    if not found:
        raise ValueError(f"tokenizer_folder={folder} holds no tokenizer files ({', '.join(TOKENIZER_FILES)})")
    return found


def _generation_config(given: dict | None, tokenizer_folder: str | Path | None) -> dict:
    from transformers import GenerationConfig

    if given is None and tokenizer_folder is not None:
        file = Path(tokenizer_folder) / "generation_config.json"
        given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    return json.loads(GenerationConfig(**(given or {})).to_json_string())


def _check_params(config: ModelConfig, params: dict) -> None:
    def shapes(tree):
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {hf_layout.path_name(path): tuple(leaf.shape) for path, leaf in leaves}

    expected, found = shapes(hf_layout.abstract_params(config)), shapes(params)
    assert expected == found, set(expected.items()) ^ set(found.items())


def _shards(config: ModelConfig, itemsize: int, max_bytes: int) -> list[list[str]]:
    """Tensor names by file, each at most `max_bytes`; a larger tensor is alone."""
    shards, used = [[]], 0
    for name, (_, _, shape) in hf_layout.stored_tensors(config).items():
        size = int(np.prod(shape)) * itemsize
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _write_tensors(folder: Path | None, config: ModelConfig, params: dict, dtype: np.dtype, max_bytes: int) -> None:
    """A process without a folder only gathers sharded parameters."""
    shards, tensors = _shards(config, dtype.itemsize, max_bytes), hf_layout.stored_tensors(config)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else [SINGLE_FILE]
    places = {}
    for file, shard in zip(files, shards, strict=True) if folder is not None else ():
        places |= create_file(folder / file, {name: jax.ShapeDtypeStruct(tensors[name][2], dtype) for name in shard})
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = hf_layout.path_name(keys)
        own = [(layer, places.get(name)) for name, (its, layer, _) in tensors.items() if its == path]
        _write_parameter(leaf, hf_layout.layout_of(config, path), dtype, own)
    if folder is not None and len(shards) > 1:
        count = sum(math.prod(shape) for _, _, shape in tensors.values())
        metadata = {"total_parameters": count, "total_size": count * dtype.itemsize}
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        _write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})


def _write_parameter(
    leaf: jax.Array | Unread, layout: Layout, dtype: np.dtype, places: Sequence[tuple[int | None, Place | None]]
) -> None:
    """All layers of a parameter; it is freed before the next one is read."""
    value = leaf.load() if isinstance(leaf, Unread) else leaf
    is_split = isinstance(value, jax.Array) and not value.is_fully_addressable
    value = multihost_utils.process_allgather(value, tiled=True) if is_split else np.asarray(value)
    for layer, place in places:
        if place is not None:
            array = hf_layout.to_stored(layout, value if layer is None else value[layer])
            write_tensor(place, array.astype(dtype, copy=False))
