"""The configuration as a tree of named values; defaults.py and role_defaults.py declare every key.

`configs/*.py` define `get_config(arg)` and start from `default_config()`. The result is locked: unknown keys are
rejected, with a suggestion of the closest valid key.
"""

from ml_collections import ConfigDict

from tango_jax.defaults import default_config, optimizer_config, role_config

__all__ = ["ROLES", "default_config", "flatten", "optimizer_config", "role_config"]

ROLES = ("generator", "verifier")


def flatten(config: ConfigDict) -> dict:
    """Return {'rl.gamma': 0.8, ...}."""
    flat = {}
    for key, value in config.items():
        nested = flatten(value) if isinstance(value, ConfigDict) else None
        flat |= {f"{key}.{inner}": leaf for inner, leaf in nested.items()} if nested is not None else {key: value}
    return flat
