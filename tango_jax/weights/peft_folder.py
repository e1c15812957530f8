"""Adapters as folders of the `peft` library: adapter_config.json and adapter_model.safetensors."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from tango_jax.models.lora import LORA_A, LORA_B, MATRICES, LoraConfig, init_adapters
from tango_jax.models.transformer import ModelConfig
from tango_jax.runtime.checks import read_json_object
from tango_jax.runtime.hub import parse_hub_id
from tango_jax.runtime.sealed import SAVING, commit
from tango_jax.weights.hf_layout import LAYOUTS
from tango_jax.weights.model_card import CARD_FILE
from tango_jax.weights.prompting import Prompting
from tango_jax.weights.safetensors_files import shorten, write_tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_FOLDER = "base"  # in an adapter's folder: its base, where peft could not load it otherwise
MODULES = {name: LAYOUTS[f"layers/{name}"].name.split(".")[-2] for name in MATRICES}  # {"q": "q_proj", ...}
# Settings that are read, or that no longer matter for a trained adapter.
KNOWN = ("peft_type", "r", "lora_alpha", "target_modules", "init_lora_weights", "auto_mapping", "peft_version",
         "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout", "layers_pattern",
         "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core",
         "runtime_config", "ensure_weight_tying", "qalora_group_size")
# Others may change what an adapter computes. Files of all peft releases have these at these values.
PLAIN = {"use_dora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False,
         "bias": "none", "fan_in_fan_out": False, "layers_to_transform": None, "lora_bias": False,
         "trainable_token_indices": None, "layer_replication": None}

# These leave the base as it is. Others move a part of it into the adapter.
INIT_WEIGHTS = (True, False, None, "gaussian", "eva")


def write_adapter(
    folder: Path,
    config: ModelConfig,
    adapters: dict,
    base: str,
    card: str = "",
    promptings: Sequence[Prompting] = (),
    write_base_fn: Callable[[Path], Any] | None = None,
) -> Path:
    """Write the folder and return it; ValueError if it is not empty. `base`: checkpoint or hub id[@revision]. `card`:
    its README.md. `promptings`: as of `export_hf`. `write_base_fn`: writes the base, which then is BASE_FOLDER in it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists and is not an empty folder: choose another one, or remove it")
    lora, tensors = config.lora, {}
    for name in lora.names:
        for layer in range(config.num_layers):
            wide, narrow = (np.asarray(adapters["layers"][name + part][layer]) for part in (LORA_A, LORA_B))
            stem = _stem(name, layer)
            tensors[f"{stem}.lora_A.weight"] = np.ascontiguousarray(wide.reshape(-1, lora.rank).T)
            tensors[f"{stem}.lora_B.weight"] = np.ascontiguousarray(narrow.reshape(lora.rank, -1).T)
    local = folder.absolute() / BASE_FOLDER if write_base_fn else Path(base).expanduser().absolute()
    is_local = write_base_fn or local.exists()  # then named so that it is found from any folder
    name, revision = (str(local), None) if is_local else parse_hub_id(base) or (base, None)
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": name, "revision": revision,
        "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "init_lora_weights": True,
        "target_modules": [MODULES[name] for name in lora.names], **PLAIN,
    }
    saving = folder.with_name(f"{folder.name}{SAVING}")
    shutil.rmtree(saving, ignore_errors=True)
    saving.mkdir(parents=True)
    if card:
        (saving / CARD_FILE).write_text(card, encoding="utf-8")
    for prompting in promptings:
        prompting.write(saving, is_other=prompting is not promptings[0])
    (saving / CONFIG_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    try:
        write_tensors(tensors, saving / WEIGHTS_FILE)
        if write_base_fn:
            write_base_fn(saving / BASE_FOLDER)
    except OSError:
        shutil.rmtree(saving, ignore_errors=True)
        raise
    commit(saving, folder)
    return folder


def read_lora_config(folder: Path) -> LoraConfig:
    """Rank, alpha and targets of a folder. ValueError: no adapter, or one that models/lora.py cannot compute."""
    path = folder / CONFIG_FILE
    settings = read_json_object(path, "an adapter's folder needs it")
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type={settings.get('peft_type')!r} is not supported: only LORA is")
    other = [name for name in settings if name not in KNOWN and (settings[name] or PLAIN.get(name)) != PLAIN.get(name)]
    other += ["init_lora_weights"] if settings.get("init_lora_weights") not in INIT_WEIGHTS else []
    if other:
        raise ValueError(f"{path}: {other[0]}={settings[other[0]]!r} is not supported: merge this adapter into its "
                         "base with peft (merge_and_unload), and name the result as the checkpoint")
    modules = settings.get("target_modules")
    known = {module: name for name, module in MODULES.items()}
    is_list = isinstance(modules, list) and all(isinstance(module, str) for module in modules)
    unknown = sorted(set(modules) - set(known)) if is_list else [repr(modules)]
    if unknown or not modules:
        raise ValueError(f"{path}: target_modules has {shorten(unknown) or 'nothing'}, and an adapter here belongs to "
                         f"{', '.join(known)}: merge this one into its base with peft (merge_and_unload)")
    if not isinstance(settings.get("r"), int) or settings["r"] < 1:
        raise ValueError(f"{path}: r={settings.get('r')!r} must be a whole number of at least 1")
    names = tuple(name for name in MATRICES if MODULES[name] in modules)
    alpha = settings.get("lora_alpha", 8)
    if not isinstance(alpha, (int, float)) or not alpha > 0:
        raise ValueError(f"{path}: lora_alpha={alpha!r} must be a number above 0")
    return LoraConfig(settings["r"], float(alpha), () if len(names) == len(MATRICES) else names)


def check_lora_config(folder: Path, wanted: LoraConfig | None) -> None:
    """ValueError if a folder's rank, alpha or targets are others. `wanted` None: another check refuses it."""
    found = read_lora_config(folder)
    if wanted and (found.rank, found.alpha, found.names) != (wanted.rank, wanted.alpha, wanted.names):
        raise ValueError(f"{folder} has rank={found.rank}, alpha={found.alpha:g} and targets="
                         f"({','.join(found.names)}): set model.lora.rank, alpha and targets to these")


def read_adapter(folder: Path, config: ModelConfig) -> dict:
    """A folder's adapters as in `init_adapters`. ValueError: it does not match `config.lora`, or tensors are wrong."""
    wanted = config.lora
    check_lora_config(folder, wanted)
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS_FILE} cannot be read ({error}): save the adapter again") from error
    shapes = jax.eval_shape(lambda: init_adapters(config, jax.random.key(0)))["layers"]
    layers, names = {}, set()
    for name in wanted.names:
        for part, end in ((LORA_A, "lora_A"), (LORA_B, "lora_B")):
            own = [f"{_stem(name, layer)}.{end}.weight" for layer in range(config.num_layers)]
            names.update(own)
            leaf = shapes[name + part]
            stored = (wanted.rank, leaf.size // (wanted.rank * config.num_layers))[:: 1 if part == LORA_A else -1]
            wrong = [key for key in own if key not in tensors or tensors[key].shape != stored]
            if wrong:
                there = list(tensors[wrong[0]].shape) if wrong[0] in tensors else "missing"
                raise ValueError(f"{folder / WEIGHTS_FILE}: {shorten(wrong)} should be {list(stored)}, and is {there}: "
                                 "this adapter belongs to another model")
            stack = np.stack([tensors[key].T for key in own]).astype(np.float32)
            layers[name + part] = stack.reshape(leaf.shape)
    if extra := sorted(tensors.keys() - names):
        raise ValueError(f"{folder / WEIGHTS_FILE} has {shorten(extra)}, which no adapter here has: it belongs to "
                         "another model")
    broken = sorted(name for name, leaf in layers.items() if not np.isfinite(leaf).all())
    if broken:
        raise ValueError(f"{folder / WEIGHTS_FILE}: {shorten(broken)} has values that are not finite")
    return {"layers": layers}


def _stem(name: str, layer: int) -> str:
    return "base_model.model." + LAYOUTS[f"layers/{name}"].name.format(layer).removesuffix(".weight")
