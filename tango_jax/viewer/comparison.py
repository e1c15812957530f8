"""The comparison of several runs: panels that overlay their lines, and a table."""

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from tango_jax.tracking import curves
from tango_jax.tracking.curves import SCORES, Series, series
from tango_jax.viewer.charts import FIRST_TRIES, NATS, OF_MARKS, SAMPLED, own_rewards_in
from tango_jax.viewer.lines import Line
from tango_jax.viewer.panels import band, line, panel, with_content
from tango_jax.viewer.runs import Run

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
    ("Generator: entropy", NATS, "generator/entropy", GENERATOR, False),
    ("Verifier: entropy", f"{NATS} {OF_MARKS}", "verifier/entropy", VERIFIER, False),
    ("Generator: KL to the reference", NATS, "generator/kl", GENERATOR, False),
    ("Verifier: KL to the reference", f"{NATS} {OF_MARKS}", "verifier/kl", VERIFIER, False),
    ("Verdicts that agree with the grader", JUDGED, "verifier/reward/correctness", VERIFIER, True),
    ("Verdicts that are CORRECT", JUDGED, "verifier/rate_correct", VERIFIER, True),
    ("Verdicts that are INVALID", JUDGED, "verifier/rate_invalid", VERIFIER, True),
    ("Generator: response length", SAMPLED, "generator/length_mean", GENERATOR, False),
    ("Verifier: response length", SAMPLED, "verifier/length_mean", VERIFIER, False),
)


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
