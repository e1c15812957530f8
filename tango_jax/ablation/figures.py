"""The figures of an experiment, from the rows of its table alone; PNG files.

    what_it_bought.png     accuracy of every arm over generator steps and over sampled tokens, in one setting
    curves_<setting>.png   the same over seconds as well, for every setting
    map.png                generator steps to LEVEL against the pass rate at the start, over settings
    verifier_skill.png     the same against the verifier's skill at the start, over settings that differ in it
    alpha.png              schedules of alpha against each other, over settings that differ in it

The last three need settings that differ, and are left out where there are none. Axes of the grid whose names begin with
`verifier` and with `alpha` say what the last two compare; the map takes all others for how hard the task is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from tango_jax.ablation import statistics
from tango_jax.ablation.statistics import LEVEL, Arms, Band, Curves, Estimate, Reached
from tango_jax.ablation.summary import in_order, pass_rate_at_start, trains_generator, values_of
from tango_jax.ablation.table import Evaluation
from tango_jax.arms import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, Look
from tango_jax.runtime.checks import one_of
from tango_jax.tracking.curves import MARKERS, label_of, looks_of
from tango_jax.tracking.plots import DPI, save_figure

LONG_AXIS_NAMES = {"steps": "generator step", "tokens": "sampled tokens, both roles", "seconds": "minutes of training"}
VERIFIER, ALPHA = "verifier", "alpha"  # how axes of the grid begin that compare one of these
WIDTH, HEIGHT = 8.0, 3.3  # inches
DODGE = 0.06  # of the width of the axis, between arms with the same x
MAX_MARKERS = 12
LANE_ROW = 0.14  # inches
PALETTE = (Look(VERMILION, "-", "circle"), Look(BLUE, "--", "square"), Look(GREEN, "-.", "triangle-up"),
           Look(ORANGE, ":", "diamond"), Look(PURPLE, "--", "cross"))  # fmt: skip
Settings = dict[tuple[str, str], Arms]  # (task, setting) -> arms


def draw_figures(rows: Sequence[Evaluation], folder: Path, setting: str = "") -> list[Path]:
    """Draw all figures that the rows allow. Returns their files.

    Args:
        setting: of `what_it_bought`; empty: the one with the most runs.

    Raises:
        ValueError: there is no such setting.
    """
    settings = {key: {arm: arms[arm] for arm in in_order(arms) if trains_generator(arms[arm])}
                for key, arms in statistics.curves_by_setting(rows).items()}  # fmt: skip
    settings = {key: arms for key, arms in settings.items() if arms}
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
        save("what_it_bought", _curves(candidates[chosen], ("steps", "tokens"), _title(*chosen)))
    for (task, name), arms in settings.items():
        save("_".join(filter(None, ["curves", _file_name(task), name])),
             _curves(arms, ("steps", "tokens", "seconds"), _title(task, name)))
    save("map", _reached(settings, "pass rate at the start", _points_by_pass_rate, is_log=True,
                         is_varied=lambda axis: not axis.startswith((VERIFIER, ALPHA))))
    save("verifier_skill", _reached(settings, "the verifier's step F1 at the start (fixed pool, after its warm-up)",
                                    _points_by_skill, is_log=False, is_varied=lambda axis: axis.startswith(VERIFIER)))
    save("alpha", _alphas(settings))
    return files


def pairs_of(setting: str) -> dict[str, str]:
    """The axes of the grid in a setting's name: {"words": "16", "verifier": "strong"} for words=16,verifier=strong."""
    return dict(part.split("=", 1) for part in setting.split(",") if "=" in part)


