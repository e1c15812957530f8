"""The figures of an experiment, from its table alone: curves_<task>_<setting>.png for every setting."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tango_jax.ablation.summary import difference_text, heading, in_order, outcome_only, title_of
from tango_jax.method.arms import DEFAULT_ARM, GREY, Look
from tango_jax.tracking.curves import label_of, looks_of
from tango_jax.tracking.evaluations import Evaluation
from tango_jax.tracking.intervals import MIN_FOR_INTERVAL, has_interval
from tango_jax.tracking.learning_curve import (
    Arms,
    Pairs,
    Settings,
    band_of_difference,
    band_over,
    band_over_steps,
    curves_by_setting,
    has_flops,
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

TITLE_WIDTH = 85  # characters of a figure's title


def draw_figures(rows: Sequence[Evaluation], folder: Path) -> list[Path]:
    files = []
    for (task, setting), arms in learning(rows).items():
        name = re.sub(r"[^\w.-]+", "_", Path(task).name)  # a task from a file may have characters that file names lack
        files.append(folder / f"{'_'.join(filter(None, ['curves', name, setting]))}.png")
        here = [row for row in rows if (row.task, row.setting) == (task, setting)]
        save_figure(_curves(task, setting, arms, left_out(here)), files[-1])
    return files


def learning(rows: Sequence[Evaluation]) -> Settings:
    """The runs of every setting whose generator learns, and has made a step. `left_out` counts those without one."""
    settings = {
        key: {arm: moved for arm, curves in arms.items()
              if (moved := {unit: curve for unit, curve in curves.items() if curve.last_step > 0})}
        for key, arms in _of_generators(rows).items()
    }
    return {key: arms for key, arms in settings.items() if arms}


def left_out(rows: Sequence[Evaluation]) -> str:
    told = [f"{still} of {len(curves)} runs of {title_of(arm, setting)}"
            for (_, setting), arms in _of_generators(rows).items() for arm, curves in arms.items()
            if (still := sum(curve.last_step <= 0 for curve in curves.values()))]
    return textwrap.fill(f"Left out, without a generator step: {'; '.join(told)}.", TITLE_WIDTH) if told else ""


def _of_generators(rows: Sequence[Evaluation]) -> Settings:
    return {key: {arm: arms[arm] for arm in in_order(arms) if trains_generator(arm)}
            for key, arms in curves_by_setting(rows).items()}


def _curves(task: str, setting: str, arms: Arms, missing: str) -> Figure:
    looks, drawn, baseline = looks_of(arms), {}, outcome_only(arms)
    pairs = pairs_of(*(arms.get(arm, {}) for arm in (DEFAULT_ARM, baseline)))
    is_compared = bool(pairs.units)
    kinds = {"95 % interval (t)" if has_interval(list(curves)) else "range of the starts or runs"
             for curves in arms.values()}
    shaded = f"shaded: {' or '.join(sorted(kinds))}"
    title = "\n".join(filter(None, [heading(task, setting, arms), shaded, missing]))
    over = {"tokens": "sampled_tokens"} | ({"flops": "flops"} if has_flops(arms.values()) else {})
    figure = make_figure(title, WIDTH + 2.0 * (len(over) - 1 + is_compared), HEIGHT + 0.4)
    steps, *others = figure.subplots(1, 1 + len(over) + is_compared)
    for arm in reversed(arms):  # the first arm is drawn last, on top
        drawn[arm] = draw_band(steps, band_over_steps(arms[arm]), looks[arm])
        for axes, name in zip(others, over.values(), strict=False):
            draw_band(axes, band_over(arms[arm], name), looks[arm])
    style_accuracy(steps, "steps")
    for axes, name in zip(others, over, strict=False):
        style_accuracy(axes, name)
        axes.tick_params(labelleft=False)
    if is_compared:
        _draw_ahead(others[-1], pairs, looks[DEFAULT_ARM], baseline)
    steps.set_ylabel("greedy accuracy, held out", fontsize=8)
    add_legend(figure, {f"{label_of(arm)} ({len(arms[arm])} run{'s' * (len(arms[arm]) > 1)})": drawn[arm]
                        for arm in arms})
    return figure


def _draw_ahead(axes: Axes, pairs: Pairs, look: Look, baseline: str) -> None:
    draw_band(axes, band_of_difference(pairs), look)
    style(axes)
    axes.axhline(0.0, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_xlabel(OVER["steps"], fontsize=8)
    axes.set_ylabel(f"{DEFAULT_ARM} minus {baseline}, {len(pairs.units)} pairs", fontsize=8)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    shade = "95 % interval (t)" if len(pairs.units) >= MIN_FOR_INTERVAL else "range"
    axes.set_title(f"mean over {pairs.span} steps {difference_text(pairs)}\nshaded: {shade}", fontsize=8)
