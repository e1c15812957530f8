"""Policies from a run's settings, and a policy out of a run's workdir: whatever it has trained so far.

Stage: the start of every run; and where a policy that this project trained goes on: another run, an export, `sample`.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.config import default_config, flatten
from tango_jax.models.transformer import ModelConfig
from tango_jax.runtime.checkpoint import read_state
from tango_jax.runtime.finite import check_loaded
from tango_jax.runtime.manifest import complete_steps
from tango_jax.tasks.registry import tokenizer_model
from tango_jax.text.character_tokenizer import write_character_tokenizer
from tango_jax.text.tokenizer import load_sentencepiece
from tango_jax.weights.hf_layout import abstract_params
from tango_jax.weights.source import NUMERICS, Source, generation_of, kind_of, open_source


def open_checkpoint(name: str, role: str, use_chat: bool | None = None, **numerics) -> Source:
    """Open anything that has weights: see `source.open_source`, or a workdir, of which `role` is taken.

    Args:
        use_chat: None: as the run had it (workdir), or without (others).
        numerics: those of source.NUMERICS that should differ from the run's (workdir) or from ModelConfig's defaults.

    Raises:
        ValueError: nothing of that name, a checkpoint that this project cannot run, or a run without one.
    """
    if kind_of(name) == "workdir":
        return open_workdir(Path(name).expanduser(), role, use_chat, **numerics)
    return open_source(name, bool(use_chat), **numerics)


def open_workdir(workdir: Path, role: str, use_chat: bool | None = None, **numerics) -> Source:
    """The newest checkpoint of `role` ("generator" or "verifier") in a workdir: of stage 2, or else of stage 1.

    Raises:
        ValueError: settings of another version, no checkpoint yet, or the checkpoint that the run started from is gone.
    """
    base = start_source(read_config(workdir), role, use_chat)
    saved, wanted = base.model_config, dataclasses.replace(base.model_config, **numerics)
    directory, part = newest_checkpoints(workdir, role)

    def load_params(shardings=None):
        shapes = abstract_params(saved)
        if shardings is not None:
            shapes = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, shardings)
        restored = read_state(directory, shapes, part=part)
        params = check_loaded(restored.state, f"{directory / str(restored.step)} ({role})",
                              "give another workdir, or remove this folder to have the step before it")
        if shardings is not None:
            return jax.tree.map(lambda leaf: leaf.astype(wanted.param_dtype), params)
        # On no particular device: arrays from a checkpoint are bound to theirs, and jitted functions compile anew.
        return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf).astype(wanted.param_dtype)), params)

    return dataclasses.replace(base, name=str(workdir), model_config=wanted, load_params=load_params)


def start_source(config: ConfigDict, role: str, use_chat: bool | None = None) -> Source:
    """What a role's architecture and tokenizer come from: its `checkpoint`, or its `model` and the task's tokenizer."""
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
    """The directory of checkpoints to read, and the branch of the saved tree with the role's parameters."""
    if complete_steps(workdir / "checkpoints"):
        return workdir / "checkpoints", (role, "params")
    if complete_steps(workdir / "sft" / role / "checkpoints"):
        return workdir / "sft" / role / "checkpoints", ("params",)
    raise ValueError(f"{workdir} holds no complete checkpoint of the {role}: let the run save one (checkpoint.every, "
                     f"{role}.sft.checkpoint_every), or give another workdir")


def read_config(workdir: Path) -> ConfigDict:
    """The settings that a run was started with; keys that it did not have yet get their defaults.

    Raises:
        ValueError: no settings, damaged ones, or keys that this version does not know.
    """
    path = workdir / "config.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give the workdir of a run") from error
    config = default_config()
    known = flatten(config)
    unknown = sorted(saved.keys() - known.keys())
    if unknown:
        raise ValueError(f"{path} has settings that this version does not know ({', '.join(unknown[:5])}): use the "
                         "version that the run was made with")
    for key, value in saved.items():
        *parents, leaf = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[leaf] = tuple(value) if isinstance(known[key], tuple) else value
    return config