def families(settings: Settings, is_varied: Callable[[str], bool]) -> dict[tuple[str, str], dict[str, str]]:
    """Settings that are alike but for some axes: {(task, what they have in common): {setting: what differs}}.

    Only those are returned that differ in something.
    """
    found = {}
    for task, setting in settings:
        pairs = pairs_of(setting)
        common = ",".join(f"{axis}={label}" for axis, label in pairs.items() if not is_varied(axis))
        own = ",".join(f"{axis}={label}" for axis, label in pairs.items() if is_varied(axis))
        found.setdefault((task, common), {})[setting] = own or "as configured"
    return {key: members for key, members in found.items() if len(members) > 1}


# Curves of accuracy.


def _curves(arms: Arms, over: Sequence[str], title: str) -> Figure:
    figure = _figure(WIDTH, HEIGHT + 0.4, f"{title}\n{_counts(arms)}")
    looks, drawn = looks_of(arms), {}
    for axes, kind in zip(figure.subplots(1, len(over), sharey=True), over, strict=True):
        for arm in reversed(arms):  # the first arm is drawn last, on top
            drawn[arm] = _draw_band(axes, _band(arms[arm], kind), looks[arm])
        _finish_curves(axes, kind)
    figure.axes[0].set_ylabel("greedy accuracy, held out", fontsize=8)
    _legend(figure, [drawn[arm] for arm in arms], [label_of(arm) for arm in arms])
    return figure


def _counts(arms: Arms) -> str:
    """What is drawn, in words."""
    counts = sorted({len(curves) for curves in arms.values()})
    runs = f"{counts[0]} runs" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} runs"
    if counts[-1] < statistics.MIN_FOR_INTERVAL:
        return "one run of each arm" if counts == [1] else f"mean and range of {runs} of each arm"
    return f"mean of {runs} of each arm, with 95 % intervals"


def _band(curves: Curves, kind: str) -> Band:
    if kind == "steps":
        return statistics.band_over_steps(curves)
    band = statistics.band_over(curves, {"tokens": "sampled_tokens"}.get(kind, kind))
    return band._replace(x=band.x / 60) if kind == "seconds" else band


def _draw_band(axes: Axes, band: Band, look: Look, label: str | None = None):
    axes.fill_between(band.x, band.low, band.high, color=look.colour, alpha=0.15, linewidth=0)
    every = max(1, len(band.x) // MAX_MARKERS)
    [line] = axes.plot(band.x, band.mean, color=look.colour, linestyle=look.dash, marker=MARKERS[look.marker],
                       markevery=every, markersize=3.5, linewidth=1.6, label=label)  # fmt: skip
    return line


def _finish_curves(axes: Axes, kind: str) -> None:
    _style(axes)
    axes.axhline(LEVEL, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_xlabel(LONG_AXIS_NAMES[kind], fontsize=8)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=kind == "steps"))
    if kind == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))


def _alphas(settings: Settings) -> Figure | None:
    """A panel for each arm that has several schedules in settings which are alike otherwise."""
    panels = []
    for (task, common), members in families(settings, lambda axis: axis.startswith(ALPHA)).items():
        arms = in_order({arm: None for setting in members for arm in settings[task, setting]})
        for arm in arms:
            bands = {own: settings[task, setting][arm] for setting, own in members.items()
                     if arm in settings[task, setting]}  # fmt: skip
            if len(bands) > 1:
                panels.append((_title(task, common), arm, bands))
    if not panels:
        return None
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = _figure(WIDTH, lines * HEIGHT + 0.25, "")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    for axes, (title, arm, bands) in zip(grid, panels, strict=False):
        for look, (own, curves) in zip(_palette(len(bands)), bands.items(), strict=True):
            _draw_band(axes, statistics.band_over_steps(curves), look, own)
        _finish_curves(axes, "steps")
        axes.set_title(f"{title}\n{label_of(arm)}", fontsize=9)
        axes.legend(fontsize=7, frameon=False, loc="best")
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    return figure


def _palette(count: int) -> list[Look]:
    return [PALETTE[index % len(PALETTE)] for index in range(count)]


# Steps to a level.


