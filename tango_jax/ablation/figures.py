"""The figures of an experiment, from the rows of its table alone; PNG files.

    what_it_bought.png            accuracy of every arm over generator steps and over sampled tokens, and what the
                                  method is ahead of the baseline, in one setting
    curves_<task>_<setting>.png   the same over minutes of training as well, for every setting
    map.png                       generator steps to LEVEL against the share of right answers at the start, of several
                                  settings; where some runs did not get there, the point is hollow, since the mean is a
                                  lower bound, and says how many did
    along_<axis>.png              mean accuracy against an axis of the grid that has four numbers or more; an arm of a
                                  setting without that axis is a line across the panel

In the last two, all runs of a task are cut to the generator steps that all of them have.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tango_jax.ablation.summary import difference_text, heading, in_order, outcome_only, sampled_at_start, title_of
from tango_jax.method.arms import DEFAULT_ARM, GREY, Look
from tango_jax.runtime.checks import one_of
from tango_jax.tracking.curves import MARKERS, Series, label_of, looks_of
from tango_jax.tracking.evaluations import Evaluation
from tango_jax.tracking.intervals import MIN_FOR_INTERVAL, estimate, has_interval
from tango_jax.tracking.learning_curve import (
    LEVEL,
    Arms,
    Band,
    Curves,
    Pairs,
    Settings,
    band_of_difference,
    band_of_values,
    band_over,
    band_over_steps,
    curves_by_setting,
    mean_accuracy,
    measured,
    over_same_steps,
    pairs_of,
    steps_to,
    trains_generator,
)
from tango_jax.tracking.plots import (
    HEIGHT,
    OVER,
    WIDTH,
    add_legend,
    draw_band,
    draw_line,
    make_figure,
    make_grid,
    save_figure,
    style,
    style_accuracy,
)

LEAST = 4  # numbers of an axis
NUMBER = re.compile(r"[+-]?\d*\.?\d+(e[+-]?\d+)?")  # a label that is one
DASHES = ("-", "--", ":", "-.")
Key = tuple[str, str]  # an arm, and its setting or a part of that
Points = list[tuple[float, Curves]]  # of an arm, at numbers


def draw_figures(rows: Sequence[Evaluation], folder: Path, setting: str = "") -> list[Path]:
    """Draw all figures that the rows allow. Returns their files.

    Args:
        setting: of `what_it_bought`; empty: the one with the most runs.

    Raises:
        ValueError: there is no such setting.
    """
    settings = learning(rows)
    if setting:
        one_of("--setting", setting, [name for _, name in settings])
    files = []

    def save(name: str, figure: Figure | None) -> None:
        if figure is not None:
            files.append(folder / f"{name}.png")
            save_figure(figure, files[-1])

    candidates = {key: arms for key, arms in settings.items() if not setting or key[1] == setting}
    if candidates:
        chosen = max(candidates, key=lambda key: sum(map(len, candidates[key].values())))
        save("what_it_bought", _curves(*chosen, candidates[chosen], ("steps", "tokens"), is_compared=True))
    for (task, name), arms in settings.items():
        save("_".join(filter(None, ["curves", _file_name(task), name])),
             _curves(task, name, arms, ("steps", "tokens", "seconds")))
    save("map", _draw_map(settings))
    has_tasks = len({task for task, _ in settings}) > 1
    for task, axis, figure in _draw_along(settings):
        save("_".join(["along", *[_file_name(task)] * has_tasks, _file_name(axis)]), figure)
    return files


def learning(rows: Sequence[Evaluation]) -> Settings:
    """The arms of every setting whose generator learns, and has made a step."""
    settings = {
        key: {arm: arms[arm] for arm in in_order(arms)
              if trains_generator(arm) and all(curve.last_step > 0 for curve in arms[arm].values())}
        for key, arms in curves_by_setting(rows).items()
    }  # fmt: skip
    return {key: arms for key, arms in settings.items() if arms}


def _curves(task: str, setting: str, arms: Arms, over: Sequence[str], is_compared: bool = False) -> Figure:
    """A panel for each of `over`; with `is_compared` another one for what the method is ahead of the baseline, if both
    are there."""
    looks, drawn, baseline = looks_of(arms), {}, outcome_only(arms)
    pairs = pairs_of(*(arms.get(arm, {}) for arm in (DEFAULT_ARM, baseline)))
    is_compared = is_compared and bool(pairs.units)
    title = f"{heading(task, setting, arms)}\n{_shaded(*arms.values())}"
    figure = make_figure(title, WIDTH + 2.0 * is_compared, HEIGHT + 0.4)
    panels = np.atleast_1d(figure.subplots(1, len(over) + is_compared))
    for axes, kind in zip(panels, over, strict=False):
        for arm in reversed(arms):  # the first arm is drawn last, on top
            drawn[arm] = draw_band(axes, _band_over(arms[arm], kind), looks[arm])
        style_accuracy(axes, kind)
        axes.tick_params(labelleft=kind == over[0])
    if is_compared:
        _draw_ahead(panels[-1], pairs, looks[DEFAULT_ARM], baseline)
    figure.axes[0].set_ylabel("greedy accuracy, held out", fontsize=8)
    add_legend(figure, {_name(arm, "", len(arms[arm])): drawn[arm] for arm in arms})
    return figure


def _draw_ahead(axes: Axes, pairs: Pairs, look: Look, baseline: str) -> None:
    """The method's accuracy minus the baseline's, and the mean of that over the run as a title."""
    draw_band(axes, band_of_difference(pairs), look)
    style(axes)
    axes.axhline(0.0, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_xlabel(OVER["steps"][1], fontsize=8)
    axes.set_ylabel(f"{DEFAULT_ARM} minus {baseline}, {len(pairs.units)} pairs", fontsize=8)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    shade = "95 % interval (t)" if len(pairs.units) >= MIN_FOR_INTERVAL else "range"
    axes.set_title(f"mean over {pairs.span} steps {difference_text(pairs)}\nshaded: {shade}", fontsize=8)


def _band_over(curves: Curves, kind: str) -> Band:
    if kind == "steps":
        return band_over_steps(curves)
    band = band_over(curves, OVER[kind][0])
    return band._replace(x=band.x / 60) if kind == "seconds" else band


def _shaded(*arms: Curves) -> str:
    """What the bands of these arms are, see `band_of_values`."""
    kinds = {"95 % interval (t)" if has_interval(list(curves)) else "range of the starts or runs" for curves in arms}
    return f"shaded: {' or '.join(sorted(kinds))}"


def _file_name(task: str) -> str:
    """The name of a task, which may be that of a function in a file, as part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", Path(task).name)


