"""Mean accuracy against a number in which settings differ, such as the turns of the warm-up: `along_<axis>.png`.

In: curves by setting. Out: a figure for each axis of the grid with enough numbers. An arm of a setting without that
axis, such as a baseline that the number says nothing of, is a line across the panel.
"""

from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from tango_jax.ablation.families import Settings, pairs_of, title_of
from tango_jax.ablation.summary import in_order
from tango_jax.method.arms import Look
from tango_jax.tracking.curves import label_of, looks_of
from tango_jax.tracking.intervals import Unit
from tango_jax.tracking.learning_curve import Band, Curves, band_of_values, mean_accuracy
from tango_jax.tracking.plots import HEIGHT, WIDTH, add_legend, draw_band, make_figure, style

LEAST = 4  # numbers of an axis
DASHES = ("-", "--", ":", "-.")


def draw_along(settings: Settings) -> Iterator[tuple[str, Figure]]:
    """(axis, figure) of every task and axis."""
    for task in dict.fromkeys(task for task, _ in settings):
        members = {setting: arms for (name, setting), arms in settings.items() if name == task}
        for axis in dict.fromkeys(axis for setting in members for axis in pairs_of(setting)):
            lines, across = _lines(members, axis)
            numbers = sorted({x for points in lines.values() for x in points})
            if len(numbers) >= LEAST:
                yield axis, _draw(title_of(task, ""), axis, numbers, lines, across)


Line = tuple[str, str]  # an arm, and the setting without the axis


def _lines(members: dict, axis: str) -> tuple[dict[Line, dict[float, Curves]], dict[Line, Curves]]:
    """The arms along an axis, {line: {number: curves}}, and those of settings without it."""
    lines, across = {}, {}
    for setting, arms in members.items():
        pairs = pairs_of(setting)
        rest = ",".join(f"{name}={value}" for name, value in pairs.items() if name != axis)
        for arm in in_order(arms):
            if axis not in pairs:
                across[arm, rest] = arms[arm]
            elif _is_number(pairs[axis]):
                lines.setdefault((arm, rest), {})[float(pairs[axis])] = arms[arm]
    return lines, across


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _draw(
    title: str, axis: str, numbers: list[float], lines: dict[Line, dict[float, Curves]], across: dict[Line, Curves]
) -> Figure:
    looks = looks_of(list(dict.fromkeys(arm for arm, _ in [*lines, *across])))
    rests = list(dict.fromkeys(rest for _, rest in lines))
    figure = make_figure(f"{title}: mean accuracy over the run\nshaded: 95 % interval (t), or the range of few starts",
                         WIDTH, HEIGHT + 0.4)  # fmt: skip
    panel, drawn = figure.subplots(), {}
    ends = (numbers[0], numbers[-1])
    # Only runs that there are at every number make a line.
    lines = {name: points for name, points in lines.items() if _shared_units(points)}
    for (arm, rest), curves in across.items():
        drawn[_label(arm, rest)] = draw_band(panel, _band({end: curves for end in ends}), looks[arm])
    for (arm, rest), points in lines.items():
        dash = DASHES[rests.index(rest) % len(DASHES)]
        look = Look(looks[arm].colour, dash, looks[arm].marker)
        drawn[_label(arm, rest)] = draw_band(panel, _band(points), look)
    style(panel)
    panel.set_ylim(0.0, 1.0)
    panel.set_xticks(numbers, [f"{number:g}" for number in numbers])
    panel.set_xlabel(axis.replace("_", " "), fontsize=8)
    panel.set_ylabel("mean accuracy over the generator steps", fontsize=8)
    add_legend(figure, drawn)
    return figure


def _band(points: dict[float, Curves]) -> Band:
    """Over the runs that there are at every number."""
    numbers, units = sorted(points), _shared_units(points)
    values_UA = np.array([[mean_accuracy(points[number][unit]) for number in numbers] for unit in units])
    return band_of_values(units, np.array(numbers), values_UA)


def _shared_units(points: dict[float, Curves]) -> list[Unit]:
    return [unit for unit in next(iter(points.values())) if all(unit in curves for curves in points.values())]


def _label(arm: str, rest: str) -> str:
    return label_of(arm) + (f", {rest.replace(',', ', ')}" if rest else "")
