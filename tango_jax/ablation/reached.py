"""Generator steps to LEVEL against what the runs start from: a panel for each family of settings.

The mean of an arm whose runs did not all get there is hollow, since it is a lower bound; a lane above the panel counts
these runs. Where there are too few runs or starts for an interval, each run is a dot. All runs of a setting are cut to
the generator steps that all of them have.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, SymmetricalLogLocator

from tango_jax.ablation.families import Settings, families, title_of
from tango_jax.ablation.summary import in_order, pass_rate_at_start, values_of
from tango_jax.method.arms import GREY, Look
from tango_jax.tracking.curves import MARKERS, label_of, looks_of
from tango_jax.tracking.intervals import Estimate, estimate, has_interval
from tango_jax.tracking.learning_curve import LEVEL, Arms, Curves, Reached, cut_to_shared_span, steps_to
from tango_jax.tracking.plots import HEIGHT, WIDTH, add_legend, make_figure, style

DODGE = 0.06  # of the width of the axis, between arms with the same x
LANE_ROW = 0.14  # inches


class Point(NamedTuple):
    """One arm in one setting."""

    x: float
    steps: Estimate  # the mean; a lower bound if some runs did not get there
    reached: tuple[Reached, ...]  # every run
    has_interval: bool  # whether there are independent runs or starts enough for one

    @property
    def missed(self) -> int:
        """Runs that did not get there."""
        return sum(not found.is_reached for found in self.reached)


def points_by_pass_rate(arms: Arms) -> dict[str, Point]:
    arms, x = cut_to_shared_span(arms), pass_rate_at_start(arms)
    return {arm: _point(curves, x) for arm, curves in arms.items()}


def points_by_skill(arms: Arms) -> dict[str, Point]:
    """The arms whose verifier judges live solutions, each at the skill that its own verifier begins with."""
    found = {}
    for arm, curves in cut_to_shared_span(arms).items():
        is_judged = np.isfinite(np.concatenate([curve.of("verifier_live_step_f1") for curve in curves.values()])).any()
        skills = [[row.verifier_step_f1 for row in curve.evaluations if row.generator_step == 0][-1]
                  for curve in curves.values()]  # fmt: skip
        if is_judged and None not in skills:
            found[arm] = _point(curves, float(np.mean(skills)))
    return found


def _point(curves: Curves, x: float) -> Point:
    reached = {unit: steps_to(curve) for unit, curve in curves.items()}
    return Point(x, estimate(values_of(reached)), tuple(reached.values()), has_interval(list(reached)))


def draw_reached(
    settings: Settings, x_label: str, points_fn: Callable[[Arms], dict[str, Point]], is_log: bool,
    is_varied: Callable[[str], bool],
) -> Figure | None:
    """A panel for each family of settings: steps to LEVEL, and above them a lane for the runs that never reach it.

    Args:
        points_fn: the place of every arm of a setting, {arm: point}.
        is_log: the x axis is logarithmic, and a share.
        is_varied: whether settings of a family differ in an axis of the grid of this name.

    Returns:
        None if no two settings differ in nothing else.
    """
    panels = {}
    for (task, common), members in families(settings, is_varied).items():
        points = {own: points_fn(settings[task, setting]) for setting, own in members.items()}
        points = {own: by_arm for own, by_arm in points.items() if by_arm}
        if len(points) > 1:
            panels[title_of(task, common)] = points
    if not panels:
        return None
    arms = in_order({arm: None for points in panels.values() for by_arm in points.values() for arm in by_arm})
    looks = looks_of(arms)
    lane = LANE_ROW * (len(arms) + 1)
    figure = make_figure(width=max(WIDTH, len(panels) * WIDTH / 2), height=HEIGHT + lane + 0.6)
    parts = figure.subfigures(1, len(panels), squeeze=False)[0]
    for part, (title, points) in zip(parts, panels.items(), strict=True):
        _draw_panel(part, title, points, looks, lane / HEIGHT, is_log)
        part.axes[-1].set_xlabel(x_label, fontsize=8)
    shown = {line.get_label(): line for part in parts for line in part.axes[-1].lines}
    add_legend(figure, {label_of(arm): shown[arm] for arm in arms if arm in shown})
    return figure


def _draw_panel(
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
            if not point.has_interval:
                runs = [found.x for found in point.reached]
                axes.plot([place] * len(runs), runs, ".", color=look.colour, markersize=3, alpha=0.6)
            elif np.isfinite(point.steps.low):
                low = max(point.steps.low, min(1.0, point.steps.value))  # the axis may be logarithmic
                axes.plot([place] * 2, [low, point.steps.high], color=look.colour, linewidth=1)
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


def _scale_steps(axes: Axes) -> None:
    """A logarithmic y axis; with a linear part down to 0 if there are runs that begin at the level."""
    steps = np.concatenate([np.zeros(0), *(line.get_ydata() for line in axes.lines)])
    positive = steps[steps > 0]
    if positive.size == steps.size:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        if not steps.size:
            axes.set_ylim(1, 100)
        return
    linear = 10 ** max(np.floor(np.log10(positive.min())), 0) if positive.size else 1.0
    axes.set_yscale("symlog", linthresh=linear, linscale=0.5)
    axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=linear, subs=(1, 2, 5)))
    axes.set_ylim(-0.3 * linear, max(1.3 * steps.max(), 10 * linear))


def _finish_reached(lane: Axes, axes: Axes, arms: int) -> None:
    style(axes)
    _scale_steps(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"generator steps to {LEVEL:g}", fontsize=8)
    lane.set_ylim(arms - 0.3, -0.7)
    lane.set_yticks([])
    lane.set_ylabel("not reached", fontsize=7, color=GREY, rotation=0, ha="right", va="center")
    lane.set_facecolor("#F4F4F4")
    lane.spines[["top", "right", "left", "bottom"]].set_visible(False)
    lane.tick_params(axis="x", which="both", length=0, labelbottom=False)
