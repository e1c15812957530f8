"""Families of settings: those of an experiment's grid that are alike but for some of its axes."""

from collections.abc import Callable

from tango_jax.tracking.learning_curve import Arms

Settings = dict[tuple[str, str], Arms]  # (task, setting) -> arms


def pairs_of(setting: str) -> dict[str, str]:
    """The axes of the grid in a setting's name: {"words": "16", "verifier": "strong"} for words=16,verifier=strong."""
    return dict(part.split("=", 1) for part in setting.split(",") if "=" in part)


def families(settings: Settings, is_varied: Callable[[str], bool]) -> dict[tuple[str, str], dict[str, str]]:
    """Settings that are alike but for some axes: {(task, what they have in common): {setting: what differs}}.

    Only those are returned that differ in something.
    """
    found = {}
    for task, setting in settings:
        pairs = pairs_of(setting)
        common = ",".join(f"{axis}={label}" for axis, label in pairs.items() if not is_varied(axis))
        own = ",".join(f"{axis}={label}" for axis, label in pairs.items() if is_varied(axis))
        found.setdefault((task, common), {})[setting] = own or "as configured"
    return {key: members for key, members in found.items() if len(members) > 1}


def title_of(task: str, setting: str) -> str:
    return ", ".join(filter(None, [task, setting.replace(",", ", ")]))
