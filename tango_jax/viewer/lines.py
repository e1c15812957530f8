"""Groups the runs of a report into the lines of its comparison: seeds of the same arm and settings are one line.

Takes runs; returns lines, labelled by what differs between them, and warnings. Files of the user that change the method
separate lines like settings. Settings that cannot change a result, such as those of the hardware and of monitoring, do
not separate lines; neither do the paths of runs to start from, but
if they lead to different ones, a warning says so.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from tango_jax.method.arms import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Look
from tango_jax.runtime.checks import cut
from tango_jax.runtime.model_text import on_one_line
from tango_jax.tracking.curves import MARKERS, label_of, looks_of
from tango_jax.tracking.known_arms import known_names
from tango_jax.tracking.provenance import method_digests
from tango_jax.tracking.run_config import ANY_PLACE, changes_results
from tango_jax.viewer.runs import Run

UNSET = "unset"  # of a setting that a run of another version lacks, and of a file that another arm brings
MAX_SHOWN = 3  # settings in a label; the table names all of them
COLOURS = (VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY, GREY)
DASHES = ("-", "--", "-.", ":")


class Line(NamedTuple):
    """Runs that differ in nothing but their seed."""

    label: str
    look: Look
    runs: tuple[Run, ...]
    settings: dict[str, str]  # those that differ between lines, as shown


def lines_of(runs: Sequence[Run], as_seed: Collection[str] = ()) -> list[Line]:
    """The lines of the comparison, known arms first. Runs of a line may also differ in the settings `as_seed`."""
    order = {arm: place for place, arm in enumerate(known_names())}
    groups: dict[tuple, list[Run]] = {}
    for run in sorted(runs, key=lambda run: order.get(run.arm, len(order))):
        groups.setdefault((run.arm, *_compared(run, as_seed).items()), []).append(run)
    settings = [dict(key[1:]) for key in groups]
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
    """Whether lines differ in a setting; in the files of an arm, lines of one arm, since others differ in its name."""
    of_arm = arms if key.startswith("arm") else [""] * len(arms)
    return len({(arm, one.get(key)) for arm, one in zip(of_arm, settings, strict=True)}) > len(set(of_arm))


def warnings(lines: Sequence[Line], as_seed: Collection[str] = ()) -> list[str]:
    """Sentences about runs of a line that are no independent repetitions, or that repeat more than one experiment."""
    return [text for line in lines
            for text in (*_equal_seeds(line, as_seed), *_other_starts(line, as_seed), *_other_sources(line))]


def _equal_seeds(line: Line, as_seed: Collection[str]) -> list[str]:
    by_draw: dict[tuple, list[Run]] = {}
    for run in line.runs:
        starts = tuple(_start(run, key) for key in ANY_PLACE)
        by_draw.setdefault((_values(run, ("seed", *as_seed)), starts), []).append(run)
    return [f"{_names(runs)} have equal settings and the same seed ({', '.join(seed)}): the line {line.label} counts "
            "one draw several times; leave out all but one of them"
            for (seed, _), runs in by_draw.items() if len(runs) > 1]  # fmt: skip


def _other_starts(line: Line, as_seed: Collection[str]) -> list[str]:
    """Results depend on the stage 1 that a run starts from. Its path alone separates no lines, because an experiment
    has one for every task.data_seed."""
    drawn_alike: dict[tuple, list[Run]] = {}
    for run in line.runs:
        drawn_alike.setdefault(_values(run, ("task.data_seed", *as_seed)), []).append(run)
    found = []
    for key in ANY_PLACE:
        if all(len({_start(run, key) for run in runs}) == 1 for runs in drawn_alike.values()):
            continue
        by_start: dict[str, list[Run]] = {}
        for run in line.runs:
            by_start.setdefault(on_one_line(_start(run, key)) or "empty", []).append(run)
        told = "; ".join(f"{start} in {_names(runs)}" for start, runs in by_start.items())
        found.append(f"the runs of the line {line.label} differ in {key}, so that its mean is not over seeds alone "
                     f"({told}): leave out all but those with the same start, or add --as_seed={key}")
    return found


def _other_sources(line: Line) -> list[str]:
    """The package itself may have been edited between two runs, which no setting shows."""
    by_source: dict[str, list[Run]] = {}
    for run in line.runs:
        for source in {attempt["source"] for attempt in run.provenance.get("attempts", ())}:
            by_source.setdefault(source, []).append(run)
    if len(by_source) < 2:
        return []
    told = "; ".join(f"{source} in {_names(runs)}" for source, runs in by_source.items())
    return [f"the runs of the line {line.label} were made with different source code of tango_jax ({told}): if a "
            "change of it concerns the method, leave out all but those with the same source"]


def _values(run: Run, keys: Collection[str]) -> tuple[str, ...]:
    return tuple(str(run.settings.get(key)) for key in keys)


def _start(run: Run, key: str) -> str:
    """The end of the path of another run: the same folder may be given as a relative or an absolute path."""
    return "/".join(PurePath(run.settings.get(key) or "").parts[-2:])


def _names(runs: Sequence[Run]) -> str:
    return " and ".join(on_one_line(run.name) for run in runs)


def _compared(run: Run, as_seed: Collection[str]) -> dict[str, str]:
    """What must be equal within a line: settings as JSON, since defaults have tuples where stored settings have lists;
    and the digests of the files that change the method."""
    files = {f"{key} file": json.dumps(digest[:8]) for key, digest in method_digests(run.provenance).items()}
    items = [(key, float(value) if type(value) is int else value) for key, value in sorted(run.settings.items())]
    return files | {key: json.dumps(value, default=list) for key, value in items
                    if changes_results(key) and key not in ("seed", "arm", *as_seed)}  # fmt: skip


def _short_name(key: str, every: Sequence[str]) -> str:
    """The shortest ending that no other setting has: `alpha_initial`, but `generator.optimizer.lr`."""
    parts = key.split(".")
    for start in range(len(parts) - 1, 0, -1):
        ending = ".".join(parts[start:])
        if sum(f".{other}".endswith(f".{ending}") for other in every) == 1:
            return ending
    return key


def _as_text(stored: str | None) -> str:
    """A setting as a label shows it: 2-6 for a range, the last part of a path."""
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
    """One label for each line: its arm, if there are several, and the settings by which it can be told apart."""
    names = list(facts[0]) if facts else []
    while len(names) > MAX_SHOWN:  # leave out what the others tell as well, or else what comes last
        redundant = [name for name in names if _tells_apart(arms, facts, [other for other in names if other != name])]
        names.remove(redundant[-1] if redundant else names[-1])
    left_out = len(facts[0]) - len(names) if facts else 0
    labels = []
    for arm, one in zip(arms, facts, strict=True):
        parts = [label_of(arm)] if len(set(arms)) > 1 or not names else []
        parts += [f"{name}={one[name]}" for name in names if not (name.startswith("arm") and one[name] == UNSET)]
        parts += [f"and {left_out} more"] * (left_out > 0)
        # The plotting library reads markup in names.
        labels.append(", ".join(parts).replace("<", "‹").replace(">", "›"))
    return [label if labels.count(label) == 1 else f"{label} ({place})" for place, label in enumerate(labels, 1)]


def _tells_apart(arms: Sequence[str], facts: Sequence[dict], names: Sequence[str]) -> bool:
    seen = {(arm, *(one[name] for name in names)) for arm, one in zip(arms, facts, strict=True)}
    return len(seen) == len(facts)


def _looks(arms: Sequence[str]) -> list[Look]:
    """The looks of the arms, or one for each line where an arm has several."""
    if len(set(arms)) == len(arms):
        return list(looks_of(arms).values())
    looks = []
    for place in range(len(arms)):
        again, index = divmod(place, len(COLOURS))
        dash = DASHES[(place + 2 * again) % len(DASHES)]  # another one when a colour comes again
        looks.append(Look(COLOURS[index], dash, list(MARKERS)[place % len(MARKERS)]))
    return looks