class Point(NamedTuple):
    """One arm in one setting."""

    x: float
    steps: Estimate  # the mean; a lower bound if some runs did not get there
    reached: tuple[Reached, ...]  # every run

    @property
    def missed(self) -> int:
        """Runs that did not get there."""
        return sum(not found.is_reached for found in self.reached)


def _points_by_pass_rate(arms: Arms) -> dict[str, Point]:
    x = pass_rate_at_start(arms)
    return {arm: _point(curves, x) for arm, curves in arms.items()}


def _points_by_skill(arms: Arms) -> dict[str, Point]:
    """The arms whose verifier judges live solutions, each at the skill that its own verifier begins with."""
    found = {}
    for arm, curves in arms.items():
        is_judged = np.isfinite(np.concatenate([curve.of("verifier_live_step_f1") for curve in curves.values()])).any()
        skills = [[row.verifier_step_f1 for row in curve.evaluations if row.generator_step == 0][-1]
                  for curve in curves.values()]  # fmt: skip
        if is_judged and None not in skills:
            found[arm] = _point(curves, float(np.mean(skills)))
    return found


def _point(curves: Curves, x: float) -> Point:
    reached = {unit: statistics.steps_to(curve) for unit, curve in curves.items()}
    steps = statistics.estimate(*statistics.paired(values_of(reached)))
    return Point(x, steps, tuple(reached.values()))


def _reached(
    settings: Settings, x_label: str, points_fn: Callable[[Arms], dict[str, Point]], is_log: bool,
    is_varied: Callable[[str], bool],
) -> Figure | None:
    """A panel for each family of settings: steps to LEVEL, and above them a lane for the runs that never reach it."""
    panels = {}
    for (task, common), members in families(settings, is_varied).items():
        points = {own: points_fn(settings[task, setting]) for setting, own in members.items()}
        points = {own: by_arm for own, by_arm in points.items() if by_arm}
        if len(points) > 1:
            panels[_title(task, common)] = points
    if not panels:
        return None
    arms = in_order({arm: None for points in panels.values() for by_arm in points.values() for arm in by_arm})
    looks = looks_of(arms)
    lane = LANE_ROW * (len(arms) + 1)
    figure = _figure(max(WIDTH, len(panels) * WIDTH / 2), HEIGHT + lane + 0.6, "")
    parts = figure.subfigures(1, len(panels), squeeze=False)[0]
    for part, (title, points) in zip(parts, panels.items(), strict=True):
        _draw_reached(part, title, points, looks, lane / HEIGHT, is_log)
        part.axes[-1].set_xlabel(x_label, fontsize=8)
    shown = {line.get_label(): line for part in parts for line in part.axes[-1].lines}
    _legend(figure, [shown[arm] for arm in arms if arm in shown], [label_of(arm) for arm in arms if arm in shown])
    return figure


