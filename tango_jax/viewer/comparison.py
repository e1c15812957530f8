"""The comparison of several runs: takes lines (lines.py), returns panels that overlay them, and a table."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.tracking.curves import SCORES, Series, at_common_x, over_seeds, series, smooth
from tango_jax.tracking.intervals import wilson
from tango_jax.viewer.lines import Line
from tango_jax.viewer.panels import band, line, panel, with_content
from tango_jax.viewer.runs import Run

MAX_LINES = 8  # in one panel; the cells of a grid with more of them have panels of their own
MAX_POINTS = 150  # of a curve that has one for every turn
TABLE = {title.partition(": ")[2]: name for title, name in SCORES.items()}  # column -> score
OVER_SEEDS = "Mean over seeds; the band spans the lowest to the highest seed."


class Overlay(NamedTuple):
    """A metric of every turn."""

    title: str
    caption: str
    name: str
    phases: set[str]
    is_share: bool = False

    @property
    def x(self) -> str:
        # Arms without a verifier have fewer turns, but the same generator steps.
        return "generator_step" if self.phases == GENERATOR else "step"


GENERATOR, VERIFIER = {"generator"}, {"warmup", "verifier"}  # phases in which a role is updated
OVERLAYS = (
    Overlay("Generator: share of correct answers, sampled", "In training, on the problems that each arm draws.",
            "generator/reward/outcome", GENERATOR, True),
    Overlay("Generator: own reward", "Mean of the function that generator.reward names.", "generator/reward/own",
            GENERATOR),
    Overlay("Verifier: own reward", "Mean of the function that verifier.reward names.", "verifier/reward/own",
            VERIFIER),
    Overlay("Generator: entropy", "Nats per token.", "generator/entropy", GENERATOR),
    Overlay("Verifier: entropy", "Nats per token.", "verifier/entropy", VERIFIER),
    Overlay("Generator: KL to the reference", "Nats per token.", "generator/kl", GENERATOR),
    Overlay("Verifier: KL to the reference", "Nats per token.", "verifier/kl", VERIFIER),
    Overlay("Verdicts that agree with the grader", "In the verifier's turns.", "verifier/reward/correctness", VERIFIER,
            True),
    Overlay("Verdicts that are CORRECT", "In the verifier's turns.", "verifier/rate_correct", VERIFIER, True),
    Overlay("Verdicts that are CORRECT, generator's turns", "On the solutions that are rewarded.",
            "verifier/live_rate_correct", GENERATOR, True),
    Overlay("Verdicts that are INVALID", "In the verifier's turns.", "verifier/rate_invalid", VERIFIER, True),
    Overlay("Generator: response length", "Mean number of sampled tokens.", "generator/length_mean", GENERATOR),
    Overlay("Verifier: response length", "Mean number of sampled tokens.", "verifier/length_mean", VERIFIER),
)  # fmt: skip


def comparison(lines: Sequence[Line], as_seed: Collection[str] = ()) -> dict:
    """{"scores": panels over evaluations, "turns": panels over turns, "table": the last evaluation of every line}.

    `as_seed` are settings in which runs of a line may differ, besides the seed.
    """
    scores, turns = [], []
    over_seeds_caption = OVER_SEEDS if _have_seeds(lines) else "One seed of each."
    for cell, members in _by_cell(lines).items():
        for title, name in SCORES.items():
            caption = f"{over_seeds_caption} Greedy. Negative steps are the warm-up."
            traces = _traces(members, lambda runs, name=name: over_seeds([run.rows for run in runs], name), line)
            scores.append(panel(_in_cell(title, cell), caption, traces, "generator step", score=True))
        for item in OVERLAYS:
            x = "generator step" if item.x == "generator_step" else "turn (both roles)"
            traces = _traces(members, lambda runs, item=item: _of_turns(runs, item), _plain)
            caption = f"{item.caption} Running mean. {over_seeds_caption}"
            turns.append(panel(_in_cell(item.title, cell), caption, traces, x, score=item.is_share))
    return {"scores": with_content(scores), "turns": with_content(turns), "table": table(lines, as_seed)}


def table(lines: Sequence[Line], as_seed: Collection[str] = ()) -> dict | None:
    """The last evaluation that all seeds of a line have: its problems; the mean, with the value of each seed in
    brackets or, of a single run's accuracy, its 95 % interval; and what differs."""
    rows = []
    for item in lines:
        last = _last_common(item.runs)
        found = {column: [row[name] for row in last if row.get(name) is not None] for column, name in TABLE.items()}
        keys = ("seed", *as_seed)
        seeds = ", ".join(_seed(run, keys) for run in item.runs)
        at = str(last[0].get("generator_step", "")) if last else ""
        counts = [row.get("generator/problems") for row in last]
        shown = {column: _shown(values) for column, values in found.items()}
        if len(last) == 1 and counts[0] and found["accuracy"]:
            low, high = wilson(found["accuracy"][0], counts[0])
            shown["accuracy"] += f" [{low:.2f}, {high:.2f}]"
        shown["problems"] = "/".join(str(count) for count in dict.fromkeys(counts) if count)
        rows.append((item.label, seeds, at, shown, item.settings))
    columns = [column for column in ("problems", *TABLE) if any(shown[column] for *_, shown, _ in rows)]
    if not columns:
        return None
    differing = list(lines[0].settings)
    kinds = "/".join(["seeds" if _have_seeds(lines) else "seed", *as_seed])
    head = ["runs", kinds, "generator step", *columns, *differing]
    body = [[*facts, *(shown[column] for column in columns), *(settings[key] for key in differing)]
            for *facts, shown, settings in rows]  # fmt: skip
    means = ": mean over seeds, with each seed in brackets" if _have_seeds(lines) else ""
    caption = (f"Last evaluation that all runs of a row have, greedy{means}; [95 % interval] of a run's accuracy "
               "over its problems; and the settings that differ.")  # fmt: skip
    if len({at for _, _, at, *_ in rows if at}) > 1:
        caption += " The rows end at different generator steps: compare the curves where they overlap, not the rows."
    return {"caption": caption, "head": head, "rows": body}


