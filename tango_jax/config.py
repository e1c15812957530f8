"""The configuration as a tree of named values; defaults.py and role_defaults.py declare every key."""

import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.defaults import KEYS, default_config, role_config
from tango_jax.runtime.checks import require, shortened
from tango_jax.runtime.model_text import on_one_line

__all__ = ["ROLES", "default_config", "flatten", "read_settings", "role_config"]

ROLES = ("generator", "verifier")
# Keys of earlier versions that changed no result.
UNUSED = ("distributed.enabled", "distributed.heartbeat_s", "generate.top_p", "rollouts.eval_problems")
# Removed keys and the value that is now fixed, or a function from the role's other settings to it.
GONE: dict[str, Any] = {
    "generate.keep.best": 0,
    "generate.keep.min_format": 0.0,
    "generate.keep.only_correct": False,
    "generate.keep.validation_share": 0.02,
    "rl.correctness_weight": 1.0,
    "rl.improvement_weight": 0.5,
    "rl.label_count_decay": 0.8,
    "rl.teacher_weight": 0.5,
    "task.easy_error": 0.02,
    "task.row_format": "",
    "ROLE.loss.step_scale": 10.0,
    "ROLE.model.head_dtype": "float32",
    "ROLE.model.head_dim": lambda role: role.get("model.width", 0) // role.get("model.num_heads", 1),
    "ROLE.model.max_position": 4096,
    "ROLE.model.qkv_bias": False,
    "ROLE.model.rope_base": 10_000.0,
    "ROLE.model.tied_head": True,
    "ROLE.optimizer.b1": 0.9,
    "ROLE.optimizer.b2": 0.999,
    "ROLE.optimizer.decay_steps": 0,
    "ROLE.optimizer.eps": 1e-8,
    "ROLE.optimizer.lora_weight_decay": 0.0,
    "ROLE.optimizer.schedule": "constant",
    "ROLE.reward": "",
    "ROLE.sft.optimizer.b1": 0.9,
    "ROLE.sft.optimizer.clip_norm": 1.0,
    "ROLE.sft.optimizer.decay_steps": 0,
    "ROLE.sft.optimizer.eps": 1e-8,
    "ROLE.sft.optimizer.lora_weight_decay": 0.0,
    "ROLE.sft.optimizer.weight_decay": 0.01,
    "ROLE.share_prompts": True,
}


def flatten(config: ConfigDict) -> dict:
    """Settings as a flat dict: {'rl.gamma': 0.8, ...}."""
    flat = {}
    for key, value in config.items():
        nested = flatten(value) if isinstance(value, ConfigDict) else None
        flat |= {f"{key}.{inner}": leaf for inner, leaf in nested.items()} if nested is not None else {key: value}
    return flat


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a run's config.json, {'rl.gamma': 0.8, ...}, with tuples as lists. Raises ValueError."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({on_one_line(str(error))}): name the workdir of a run, or its "
                         "config.json") from error
    require(isinstance(settings, dict), f"{path} holds {shortened(settings)}, not the settings of a run: name the "
            "workdir of a run, or its config.json")
    unknown = [key for key in sorted(settings.keys() - KEYS.keys()) if not _still_holds(key, settings)]
    shown = on_one_line(", ".join(f"{key}={shortened(settings[key])}" for key in unknown[:5]))
    require(not unknown, f"{path} has settings that this version does not know ({shown}{', ...' * (len(unknown) > 5)})"
            ": use the version that started the run, or begin a new one")
    return {key: value for key, value in settings.items() if key in KEYS}


def _still_holds(key: str, settings: dict[str, Any]) -> bool:
    """Whether a removed key had the value that is now fixed."""
    role, _, name = key.partition(".")
    gone = f"ROLE.{name}" if role in ROLES else key
    if gone not in GONE:
        return gone in UNUSED
    of_role = {one.removeprefix(f"{role}."): value for one, value in settings.items()}
    return settings[key] == (GONE[gone](of_role) if callable(GONE[gone]) else GONE[gone])
