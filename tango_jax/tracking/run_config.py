"""The settings of a run, in config.json of its workdir: written once, and compared when the run is resumed."""

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from ml_collections import ConfigDict

from tango_jax.config import default_config, flatten, read_settings
from tango_jax.defaults import KEYS
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.keys import Change
from tango_jax.runtime.sealed import complete_steps

ANY_TIME = (Change.HARDWARE, Change.WATCHING, Change.EXPERIMENT)
# The other run's workdir may have moved: the checkpoint of stage 2 stores a fingerprint of its starting parameters,
# and before there is one nothing depends on them.
ANY_PLACE = tuple(name for name, key in KEYS.items() if key.change is Change.PLACE)
# With checkpoint.patience they decide when the training ends.
ENDING = ("checkpoint.keep_best", "eval.every")


def changes_results(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether results depend on a setting by more than rounding, among these settings; False for an unknown one."""
    if name in ENDING and settings.get("checkpoint.patience"):
        return True
    return name in KEYS and KEYS[name].change is Change.NEVER


def without_folder(value: Any) -> Any:
    """The last part of a path or hub id, without a commit: the same file may lie elsewhere. Of tuples, each part's."""
    if isinstance(value, tuple):
        return tuple(map(without_folder, value))
    is_path = isinstance(value, str) and "/" in value and not set(value) & set("\n{")
    return PurePath(value).name.partition("@")[0] if is_path else value


def save_config(config: ConfigDict, path: Path, may_change: tuple[str, ...] = ()) -> None:
    """`check_config`, then `keep_config`. All processes must call this. Raises ValueError."""
    check_config(config, path, may_change)
    hosts.in_first(lambda: keep_config(config, path))


def check_config(
    config: ConfigDict, path: Path, may_change: tuple[str, ...] = (), may_move: tuple[str, ...] = ()
) -> None:
    """Raises ValueError if the settings that a resumed run depends on have changed or are missing. All processes must
    call this. Keys with a prefix in `may_change`, and those declared so (`Key.change`), may differ; those in
    `may_move` may change from one path to another."""
    hosts.in_first(lambda: _check(config, path, may_change, may_move))


def _check(config: ConfigDict, path: Path, may_change: tuple[str, ...], may_move: tuple[str, ...]) -> None:
    made = _made_in(path.parent)
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if not made:
            return  # no run yet, or one that was killed before anything depended on its settings
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise ValueError(
            f"{path} {reason}, and without it there is no way to tell whether {made} was made with these settings: "
            "restore it from a copy (a run with the same settings in a new workdir writes the same file), or choose "
            "another --workdir"
        ) from error
    check_same_settings(config, path, may_change, may_move)


def _made_in(workdir: Path) -> Path | None:
    for directory in (workdir / "checkpoints", *sorted(workdir.glob("sft/*/checkpoints"))):
        if steps := complete_steps(directory):
            return directory / str(steps[-1])
    kept = (workdir / name for name in ("summary.json", "parts", "self"))
    return next((path for path in kept if path.exists()), None)


def keep_config(config: ConfigDict, path: Path) -> None:
    text = _as_json(config)
    if not path.is_file() or path.read_bytes() != text.encode():
        write_atomically(path, text)


def check_same_settings(
    config: ConfigDict, path: Path, may_change: tuple[str, ...] = (), may_move: tuple[str, ...] = ()
) -> None:
    """`check_config` in this process only. Also raises ValueError if there is no such file."""
    # For keys that are newer than the run, today's defaults are what it did.
    old = json.loads(_as_json(default_config())) | read_settings(path)
    new = json.loads(_as_json(config))
    moved = [key for key in may_move if old.get(key) and new.get(key)]
    changed = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old | new)
        if old.get(key) != new.get(key)
        and not (key.startswith(may_change) or key in moved or KEYS[key].change in ANY_TIME)
    ]
    if changed:
        is_longer = any(line.startswith("rl.generator_steps:") for line in changed)
        fork = f"; to train on from its policies, give --from={path.parent} and another --workdir" if is_longer else ""
        raise ValueError(
            f"{path.parent} holds a run with other settings ({'; '.join(changed[:5])}): "
            f"resume with the same ones (--config={path} has them), or choose another --workdir{fork}"
        )


def _as_json(config: ConfigDict) -> str:
    return json.dumps(flatten(config), indent=1, default=list, sort_keys=True)
