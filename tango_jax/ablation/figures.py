"""The figures of an experiment, from the rows of its table alone; PNG files.

    what_it_bought.png            accuracy of every arm over generator steps and over sampled tokens, and what the
                                  method is ahead of the baseline, in one setting
    curves_<task>_<setting>.png   the same over minutes of training as well, for every setting
    map.png                       generator steps to LEVEL against the pass rate at the start, of several settings
    along_<axis>.png              mean accuracy against an axis of the grid that has four numbers or more
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tango_jax.ablation.along import draw_along, draw_map
from tango_jax.ablation.summary import difference_text, in_order, outcome_only, title_of
from tango_jax.arms import DEFAULT_ARM, GREY, Look
from tango_jax.runtime.checks import one_of
from tango_jax.tracking.curves import label_of, looks_of
from tango_jax.tracking.evaluations import Evaluation
from tango_jax.tracking.intervals import MIN_FOR_INTERVAL, Unit, has_interval
from tango_jax.tracking.learning_curve import (
    Arms,
    Band,
    Curves,
    Pairs,
    Settings,
    band_of_difference,
    band_over,
    band_over_steps,
    curves_by_setting,
    pairs_of,
    trains_generator,
)
from tango_jax.tracking.plots import (
    HEIGHT,
    OVER,
    WIDTH,
    add_legend,
    draw_band,
    make_figure,
    save_figure,
    style,
    style_accuracy,
)


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
        save("what_it_bought", _curves(candidates[chosen], ("steps", "tokens"), title_of(*chosen), is_compared=True))
    for (task, name), arms in settings.items():
        save("_".join(filter(None, ["curves", _file_name(task), name])),
             _curves(arms, ("steps", "tokens", "seconds"), title_of(task, name)))
    save("map", draw_map(settings))
    has_tasks = len({task for task, _ in settings}) > 1
    for task, axis, figure in draw_along(settings):
        save("_".join(["along", *[_file_name(task)] * has_tasks, _file_name(axis)]), figure)
    return files


def learning(rows: Sequence[Evaluation]) -> Settings:
    """The arms of every setting whose generator learns, and has made a step."""
    settings = {key: {arm: arms[arm] for arm in in_order(arms) if trains_generator(arm) and _has_moved(arms[arm])}
                for key, arms in curves_by_setting(rows).items()}  # fmt: skip
    return {key: arms for key, arms in settings.items() if arms}


def _has_moved(curves: Curves) -> bool:
    return all(curve.evaluations[-1].generator_step > 0 for curve in curves.values())


def _curves(arms: Arms, over: Sequence[str], title: str, is_compared: bool = False) -> Figure:
    """A panel for each of `over`; with `is_compared` another one for what the method is ahead of the baseline, if both
    are there."""
    looks, drawn, baseline = looks_of(arms), {}, outcome_only(arms)
    pairs = pairs_of(*(arms.get(arm, {}) for arm in (DEFAULT_ARM, baseline)))
    is_compared = is_compared and bool(pairs.units)
    figure = make_figure(f"{title}\n{_counts(arms)}", WIDTH + 2.0 * is_compared, HEIGHT + 0.4)
    panels = np.atleast_1d(figure.subplots(1, len(over) + is_compared))
    for axes, kind in zip(panels, over, strict=False):
        for arm in reversed(arms):  # the first arm is drawn last, on top
            drawn[arm] = draw_band(axes, _band(arms[arm], kind), looks[arm])
        style_accuracy(axes, kind)
        axes.tick_params(labelleft=kind == over[0])
    if is_compared:
        _draw_ahead(panels[-1], pairs, looks[DEFAULT_ARM], baseline)
    figure.axes[0].set_ylabel("greedy accuracy, held out", fontsize=8)
    add_legend(figure, {label_of(arm): drawn[arm] for arm in arms})
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


def _counts(arms: Arms) -> str:
    """What is drawn, in words."""
    counts, starts = (sorted({len(set(found)) for found in each}) for each in (
        arms.values(), ([start for start, _ in curves] for curves in arms.values())))  # fmt: skip
    runs, of_starts = (f"{found[0]}{f' to {found[-1]}' * (len(found) > 1)} {noun}{'s' * (found[-1] > 1)}"
                       for found, noun in ((counts, "run"), (starts, "start")))  # fmt: skip
    if counts == [1]:
        return "one run of each arm"
    shades = {_shade(list(curves)) for curves in arms.values()}
    return f"mean of {runs} from {of_starts} of each arm; shaded: {' or '.join(sorted(shades))}"


def _shade(units: Sequence[Unit]) -> str:
    if has_interval(units):
        return "95 % interval (t)"
    return "range of the starts" if len({start for start, _ in units}) > 1 else "range of the runs"


def _band(curves: Curves, kind: str) -> Band:
    if kind == "steps":
        return band_over_steps(curves)
    band = band_over(curves, OVER[kind][0])
    return band._replace(x=band.x / 60) if kind == "seconds" else band


def _file_name(task: str) -> str:
    """The name of a task, which may be that of a function in a file, as part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", Path(task).name)
