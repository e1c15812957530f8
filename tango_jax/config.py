"""The configuration as a tree of named values; defaults.py and role_defaults.py declare every key.

`configs/*.py` define `get_config(arg)` and start from `default_config()`. The result is locked: unknown keys are
rejected, with a suggestion of the closest valid key.
"""

import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.defaults import KEYS, default_config, optimizer_config, role_config
from tango_jax.runtime.checks import require, shortened
from tango_jax.runtime.model_text import on_one_line

__all__ = ["ROLES", "default_config", "flatten", "optimizer_config", "read_settings", "role_config"]

ROLES = ("generator", "verifier")


def flatten(config: ConfigDict) -> dict:
    """Return {'rl.gamma': 0.8, ...}."""
    flat = {}
    for key, value in config.items():
        nested = flatten(value) if isinstance(value, ConfigDict) else None
        flat |= {f"{key}.{inner}": leaf for inner, leaf in nested.items()} if nested is not None else {key: value}
    return flat


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings that a run keeps in its workdir as config.json, {'rl.gamma': 0.8, ...}, with tuples as lists.

    Raises:
        ValueError: the file cannot be read, or it holds something else, or keys that this version does not have.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({on_one_line(str(error))}): name the workdir of a run, or its "
                         "config.json") from error
    require(isinstance(settings, dict), f"{path} holds {shortened(settings)}, and not the settings of a run: name the "
            "workdir of a run, or its config.json")
    unknown = sorted(settings.keys() - KEYS.keys())
    # Not ignored: a key that is gone may have had a value with which the run computed something else.
    require(not unknown, f"{path} has settings that this version does not know ({on_one_line(', '.join(unknown[:5]))}"
            f"{', ...' * (len(unknown) > 5)}): use the version that started the run, or begin a new one")
    return settings
