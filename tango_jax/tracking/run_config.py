"""The settings of a run, which its workdir keeps in config.json: written once, and compared when the run is resumed.

In: the configuration and the path of config.json. Out: the file, or one error that names the settings that differ.
"""

import json
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.config import default_config, flatten
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.manifest import complete_steps

# A run may go on on other machines: these change no result beyond rounding.
ANY_HARDWARE = (
    "compile_cache", "distributed.", "generator.mesh.", "verifier.mesh.", "generator.model.attention",
    "verifier.model.attention",
)  # fmt: skip
# Another run's workdir may have moved, as it does with an ablation that goes on on another machine: the checkpoint of
# stage 2 knows the bits of the parameters that it started from, and without one nothing depends on them yet.
ANY_PLACE = ("generator.init_from", "verifier.init_from")
# A run may be watched otherwise: these change no result at all.
ANY_WATCHING = ("loggers.", "alarms.", "rollouts.")


def save_config(config: ConfigDict, path: Path, may_change: tuple[str, ...] = ()) -> None:
    """`check_config`, then `keep_config`: where the next thing that is written depends on the settings.

    The first process does; all of them must call it.

    Raises:
        ValueError: see `check_config`; or the file cannot be written.
    """
    check_config(config, path, may_change)
    hosts.in_first(lambda: keep_config(config, path))


def check_config(
    config: ConfigDict, path: Path, may_change: tuple[str, ...] = (), may_move: tuple[str, ...] = ()
) -> None:
    """Insist that nothing differs that a resumed run depends on, before any work; nothing is written.

    Keys that start with one of `may_change`, of ANY_HARDWARE or of ANY_WATCHING, are free to differ; those of
    `may_move` from one path to another, for a caller that compares the contents.

    The first process does; all of them must call it.

    Raises:
        ValueError: the run in this folder was made with other settings (names them), or its settings are gone.
    """
    hosts.in_first(lambda: _check(config, path, may_change, may_move))


def _check(config: ConfigDict, path: Path, may_change: tuple[str, ...], may_move: tuple[str, ...]) -> None:
    made = _made_in(path.parent)
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if not made:
            return  # no run yet; or one that was killed before there was anything that its settings matter to
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise ValueError(
            f"{path} {reason}, and without it nobody can tell whether {made} was made with these settings: put back a "
            "copy (a run of the same settings in a new workdir writes the same file), or choose another --workdir"
        ) from error
    check_same_settings(config, path, may_change, may_move)


def _made_in(workdir: Path) -> Path | None:
    """Something in a workdir that a run of other settings must not go on from; None: nothing."""
    for directory in (workdir / "checkpoints", *sorted(workdir.glob("sft/*/checkpoints"))):
        if steps := complete_steps(directory):
            return directory / str(steps[-1])
    return next((path for path in (workdir / "summary.json", workdir / "parts") if path.exists()), None)


def keep_config(config: ConfigDict, path: Path) -> None:
    """Write the settings of a run, unless the file holds them already. Raises OSError."""
    text = _as_json(config)
    if not path.is_file() or path.read_bytes() != text.encode():
        write_atomically(path, text)


def check_same_settings(
    config: ConfigDict, path: Path, may_change: tuple[str, ...] = (), may_move: tuple[str, ...] = ()
) -> None:
    """See `check_config`; also raises ValueError where there is no such file, and runs in this process alone."""
    try:
        # Keys that the version which began the run did not have yet: their defaults are what it did.
        old = json.loads(_as_json(default_config())) | json.loads(path.read_text())
        new = json.loads(_as_json(config))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give the workdir of a run") from error
    moved = [key for key in may_move if old.get(key) and new.get(key)]
    changed = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old | new)
        if old.get(key) != new.get(key)
        and not key.startswith((*may_change, *ANY_HARDWARE, *ANY_WATCHING))
        and key not in moved
    ]
    if changed:
        raise ValueError(
            f"{path.parent} holds a run with other settings ({'; '.join(changed[:5])}): "
            "resume with the same ones, or choose another --workdir"
        )


def _as_json(config: ConfigDict) -> str:
    return json.dumps(flatten(config), indent=1, default=list, sort_keys=True)