def _seed(run: Run, keys: Collection[str]) -> str:
    """The seed of a run, marked if the run is not in its line's mean."""
    seed = "/".join(str(run.settings.get(key, "unset")) for key in keys)
    return seed if any(row["phase"] == "eval" for row in run.rows) else f"{seed} (not evaluated yet)"


def _last_common(runs: Sequence[Run]) -> list[dict]:
    """The evaluation of each run at the last turn at which all of those that have any were evaluated."""
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


def _by_cell(lines: Sequence[Line]) -> dict[str, Sequence[Line]]:
    """All lines together; or, if they are too many for a panel, those of each cell of a grid."""
    if len(lines) <= MAX_LINES:
        return {"": lines}
    by_cell: dict[str, list[Line]] = {}
    for item in lines:
        cells = sorted({run.cell for run in item.runs})
        by_cell.setdefault(" and ".join(filter(None, cells)), []).append(item)
    return by_cell


def _in_cell(title: str, cell: str) -> str:
    return f"{title} ({cell})" if cell else title


def _traces(
    lines: Iterable[Line], values_fn: Callable[[Sequence[Run]], tuple[np.ndarray, np.ndarray]], draw_fn: Callable
) -> list[dict]:
    """The mean of each line and the band of its seeds. `values_fn`: runs -> x values, and [seed, point] there."""
    bands, curves = [], []
    for rank, item in enumerate(lines):
        x, values = values_fn(item.runs)
        if not x.size:
            continue
        look = item.look
        if len(values) > 1:
            bands += band(Series(x, values.min(0)), Series(x, values.max(0)), look.colour)
        curve = draw_fn(item.label, Series(x, values.mean(0)), look.colour, look.dash, look.marker)
        curves = [trace | {"legendrank": rank} for trace in curve] + curves  # the first line is drawn last, on top
    return bands + curves


def _of_turns(runs: Sequence[Run], item: Overlay) -> tuple[np.ndarray, np.ndarray]:
    found = [series(run.rows, item.phases, item.x, item.name) for run in runs]
    x, values = at_common_x(Series(curve.x, smooth(curve.y)) for curve in found if curve.x.size)
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), MAX_POINTS)).round().astype(int))
    return x[kept], values[:, kept]


def _plain(name: str, curve: Series, colour: str, style: str, symbol: str) -> list[dict]:
    """A curve of many points, with a few markers that tell it from others in print."""
    (trace,) = line(name, curve, colour, style, symbol)
    every = max(1, len(curve.x) // 10)
    trace["marker"] |= {"size": [7 if place % every == 0 else 0 for place in range(len(curve.x))]}
    return [trace]
