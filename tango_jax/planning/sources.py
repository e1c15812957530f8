"""What the roles start from, in a plan and in configs/own_problems.py: sizes and tokenizers, but no weights."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.method.own_arm import role_of_weights
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.problem_lengths import BYTES_PER_TOKEN, is_rough, with_rough_tokens
from tango_jax.runtime.checks import Mistakes
from tango_jax.text.hf_tokenizer import has_tokenizer
from tango_jax.text.templates import PRM_TEMPLATES
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights.source import (
    Source,
    fields_of,
    has_chat_template,
    kind_of,
    open_source,
    published_model,
    score_head_of,
)
from tango_jax.weights.workdir import has_one_policy, open_checkpoint, read_config, start_source


def plan_source(config: ConfigDict, role: str) -> Source:
    """The sizes of a role's model. Raises ValueError where neither a file nor the table of presets has them."""
    return _source(config, role, role_of_weights(config, role))


def _source(config: ConfigDict, role: str, whose: str) -> Source:
    """`whose`: the role whose weights are taken where the checkpoint has both."""
    name = config[role].checkpoint
    if not name:
        return start_source(config, role)
    numerics = fields_of(config[role])
    if kind_of(name) == "workdir":
        path = Path(name).expanduser()
        source = _source(read_config(path), whose, "generator" if has_one_policy(path) else whose)
        sizes = dataclasses.replace(source.model_config, **{"lora": None} | numerics)
        return dataclasses.replace(source, model_config=sizes)
    model = published_model(name, **numerics)
    return Source(name, model, blank_tokenizer(model), None, lambda folder: None, {})


def blank_tokenizer(model: ModelConfig) -> Tokenizer:
    """A tokenizer with as many ids as the model; it cannot read or write text."""
    return Tokenizer(lambda text: [0], (b"",) * model.vocab_size, bos_ids=(), stop_ids=(0,))


class OpenSettings:
    """The configuration; `put` leaves the keys in `given` unchanged."""

    def __init__(self, config: ConfigDict, given: Collection[str]):
        self.config, self.given = config, frozenset(given)

    def put(self, key: str, value: Any) -> None:
        if key in self.given:
            return
        *groups, name = key.split(".")
        node = self.config
        for group in groups:
            node = node[group]
        node[name] = value


def open_sources(settings: OpenSettings, mistakes: Mistakes, is_planned: bool) -> dict[str, Source]:
    """What each role starts from; sets `use_chat`, and the template of a process reward model. With `is_planned`
    nothing is downloaded."""
    sources, opened = {}, {}
    for role in ROLES:
        own = settings.config[role]
        numerics = fields_of(own)
        if head := score_head_of(own.checkpoint):  # a process reward model writes nothing, and has turns of its own
            settings.put(f"{role}.template", PRM_TEMPLATES[head])
            settings.put(f"{role}.max_response", 1)
        with mistakes.collected():
            whose = role_of_weights(settings.config, role)
            if is_planned and lacks_tokenizer(settings.config, whose):
                sources[role] = with_rough_tokens(plan_source(settings.config, role))
                continue
            if kind_of(own.checkpoint) == "workdir":
                sources[role] = open_checkpoint(own.checkpoint, whose, None, **numerics)
                settings.put(f"{role}.use_chat", sources[role].tokenizer.chat_fn is not None)
                continue
            settings.put(f"{role}.use_chat", not head and has_chat_template(own.checkpoint))
            key = (own.checkpoint, own.use_chat, *numerics.values())
            if key not in opened:
                opened[key] = open_source(own.checkpoint, own.use_chat, not is_planned, role == "verifier",
                                          **numerics)
            sources[role] = opened[key]
    return sources


def lacks_tokenizer(config: ConfigDict, role: str) -> bool:
    kind, path = kind_of(config[role].checkpoint), Path(config[role].checkpoint).expanduser()
    if kind == "workdir":
        started = read_config(path)
        return bool(started[role].checkpoint) and lacks_tokenizer(started, role)
    return kind == "hub" or (kind == "folder" and not has_tokenizer(path))


def describe_form(config: ConfigDict, tokenizer: Tokenizer) -> str:
    return "counted roughly" if is_rough(tokenizer) else "chat turns" if config.use_chat else "raw text"


def describe_rough_counts(config: ConfigDict, tokenizers: dict[str, Tokenizer]) -> list[str]:
    rough = [role for role in ROLES if is_rough(tokenizers[role])]
    if not rough:
        return []
    names = " and ".join(dict.fromkeys(config[role].checkpoint for role in rough))
    limits = " and ".join(f"{role}.{name}" for role in rough for name in ("max_prompt", "max_response"))
    return [f"a plan downloads nothing, and the tokenizer of {names} is not here: one token is counted for every "
            f"{BYTES_PER_TOKEN} bytes, which leaves room for a chat template; give a folder with the tokenizer's files "
            f"for exact lengths, or set {limits}"]