def _draw_along(settings: Settings) -> Iterator[tuple[str, str, Figure]]:
    """(task, axis, figure) of every axis with enough numbers."""
    for task in dict.fromkeys(task for task, _ in settings):
        found, span = _of_task(settings, task)
        for axis in dict.fromkeys(axis for _, setting in found for axis in _labels(setting)):
            lines, across = _lines(found, axis)
            numbers = sorted({number for points in lines.values() for number, _ in points})
            if len(numbers) >= LEAST:
                title = f"{task}: mean accuracy over the first {span} generator steps"
                yield task, axis, _draw_axis(title, axis, numbers, lines, across)


def _of_task(settings: Settings, task: str) -> tuple[dict[Key, Curves], int]:
    """{(arm, setting): curves} over the generator steps that all runs of the task have, and the last of these."""
    return over_same_steps({(arm, setting): arms[arm] for (name, setting), arms in settings.items() if name == task
                            for arm in in_order(arms)})  # fmt: skip


def _labels(setting: str) -> dict[str, str]:
    """The axes of the grid in a setting's name: {"words": "16", "verifier": "strong"} for words=16,verifier=strong."""
    return dict(part.split("=", 1) for part in setting.split(",") if "=" in part)


def _lines(found: Mapping[Key, Curves], axis: str) -> tuple[dict[Key, Points], dict[Key, Curves]]:
    """The arms along an axis, {(arm, setting without the axis): points}, and those of settings without it. Labels that
    are one number, such as 1 and 1.0, are two points."""
    lines, across = {}, {}
    for (arm, setting), curves in found.items():
        labels = _labels(setting)
        label = labels.pop(axis, None)
        key = (arm, ",".join(f"{name}={value}" for name, value in labels.items()))
        if label is None:
            across[key] = curves
        elif NUMBER.fullmatch(label):
            lines.setdefault(key, []).append((float(label), curves))
    return lines, across


