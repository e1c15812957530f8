"""The figures of an experiment, from the rows of its table alone; PNG files.

    what_it_bought.png            accuracy of every arm over generator steps and over sampled tokens, and what the
                                  method is ahead of the baseline, in one setting
    curves_<task>_<setting>.png   the same over minutes of training as well, for every setting
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tango_jax.ablation.summary import difference_text, heading, in_order, outcome_only
from tango_jax.method.arms import DEFAULT_ARM, GREY, Look
from tango_jax.runtime.checks import one_of
from tango_jax.tracking.curves import label_of, looks_of
from tango_jax.tracking.evaluations import Evaluation
from tango_jax.tracking.intervals import MIN_FOR_INTERVAL, has_interval
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

    `setting`: of `what_it_bought`; empty: the one with the most runs. Raises ValueError if there is no such setting.
    """
    settings = learning(rows)
    if setting:
        one_of("--setting", setting, [name for _, name in settings])
    files = []

    def save(name: str, figure: Figure) -> None:
        files.append(folder / f"{name}.png")
        save_figure(figure, files[-1])

    candidates = {key: arms for key, arms in settings.items() if not setting or key[1] == setting}
    if candidates:
        chosen = max(candidates, key=lambda key: sum(map(len, candidates[key].values())))
        save("what_it_bought", _curves(*chosen, candidates[chosen], ("steps", "tokens"), is_compared=True))
    for (task, name), arms in settings.items():
        save("_".join(filter(None, ["curves", _file_name(task), name])),
             _curves(task, name, arms, ("steps", "tokens", "seconds")))
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
    """A panel for each of `over`; with `is_compared` one more for what the method is ahead of the baseline."""
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
    add_legend(figure, {f"{label_of(arm)} ({len(arms[arm])} run{'s' * (len(arms[arm]) > 1)})": drawn[arm]
                        for arm in arms})  # fmt: skip
    return figure


def _draw_ahead(axes: Axes, pairs: Pairs, look: Look, baseline: str) -> None:
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
    kinds = {"95 % interval (t)" if has_interval(list(curves)) else "range of the starts or runs" for curves in arms}
    return f"shaded: {' or '.join(sorted(kinds))}"


def _file_name(task: str) -> str:
    return re.sub(r"[^\w.-]+", "_", Path(task).name)
