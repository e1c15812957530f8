"""Runs as the lines of a comparison, and warnings about runs that do not compare.

Seeds of the same arm and settings are one line, labelled by what differs between lines. Settings that cannot change a
result do not separate lines. Paths of starting runs do not either: a warning says if they lead to different runs.
"""

import functools
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from tango_jax.config import ROLES
from tango_jax.method.arms import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Look
from tango_jax.runtime.checks import cut
from tango_jax.runtime.model_text import on_one_line
from tango_jax.tracking import curves
from tango_jax.tracking.evaluations import adapters_are_trained, short_adapter
from tango_jax.tracking.known_arms import known_names, record_of
from tango_jax.tracking.provenance import method_digests, weights_digest
from tango_jax.tracking.run_config import ANY_PLACE, ENDING, changes_results
from tango_jax.viewer.runs import Run
from tango_jax.weights.workdir import BASE

UNSET = "unset"  # a setting unknown to a run's version, or a file of another arm
MAX_SHOWN = 3  # settings in a label; the table names all
COLOURS = (VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY, GREY)
DASHES = ("-", "--", "-.", ":")


class Line(NamedTuple):
    label: str
    look: Look
    runs: tuple[Run, ...]
    settings: dict[str, str]  # that differ between lines, as shown


def lines_of(runs: Sequence[Run], as_seed: Collection[str] = ()) -> list[Line]:
    """Known arms first. Runs of a line may also differ in the settings `as_seed`."""
    order = {arm: place for place, arm in enumerate(known_names())}
    known_first = sorted(runs, key=lambda run: order.get(run.arm, len(order)))
    groups = _grouped(known_first, lambda run: (run.arm, *_compared(run, as_seed).items()))
    settings = [dict(key[1:]) for key in groups]
    # What ends some of the runs is told of the others as well.
    ending = [key for key in ENDING if any(key in one for one in settings)]
    for one, found in zip(settings, groups.values(), strict=True):
        one.update((key, _stored(found[0].settings[key])) for key in ending if key in found[0].settings)
    every = sorted({key for one in settings for key in one})
    arms = [key[0] for key in groups]
    differing = [key for key in every if _tells(key, arms, settings)]
    shown = {key: _short_name(key, every) for key in differing}
    members = list(groups.values())
    facts = [{shown[key]: _as_text(one.get(key)) for key in differing} for one in settings]
    labels = _labels([found[0].arm for found in members], facts)
    looks = _looks([found[0].arm for found in members])
    return [Line(*parts) for parts in zip(labels, looks, map(tuple, members), facts, strict=True)]


def _tells(key: str, arms: Sequence[str], settings: Sequence[dict[str, str]]) -> bool:
    """Whether lines differ in a setting. An arm's file separates its own lines; one policy's adapter separates none."""
    told = [(arm if key.startswith("arm") else "", one.get(key)) for arm, one in zip(arms, settings, strict=True)
            if key != "verifier.adapter" or not _is_one_policy(arm)]
    return len(set(told)) > len({arm for arm, _ in told})


def _is_one_policy(arm: str) -> bool:
    return bool((record := record_of(arm)) and record.is_one_policy)


def warnings(lines: Sequence[Line], as_seed: Collection[str] = ()) -> list[str]:
    runs = [run for line in lines for run in line.runs]
    told = [text for line in lines for text in (*_equal_seeds(line, as_seed), *_other_starts(line, as_seed))]
    return told + _no_pairs(runs, as_seed) + _other_weights(runs) + _other_sources(runs)


def _equal_seeds(line: Line, as_seed: Collection[str]) -> list[str]:
    def draw_of(run: Run) -> tuple:
        return _values(run, ("seed", *as_seed)), tuple(_start(run, key) for key in ANY_PLACE)

    return [f"{_names(runs)} have equal settings and the same seed ({', '.join(seed)}): the line {line.label} counts "
            "one draw several times; leave out all but one of them"
            for (seed, _), runs in _grouped(line.runs, draw_of).items() if len(runs) > 1]


def _other_starts(line: Line, as_seed: Collection[str]) -> list[str]:
    drawn_alike = _grouped(line.runs, lambda run: _values(run, ("task.data_seed", *as_seed)))
    found = []
    for key in ANY_PLACE:
        if all(len({_start(run, key) for run in runs}) == 1 for runs in drawn_alike.values()):
            continue
        by_start = _grouped(line.runs, lambda run, key=key: on_one_line(_start(run, key)) or "empty")
        told = "; ".join(f"{start} in {_names(runs)}" for start, runs in by_start.items())
        found.append(f"the runs of the line {line.label} differ in {key}, so its mean is not over seeds alone "
                     f"({told}): leave out all but those with the same start, or add --as_seed={key}")
    return found


def _no_pairs(runs: Sequence[Run], as_seed: Collection[str]) -> list[str]:
    """Runs of one draw that started from other weights, as one policy and two do, or had other problems."""
    found = {}
    for same in _grouped(runs, lambda run: _values(run, ("task.name", "task.data_seed", "seed", *as_seed))).values():
        for name, what in (*((role, f"other weights of the {role}") for role in ROLES),
                           ("problems", "other problems or prompts")):
            begun = [run for run in same if name in run.start and (name != "verifier" or _uses_verifier(run))]
            groups = _grouped(begun, functools.partial(_began_with, name))
            if len(groups) > 1:
                found.setdefault(what, "; ".join(map(_names, groups.values())))
    return [f"runs of the same start and seed began with {what} ({names}), and are no pairs: compare each with runs "
            "that start as it does" for what, names in found.items()]


