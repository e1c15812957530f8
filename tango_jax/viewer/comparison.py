"""The comparison of several runs: panels that overlay them, a table and warnings.

Seeds of the same arm and settings are one line, labelled by what differs between lines. Settings that cannot change a
result do not separate lines. Paths of starting runs do not either: a warning says if they lead to different runs.
"""

import functools
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from tango_jax.config import ROLES
from tango_jax.method.arms import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Look
from tango_jax.runtime.checks import cut
from tango_jax.runtime.model_text import on_one_line
from tango_jax.tracking import curves
from tango_jax.tracking.curves import SCORES, Series, series
from tango_jax.tracking.evaluations import adapters_are_trained, short_adapter
from tango_jax.tracking.known_arms import known_names, record_of
from tango_jax.tracking.provenance import method_digests, weights_digest
from tango_jax.tracking.run_config import ANY_PLACE, changes_results
from tango_jax.viewer.charts import FIRST_TRIES, OF_MARKS, own_rewards_in
from tango_jax.viewer.panels import band, line, panel, with_content
from tango_jax.viewer.runs import Run
from tango_jax.weights.workdir import BASE

UNSET = "unset"  # a setting unknown to a run's version, or a file of another arm
MAX_SHOWN = 3  # settings in a label; the table names all
COLOURS = (VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY, GREY)
DASHES = ("-", "--", "-.", ":")
MAX_POINTS = 150  # of a curve that has one for every turn
STEP_F1, FIRST_ERROR_F1 = "verifier/pool/step_f1", "verifier/pool/first_error_f1"
SOME_STOP = ("Some of these verifiers stop at the first error (verifier.stop_at_first_error): the first-error F1 takes "
             "the place of the step F1, which counts the steps that these leave out as missed.")
OVER_SEEDS = "Mean over seeds; the band spans the lowest to the highest seed."
JUDGED = "In the verifier's turns, on the solutions that each run draws or chooses (no_labels, rl.practice)."
GENERATOR, VERIFIER = {"generator"}, {"warmup", "verifier"}  # phases in which a role is updated
OVERLAYS = (
    ("Generator: share of correct answers, sampled", "In training, on the problems that each arm draws.",
     "generator/reward/outcome", GENERATOR, True),
    ("Generator: entropy", "Nats per token.", "generator/entropy", GENERATOR, False),
    ("Verifier: entropy", f"Nats per token. {OF_MARKS}", "verifier/entropy", VERIFIER, False),
    ("Generator: KL to the reference", "Nats per token.", "generator/kl", GENERATOR, False),
    ("Verifier: KL to the reference", f"Nats per token. {OF_MARKS}", "verifier/kl", VERIFIER, False),
    ("Verdicts that agree with the grader", JUDGED, "verifier/reward/correctness", VERIFIER, True),
    ("Verdicts that are CORRECT", JUDGED, "verifier/rate_correct", VERIFIER, True),
    ("Verdicts that are INVALID", JUDGED, "verifier/rate_invalid", VERIFIER, True),
    ("Generator: response length", "Mean number of sampled tokens.", "generator/length_mean", GENERATOR, False),
    ("Verifier: response length", "Mean number of sampled tokens.", "verifier/length_mean", VERIFIER, False),
)


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
                           ("problems", "other files of problems")):
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
    items = [(key, float(value) if type(value) is int else value) for key, value in settings]
    return files | {key: json.dumps(value, default=list) for key, value in items
                    if changes_results(key, run.settings) and key not in ("seed", "arm", *as_seed)}


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


def comparison(lines: Sequence[Line], as_seed: Collection[str] = ()) -> dict:
    """{"scores": panels over evaluations, "turns": panels over turns, "table": the last evaluation of every line}."""
    scores, turns = [], []
    over_seeds_caption = OVER_SEEDS if _have_seeds(lines) else "One seed of each."
    for title, name in _scores(lines).items():
        some_stop = f" {SOME_STOP}" * (name == FIRST_ERROR_F1)
        caption = f"{over_seeds_caption} Greedy. Negative steps are the warm-up.{some_stop}"
        traces = _traces(lines, lambda runs, name=name: curves.over_seeds([run.rows for run in runs], name), line)
        scores.append(panel(title, caption, traces, "generator step", score=True))
    for title, caption, name, phases, is_share in (*OVERLAYS, *_own_rewards(lines)):
        # Arms without a verifier have fewer turns, but the same generator steps.
        x_name, x = ("generator_step", "generator step") if phases == GENERATOR else ("step", "turn (both roles)")
        traces = _traces(lines, lambda runs, at=(phases, x_name, name): _of_turns(runs, *at), _plain)
        caption = f"{caption} Running mean. {over_seeds_caption}"
        turns.append(panel(title, caption, traces, x, score=is_share))
    return {"scores": with_content(scores), "turns": with_content(turns), "table": table(lines, as_seed)}