def _draw_reached(
    part: SubFigure, title: str, points: Mapping[str, Mapping[str, Point]], looks: Mapping[str, Look],
    lane_height: float, is_log: bool,
) -> None:
    lane, axes = part.subplots(2, 1, sharex=True, height_ratios=[lane_height, 1], gridspec_kw={"hspace": 0.02})
    place_fn = _x_scale(axes, [point.x for by_arm in points.values() for point in by_arm.values()], is_log)
    arms = [arm for arm in looks if any(arm in by_arm for by_arm in points.values())]
    for row, arm in enumerate(arms):
        look = looks[arm]
        offset = (row - (len(arms) - 1) / 2) * DODGE / max(len(arms) - 1, 1)
        found = sorted((by_arm[arm] for by_arm in points.values() if arm in by_arm), key=lambda point: point.x)
        for point in found:
            if point.missed:
                lane.text(place_fn(point.x, 0.0), row, f"{point.missed} of {len(point.reached)}", color=look.colour,
                          ha="center", va="center", fontsize=7)  # fmt: skip
        reached = [point for point in found if point.missed < len(point.reached)]
        x = [place_fn(point.x, offset) for point in reached]
        y = [point.steps.value for point in reached]
        axes.plot(x, y, color=look.colour, linestyle=look.dash, linewidth=1.2, marker=MARKERS[look.marker],
                  markersize=5, label=arm)  # fmt: skip
        for place, point in zip(x, reached, strict=True):
            if len(point.reached) < statistics.MIN_FOR_INTERVAL:
                runs = [found.x for found in point.reached]
                axes.plot([place] * len(runs), runs, ".", color=look.colour, markersize=3, alpha=0.6)
            elif np.isfinite(point.steps.low):
                axes.plot([place] * 2, [point.steps.low, point.steps.high], color=look.colour, linewidth=1)
            if point.missed:  # a lower bound
                axes.plot(place, point.steps.value, color=look.colour, marker=MARKERS[look.marker], markersize=5,
                          markerfacecolor="white", zorder=3)  # fmt: skip
    _finish_reached(lane, axes, len(arms))
    if all(len({point.x for point in by_arm.values()}) == 1 for by_arm in points.values()):
        _name_places(lane, {own: place_fn(next(iter(by_arm.values())).x, 0.0) for own, by_arm in points.items()})
    part.suptitle(title, fontsize=10, fontweight="bold")


def _name_places(lane: Axes, places: Mapping[str, float]) -> None:
    """Write the names of settings above their places."""
    top = lane.secondary_xaxis("top")
    top.set_xticks(list(places.values()), list(places), fontsize=7, rotation=20, ha="left", rotation_mode="anchor")
    top.minorticks_off()
    top.tick_params(length=2, color=GREY)
    top.spines["top"].set_visible(False)


def _x_scale(axes: Axes, values: Sequence[float], is_log: bool) -> Callable[[float, float], float]:
    """Scale the axis; returns a function from a value and an offset, a share of the axis, to a place on it."""
    positive = [value for value in values if value > 0]
    if not is_log or not positive:
        low, high = min(values), max(values)
        span = max(high - low, 0.1)
        axes.set_xlim(max(low - 0.12 * span, -0.05), high + 0.12 * span)
        return lambda value, offset: value + offset * span
    floor = min(positive) / 3  # where 0 is drawn
    low, high = (floor if min(values) == 0 else min(positive)), max(positive)
    span = max(np.log(high / low), 1.0)
    axes.set_xscale("log")
    axes.set_xlim(low * np.exp(-0.12 * span), min(high * np.exp(0.12 * span), 1.5))
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 3)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    return lambda value, offset: max(value, floor) * np.exp(offset * span)


def _finish_reached(lane: Axes, axes: Axes, arms: int) -> None:
    _style(axes)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"generator steps to {LEVEL:g}", fontsize=8)
    if not axes.lines or not any(len(line.get_xdata()) for line in axes.lines):
        axes.set_ylim(1, 100)
    lane.set_ylim(arms - 0.3, -0.7)
    lane.set_yticks([])
    lane.set_ylabel("not reached", fontsize=7, color=GREY, rotation=0, ha="right", va="center")
    lane.set_facecolor("#F4F4F4")
    lane.spines[["top", "right", "left", "bottom"]].set_visible(False)
    lane.tick_params(axis="x", which="both", length=0, labelbottom=False)


# Common parts.


def _figure(width: float, height: float, title: str) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10, fontweight="bold")
    return figure


def _style(axes: Axes) -> None:
    axes.tick_params(labelsize=8, length=3, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _legend(figure: Figure, lines: Sequence, labels: Sequence[str]) -> None:
    figure.legend(lines, labels, fontsize=8, loc="outside lower center", ncols=min(len(labels), 3), frameon=False,
                  handlelength=3.4)  # fmt: skip


def _title(task: str, setting: str) -> str:
    return ", ".join(filter(None, [task, setting.replace(",", ", ")]))


def _file_name(task: str) -> str:
    """The name of a task, which may be that of a function in a file, as part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", Path(task).name)