def _began_with(name: str, run: Run) -> str:
    is_whole = adapters_are_trained(run.settings)
    return run.start[name] if is_whole else run.start.get(f"{name}{BASE}", run.start[name])


def _other_weights(runs: Sequence[Run]) -> list[str]:
    """Runs whose checkpoints had one name and held different weights of a role. A verifier that an arm does not use is
    compared within the arm, and one policy has the generator's weights."""
    found = {}
    for number, role in enumerate(ROLES):
        begun = {run.name: weights_digest(run.provenance).split("/")[number] for run in runs
                 if weights_digest(run.provenance) and (role == "generator" or not (
                     _is_one_policy(run.arm) or run.settings.get("verifier.adapter") == "generator"))}
        by_weights = _grouped([run for run in runs if begun.get(run.name)], lambda run, role=role, begun=begun: (
            begun[run.name], role == "verifier" and not _uses_verifier(run) and run.arm,
            *(_start(run, key) for key in ANY_PLACE)))
        for keys in _grouped(by_weights, lambda key: key[1:]).values():
            if len(keys) > 1:
                found["; ".join(_names(by_weights[key]) for key in keys)] = None
    return [f"runs name the same checkpoints, which held different weights ({names}): leave out all but those with the "
            "same weights" for names in found]


def _uses_verifier(run: Run) -> bool:
    return (record := record_of(run.arm)) is None or record.uses_verifier


def _other_sources(runs: Sequence[Run]) -> list[str]:
    by_source: dict[str, list[Run]] = {}
    for run in runs:
        for source in {attempt["source"] for attempt in run.provenance.get("attempts", ())}:
            by_source.setdefault(source, []).append(run)
    if len(by_source) < 2:
        return []
    told = "; ".join(f"{source} in {_names(runs)}" for source, runs in by_source.items())
    return [f"the runs were made with different source code of tango_jax ({told}): if the change concerns the "
            "method, leave out all but those with the same source"]


def _grouped(runs: Iterable[Run], key_fn: Callable[[Run], Any]) -> dict[Any, list[Run]]:
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(key_fn(run), []).append(run)
    return groups


def _values(run: Run, keys: Collection[str]) -> tuple[str, ...]:
    return tuple(str(run.settings.get(key)) for key in keys)


def _start(run: Run, key: str) -> str:
    """The end of the path of another run: one folder has relative and absolute paths."""
    parts = PurePath(run.settings.get(key) or "").parts
    return "/".join(parts[-3 if parts[-2:-1] == ("stage_one",) else -2 :])  # every grid has a stage_one/shared


def _names(runs: Sequence[Run]) -> str:
    return " and ".join(on_one_line(run.name) for run in runs)


def _compared(run: Run, as_seed: Collection[str]) -> dict[str, str]:
    """What is equal within a line: settings, as JSON, and digests of the files that change the method."""
    files = {f"{key} file": json.dumps(digest[:8]) for key, digest in method_digests(run.provenance).items()}
    short = {f"{role}.adapter": short_adapter(run.settings.get(f"{role}.adapter", "")) for role in ROLES}
    if _is_one_policy(run.arm):
        short["verifier.adapter"] = ""
    settings = sorted((run.settings | short).items())
    return files | {key: _stored(value) for key, value in settings
                    if changes_results(key, run.settings) and key not in ("seed", "arm", *as_seed)}


def _stored(value: Any) -> str:
    return json.dumps(float(value) if type(value) is int else value, default=list)


def _short_name(key: str, every: Sequence[str]) -> str:
    """The shortest ending that no other setting has: `alpha_initial`, but `generator.optimizer.lr`."""
    parts = key.split(".")
    for start in range(len(parts) - 1, 0, -1):
        ending = ".".join(parts[start:])
        if sum(f".{other}".endswith(f".{ending}") for other in every) == 1:
            return ending
    return key


def _as_text(stored: str | None) -> str:
    if stored is None:
        return UNSET
    return cut(on_one_line(_words(json.loads(stored))), 40)


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list):
        return "-".join(map(_words, value)) or "none"
    if isinstance(value, str):
        return PurePath(value).name or "none"
    return str(value)


def _labels(arms: Sequence[str], facts: Sequence[dict[str, str]]) -> list[str]:
    """The arm of each line, if there are several, and the settings that tell it apart."""
    names = list(facts[0]) if facts else []
    while len(names) > MAX_SHOWN:  # leave out what the others tell as well, or else what comes last
        redundant = [name for name in names if len(facts) == len({
            (arm, *(one[other] for other in names if other != name)) for arm, one in zip(arms, facts, strict=True)})]
        names.remove(redundant[-1] if redundant else names[-1])
    labels = []
    for arm, one in zip(arms, facts, strict=True):
        parts = [curves.label_of(arm)] if len(set(arms)) > 1 or not names else []
        parts += [f"{name}={one[name]}" for name in names if not (name.startswith("arm") and one[name] == UNSET)]
        labels.append(", ".join(parts).replace("<", "‹").replace(">", "›"))
    return [label if labels.count(label) == 1 else f"{label} ({place})" for place, label in enumerate(labels, 1)]


def _looks(arms: Sequence[str]) -> list[Look]:
    """The looks of the arms, or one for each line where an arm has several."""
    if len(set(arms)) == len(arms):
        return list(curves.looks_of(arms).values())
    looks = []
    for place in range(len(arms)):
        again, index = divmod(place, len(COLOURS))
        dash = DASHES[(place + 2 * again) % len(DASHES)]  # another one when a colour comes again
        looks.append(Look(COLOURS[index], dash, list(curves.MARKERS)[place % len(curves.MARKERS)]))
    return looks
