"""Opening of a run's policies, either from its settings or from its workdir with whatever it has trained so far.

Takes settings or a workdir; returns a Source. Stage of the loop: the start of every run, and wherever a policy that
this project trained is used again: in another run, an export or `sample`.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.config import default_config, flatten
from tango_jax.models.transformer import ModelConfig
from tango_jax.runtime.checkpoint import read_state
from tango_jax.runtime.checks import read_json_object
from tango_jax.runtime.manifest import MANIFEST, complete_steps, sampled_digest
from tango_jax.tasks.registry import tokenizer_model
from tango_jax.text.character_tokenizer import write_character_tokenizer
from tango_jax.text.tokenizer import load_sentencepiece
from tango_jax.weights.from_hf import resolve_folder
from tango_jax.weights.hf_layout import abstract_params
from tango_jax.weights.prompting import Prompting, read_prompting
from tango_jax.weights.source import NUMERICS, Source, generation_of, kind_of, open_source


def open_checkpoint(name: str, role: str, use_chat: bool | None = None, **numerics) -> Source:
    """Open anything that has weights: a published checkpoint (see `source.open_source`), or one role of a workdir.

    Args:
        use_chat: use the chat template; None: as in the run (of a workdir, or of an export), or no (others).
        numerics: fields in source.NUMERICS that should differ from the run's (workdir) or from ModelConfig's defaults.

    Raises:
        ValueError: there is no checkpoint of that name, or this project cannot run it, or the run has not saved one.
    """
    if kind_of(name) == "workdir":
        return open_workdir(Path(name).expanduser(), role, use_chat, **numerics)
    return open_source(name, use_chat, **numerics)


def prompting_of(name: str, role: str, download: bool = False) -> Prompting | None:
    """How the run prompted the role from which a checkpoint comes; None: it does not say.

    The template of a workdir is a name or a file, as in its settings: a file may be gone that nobody asks for.

    Args:
        download: also ask a hub id, which is downloaded.

    Raises:
        ValueError: there is no checkpoint of that name, or what it says is damaged.
    """
    kind = kind_of(name)
    if kind == "gguf" or (kind == "hub" and not download):
        return None
    if kind == "workdir":
        config = read_config(Path(name).expanduser())
        own = config[role]
        return Prompting(role, own.template, own.use_chat, own.max_prompt, own.max_response, config.task.min_steps)
    found = read_prompting(resolve_folder(name))
    return found if found is not None and found.role == role else None


def open_workdir(workdir: Path, role: str, use_chat: bool | None = None, **numerics) -> Source:
    """Open the newest checkpoint of `role` ("generator" or "verifier") in a workdir: of stage 2, or else of stage 1.

    Raises:
        ValueError: the settings are of another version, there is no checkpoint yet, or the checkpoint from which the
            run started no longer exists.
    """
    base = start_source(read_config(workdir), role, use_chat)
    saved, wanted = base.model_config, dataclasses.replace(base.model_config, **numerics)
    directory, part = newest_checkpoints(workdir, role)

    def load_params(shardings=None):
        shapes = abstract_params(saved)
        if shardings is not None:
            shapes = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, shardings)
        params = read_state(directory, shapes, part=part).state
        if shardings is not None:
            return jax.tree.map(lambda leaf: leaf.astype(wanted.param_dtype), params)
        # Restored arrays are committed to a device, for which jitted functions would recompile; these are uncommitted.
        return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf).astype(wanted.param_dtype)), params)

    return dataclasses.replace(base, name=str(workdir), model_config=wanted, load_params=load_params)


def start_source(config: ConfigDict, role: str, use_chat: bool | None = None) -> Source:
    """Return the source of a role's architecture and tokenizer: its `checkpoint`, or its `model` and the task's."""
    role_config = config[role]
    numerics = {name: role_config.model[name] for name in NUMERICS}
    if role_config.checkpoint:
        return open_checkpoint(
            role_config.checkpoint, role, role_config.use_chat if use_chat is None else use_chat, **numerics
        )
    model = tokenizer_model(config)
    tokenizer = load_sentencepiece(model)
    return Source(
        name="",
        model_config=ModelConfig(vocab_size=tokenizer.vocab_size, **role_config.model),
        tokenizer=tokenizer,
        load_params=None,
        write_tokenizer=lambda folder: write_character_tokenizer(model, folder),
        generation=generation_of(tokenizer),
    )


def newest_checkpoints(workdir: Path, role: str) -> tuple[Path, tuple[str, ...]]:
    """Return the directory of checkpoints to read, and the branch of the saved tree with the role's parameters."""
    if complete_steps(workdir / "checkpoints"):
        return workdir / "checkpoints", (role, "params")
    if complete_steps(workdir / "sft" / role / "checkpoints"):
        return workdir / "sft" / role / "checkpoints", ("params",)
    raise ValueError(f"{workdir} holds no complete checkpoint of the {role}: let the run save one (checkpoint.every, "
                     f"{role}.sft.checkpoint_every), or give another workdir")


def identify_weights(name: str, role: str) -> tuple[int | None, str]:
    """What tells the weights of a checkpoint from others that may later lie in the same place.

    Returns:
        The step of a workdir's checkpoint, None for others, and a digest of its files; of a hub id, one of nothing.
    """
    path, kind = Path(name).expanduser(), kind_of(name)
    if kind == "workdir":
        directory, _ = newest_checkpoints(path, role)
        step = max(complete_steps(directory))
        return step, sampled_digest(directory.glob(f"{step}/{MANIFEST}"))
    return None, sampled_digest([path] if kind == "gguf" else sorted(path.glob("*.safetensors")))


def read_config(workdir: Path) -> ConfigDict:
    """Return the settings with which a run was started; keys that are not among them have their defaults.

    Raises:
        ValueError: the settings are missing or damaged, or contain keys that this version does not know.
    """
    path = workdir / "config.json"
    saved = read_json_object(path, "give the workdir of a run")
    config = default_config()
    known = flatten(config)
    unknown = sorted(saved.keys() - known.keys())
    if unknown:
        raise ValueError(f"{path} has settings that this version does not know ({', '.join(unknown[:5])}): use the "
                         "version that started the run")
    for key, value in saved.items():
        *parents, leaf = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[leaf] = tuple(value) if isinstance(known[key], tuple) else value
    return config
