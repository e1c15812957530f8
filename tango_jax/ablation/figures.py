"""The figures of an experiment, from the rows of its table alone; PNG files.

    what_it_bought.png            accuracy of every arm over generator steps and over sampled tokens, and what the
                                  method is ahead of the baseline, in one setting
    curves_<task>_<setting>.png   the same over minutes of training as well, for every setting
    map.png                       generator steps to LEVEL against the pass rate at the start, over settings
    verifier_skill.png            the same against the verifier's skill at the start, where settings differ in it
    alpha.png                     schedules of alpha against each other, where settings differ in it
    along_<axis>.png              mean accuracy against an axis of the grid that has four numbers or more

The last four need settings that differ, and are left out where there are none. Axes of the grid whose names begin with
`verifier` and with `alpha` say what two of them compare; the map takes all others for how hard the task is.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tango_jax.ablation.along import draw_along
from tango_jax.ablation.families import Settings, families, title_of
from tango_jax.ablation.reached import draw_reached, points_by_pass_rate, points_by_skill
from tango_jax.ablation.summary import in_order, outcome_only
from tango_jax.method.arms import BLUE, DEFAULT_ARM, GREEN, GREY, ORANGE, PURPLE, VERMILION, Look
from tango_jax.runtime.checks import one_of
from tango_jax.tracking.curves import label_of, looks_of
from tango_jax.tracking.evaluations import Evaluation
from tango_jax.tracking.intervals import MIN_FOR_INTERVAL, Unit, difference, has_interval
from tango_jax.tracking.learning_curve import (
    Arms,
    Band,
    Curves,
    band_of_difference,
    band_over,
    band_over_steps,
    curves_by_setting,
    mean_accuracy,
    same_span,
    trains_generator,
)
from tango_jax.tracking.plots import (
    HEIGHT,
    OVER,
    WIDTH,
    add_legend,
    draw_band,
    make_figure,
    make_grid,
    save_figure,
    style,
    style_accuracy,
)

VERIFIER, ALPHA = "verifier", "alpha"  # how axes of the grid begin that compare one of these
PALETTE = (Look(VERMILION, "-", "circle"), Look(BLUE, "--", "square"), Look(GREEN, "-.", "triangle-up"),
           Look(ORANGE, ":", "diamond"), Look(PURPLE, "--", "cross"))  # fmt: skip


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
    save("map", draw_reached(settings, "pass rate at the start", points_by_pass_rate, is_log=True,
                             is_varied=lambda axis: not axis.startswith((VERIFIER, ALPHA))))
    skill = "the verifier's step F1 at the start (fixed pool, after its warm-up)"
    save("verifier_skill", draw_reached(settings, skill, points_by_skill, is_log=False,
                                        is_varied=lambda axis: axis.startswith(VERIFIER)))
    save("alpha", _alphas(settings))
    for axis, figure in draw_along(settings):
        save(f"along_{_file_name(axis)}", figure)
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
    is_compared = is_compared and baseline is not None and bool(
        arms.get(DEFAULT_ARM, {}).keys() & arms[baseline].keys())  # fmt: skip
    figure = make_figure(f"{title}\n{_counts(arms)}", WIDTH + 2.0 * is_compared, HEIGHT + 0.4)
    panels = np.atleast_1d(figure.subplots(1, len(over) + is_compared))
    for axes, kind in zip(panels, over, strict=False):
        for arm in reversed(arms):  # the first arm is drawn last, on top
            drawn[arm] = draw_band(axes, _band(arms[arm], kind), looks[arm])
        style_accuracy(axes, kind)
        axes.tick_params(labelleft=kind == over[0])
    if is_compared:
        _draw_ahead(panels[-1], *same_span({arm: arms[arm] for arm in (DEFAULT_ARM, baseline)})[0].values(), looks,
                    baseline)  # fmt: skip
    figure.axes[0].set_ylabel("greedy accuracy, held out", fontsize=8)
    add_legend(figure, {label_of(arm): drawn[arm] for arm in arms})
    return figure


def _draw_ahead(axes: Axes, method: Curves, base: Curves, looks: Mapping[str, Look], baseline: str) -> None:
    """The method's accuracy minus the baseline's, and the mean of that over the run as a title."""
    draw_band(axes, band_of_difference(method, base), looks[DEFAULT_ARM])
    style(axes)
    axes.axhline(0.0, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_xlabel(OVER["steps"][1], fontsize=8)
    axes.set_ylabel(f"{DEFAULT_ARM} minus {baseline}, in pairs", fontsize=8)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    mean = difference(*({unit: mean_accuracy(curve) for unit, curve in curves.items()} for curves in (method, base)))
    is_interval = len(method) >= MIN_FOR_INTERVAL and np.isfinite(mean.low)
    shown = f" [{mean.low:+.2f}, {mean.high:+.2f}]\nshaded: 95 % interval (t)" if is_interval else "\nshaded: range"
    axes.set_title(f"mean over the run {mean.value:+.2f}{shown}", fontsize=8)


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


def _alphas(settings: Settings) -> Figure | None:
    """A panel for each arm that has several schedules in settings which are alike otherwise."""
    panels = []
    for (task, common), members in families(settings, lambda axis: axis.startswith(ALPHA)).items():
        arms = in_order({arm: None for setting in members for arm in settings[task, setting]})
        for arm in arms:
            bands = {own: settings[task, setting][arm] for setting, own in members.items()
                     if arm in settings[task, setting]}  # fmt: skip
            if len(bands) > 1:
                panels.append((title_of(task, common), arm, bands))
    if not panels:
        return None
    figure, grid = make_grid(len(panels), min(3, len(panels)), WIDTH, HEIGHT, 0.25, sharey=True)
    for axes, (title, arm, bands) in zip(grid, panels, strict=True):
        for look, (own, curves) in zip(itertools.cycle(PALETTE), bands.items(), strict=False):
            draw_band(axes, band_over_steps(curves), look, own)
        style_accuracy(axes, "steps")
        axes.set_title(f"{title}\n{label_of(arm)}", fontsize=9)
        axes.legend(fontsize=7, frameon=False, loc="best")
    return figure


def _file_name(task: str) -> str:
    """The name of a task, which may be that of a function in a file, as part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", Path(task).name)