def _scores(lines: Sequence[Line]) -> dict[str, str]:
    """SCORES, in which step F1 gives way to first-error F1 where some of the verifiers that have it stop there."""
    measured = [run for item in lines for run in item.runs if any(row.get(STEP_F1) is not None for row in run.rows)]
    if len({bool(run.settings.get("verifier.stop_at_first_error")) for run in measured}) < 2:
        return SCORES
    return {title.replace("step F1", "first-error F1"): FIRST_ERROR_F1 if name == STEP_F1 else name
            for title, name in SCORES.items()}


def _own_rewards(lines: Sequence[Line]) -> list[tuple[str, str, str, Collection[str], bool]]:
    """As OVERLAYS: one for each function."""
    names = own_rewards_in(row for item in lines for run in item.runs for row in run.rows)
    return [(f"{role.capitalize()}: own reward {name}",
             f"Mean of the function that {role}.rewards names. {FIRST_TRIES}", metric,
             GENERATOR if role == "generator" else VERIFIER, False) for metric, (role, name) in names.items()]


def table(lines: Sequence[Line], as_seed: Collection[str] = ()) -> dict | None:
    rows, scores = [], {title.partition(": ")[2]: name for title, name in _scores(lines).items()}  # column -> score
    for item in lines:
        last = _last_common(item.runs)
        found = {column: [row[name] for row in last if row.get(name) is not None] for column, name in scores.items()}
        seeds = ", ".join(_seed(run, ("seed", *as_seed)) for run in item.runs)
        at = str(last[0].get("generator_step", "")) if last else ""
        rows.append((item.label, seeds, at, {column: _shown(values) for column, values in found.items()}))
    columns = [column for column in scores if any(shown[column] for *_, shown in rows)]
    if not columns:
        return None
    differing = list(lines[0].settings)
    kinds = "/".join(["seeds" if _have_seeds(lines) else "seed", *as_seed])
    head = ["runs", kinds, "generator step", *columns, *differing]
    body = [[*facts, *(shown[column] for column in columns), *(item.settings[key] for key in differing)]
            for (*facts, shown), item in zip(rows, lines, strict=True)]
    means = ": mean over seeds, with each seed in brackets" if _have_seeds(lines) else ""
    caption = f"Last evaluation that all runs of a row have, greedy{means}; and the settings that differ."
    caption += f" {SOME_STOP}" * (FIRST_ERROR_F1 in map(scores.get, columns))
    if len({at for _, _, at, _ in rows if at}) > 1:
        caption += " The rows end at different generator steps: compare the curves where they overlap, not the rows."
    return {"caption": caption, "head": head, "rows": body}


def _seed(run: Run, keys: Collection[str]) -> str:
    seed = "/".join(str(run.settings.get(key, "unset")) for key in keys)
    return seed if any(row["phase"] == "eval" for row in run.rows) else f"{seed} (not evaluated yet)"


def _last_common(runs: Sequence[Run]) -> list[dict]:
    """The evaluation of each run at the last turn at which all that have any were evaluated."""
    evaluated = [{row["step"]: row for row in run.rows if row["phase"] == "eval"} for run in runs]
    evaluated = [found for found in evaluated if found]
    common = set.intersection(*map(set, evaluated)) if evaluated else set()
    return [found[max(common)] for found in evaluated] if common else []


def _have_seeds(lines: Sequence[Line]) -> bool:
    return any(len(item.runs) > 1 for item in lines)


def _shown(seeds: list[float]) -> str:
    if not seeds:
        return ""
    each = f" ({', '.join(f'{value:.2f}' for value in seeds)})" if len(seeds) > 1 else ""
    return f"{sum(seeds) / len(seeds):.3f}{each}"


def _traces(
    lines: Iterable[Line], values_fn: Callable[[Sequence[Run]], tuple[np.ndarray, np.ndarray]], draw_fn: Callable
) -> list[dict]:
    """The mean of each line and the band of its seeds. `values_fn`: runs -> x values, and [seed, point] there."""
    bands, means = [], []
    for rank, item in enumerate(lines):
        x, values = values_fn(item.runs)
        if not x.size:
            continue
        look = item.look
        if len(values) > 1:
            bands += band(Series(x, values.min(0)), Series(x, values.max(0)), look.colour)
        curve = draw_fn(item.label, Series(x, values.mean(0)), look.colour, look.dash, look.marker)
        means = [trace | {"legendrank": rank} for trace in curve] + means  # the first line is drawn last, on top
    return bands + means


def _of_turns(
    runs: Sequence[Run], phases: Collection[str], x_name: str, name: str
) -> tuple[np.ndarray, np.ndarray]:
    found = [series(run.rows, phases, x_name, name) for run in runs]
    x, values = curves.at_common_x(Series(curve.x, curves.smooth(curve.y)) for curve in found if curve.x.size)
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), MAX_POINTS)).round().astype(int))
    return x[kept], values[:, kept]


def _plain(name: str, curve: Series, colour: str, style: str, symbol: str) -> list[dict]:
    (trace,) = line(name, curve, colour, style, symbol)
    every = max(1, len(curve.x) // 10)
    trace["marker"] |= {"size": [7 if place % every == 0 else 0 for place in range(len(curve.x))]}
    return [trace]