def _draw_axis(
    title: str, axis: str, numbers: list[float], lines: Mapping[Key, Points], across: Mapping[Key, Curves]
) -> Figure:
    looks = looks_of(list(dict.fromkeys(arm for arm, _ in [*lines, *across])))
    rests = list(dict.fromkeys(rest for _, rest in lines))
    every = [*across.values(), *(curves for points in lines.values() for _, curves in points)]
    figure = make_figure(f"{title}\n{_shaded(*every)}", WIDTH, HEIGHT + 0.4)
    panel, drawn = figure.subplots(), {}
    for (arm, rest), curves in across.items():
        ends = [(numbers[0], curves), (numbers[-1], curves)]
        drawn[_name(arm, rest, len(curves))] = draw_band(panel, _band(ends), looks[arm])
    for (arm, rest), points in lines.items():
        look = Look(looks[arm].colour, DASHES[rests.index(rest) % len(DASHES)], looks[arm].marker)
        if count := len(pairs_of(*(curves for _, curves in points)).units):  # runs that there are at every number
            drawn[_name(arm, rest, count)] = draw_band(panel, _band(points), look)
    style(panel)
    panel.set_ylim(0.0, 1.0)
    panel.set_xticks(numbers, [f"{number:g}" for number in numbers])
    panel.set_xlabel(axis.replace("_", " "), fontsize=8)
    panel.set_ylabel("mean accuracy", fontsize=8)
    add_legend(figure, drawn)
    return figure


def _band(points: Points) -> Band:
    """Mean accuracy at every number, over the runs that there are at all of them."""
    points = sorted(points, key=lambda point: point[0])
    pairs = pairs_of(*(curves for _, curves in points))
    values_UA = np.array([[mean_accuracy(curves[unit]) for curves in pairs.arms] for unit in pairs.units])
    return band_of_values(pairs.units, np.array([number for number, _ in points]), values_UA)


def _name(arm: str, rest: str, runs: int) -> str:
    return f"{title_of(label_of(arm), rest)} ({runs} run{'s' * (runs > 1)})"


def _draw_map(settings: Settings) -> Figure | None:
    """A panel for each task that has several settings; None if none has."""
    of_task = {task: [setting for name, setting in settings if name == task] for task, _ in settings}
    of_task = {task: found for task, found in of_task.items() if len(found) > 1}
    if not of_task:
        return None
    looks = looks_of(in_order(dict.fromkeys(arm for arms in settings.values() for arm in arms)))
    figure, panels = make_grid(len(of_task), min(2, len(of_task)), WIDTH, HEIGHT, 0.6)
    drawn = {}
    for axes, (task, names) in zip(panels, of_task.items(), strict=True):
        found, span = _of_task(settings, task)
        places = {name: _pass_rate(settings[task, name]) for name in names}
        for arm in dict.fromkeys(arm for arm, _ in found):
            own = sorted((setting for name, setting in found if name == arm), key=places.get)
            drawn[label_of(arm)] = _draw_steps(axes, [(places[name], found[arm, name]) for name in own], looks[arm])
        style(axes)
        axes.set_title(f"{task}, over the first {span} generator steps", fontsize=9)
        axes.set_xlabel("share of right answers at the start", fontsize=8)
        axes.set_ylabel(f"generator steps to {LEVEL:g}", fontsize=8)
        axes.set_ylim(0, 1.1 * max(span, 1))
    add_legend(figure, drawn)
    return figure


def _pass_rate(arms: Arms) -> float:
    """Share of right answers before the generator has learned: of sampled solutions, or else of greedy ones."""
    sampled = sampled_at_start(arms)
    if sampled is not None:
        return sampled
    return float(np.mean([curve.evaluations[0].accuracy for curves in arms.values() for curve in curves.values()]))


def _draw_steps(axes: Axes, points: Sequence[tuple[float, Curves]], look: Look) -> Line2D:
    """The mean of steps to LEVEL at every place, with its interval, or the runs where these are too few for one."""
    means = []
    for x, curves in points:
        reached = measured(curves, steps_to)
        found = estimate({unit: one.x for unit, one in reached.items()})
        means.append(found.value)
        if has_interval(list(reached)) and np.isfinite(found.low):
            axes.plot([x, x], [found.low, found.high], color=look.colour, linewidth=1)
        else:
            axes.plot([x] * len(reached), [one.x for one in reached.values()], ".", color=look.colour, markersize=3)
        if missed := sum(not one.is_reached for one in reached.values()):
            axes.plot(x, found.value, color=look.colour, marker=MARKERS[look.marker], markersize=5,
                      markerfacecolor="white", zorder=3)  # fmt: skip
            axes.annotate(f"{len(reached) - missed} of {len(reached)}", (x, found.value), (4, 4), fontsize=7,
                          textcoords="offset points", color=look.colour)  # fmt: skip
    return draw_line(axes, Series(np.array([x for x, _ in points]), np.array(means)), look, width=1.2)
