"""Plot of accuracy against the number of samples, with one panel per set. Takes results; writes a PNG file."""

import io
import os
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tango_jax.evaluation.results import SetResult
from tango_jax.evaluation.tables import title_of
from tango_jax.runtime.atomic import write_atomically
from tango_jax.tracking.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION

# Colour, line and marker each tell the rules apart.
STYLES = {
    "pass": ("oracle", GREY, ":", "x"),
    "majority": ("majority vote", BLUE, "--", "s"),
    "best_of_by_verdict": ("best of k by verdict", VERMILION, "-", "o"),
    "best_of_by_steps": ("best of k by steps", ORANGE, "-", "^"),
    "vote_by_verdict": ("vote weighted by verdict", GREEN, "-.", "D"),
    "vote_by_steps": ("vote weighted by steps", PURPLE, "-.", "v"),
}
PANEL_INCHES, MAX_COLUMNS, DPI = (3.6, 3.2), 4, 150


def plot_samples(results: Sequence[SetResult], path: str | os.PathLike) -> bool:
    """Plot the sets that have several samples; write no file and return False if there are none."""
    curves = {result.name: _curves(result) for result in results}
    curves = {name: by_rule for name, by_rule in curves.items() if by_rule}
    if not curves:
        return False
    columns = min(MAX_COLUMNS, len(curves))
    lines = -(-len(curves) // columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(max(2, columns) * width, lines * height + 0.9), dpi=DPI, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (name, by_rule) in zip(panels, curves.items(), strict=False):
        _draw(axes, title_of(name), by_rule)
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    write_atomically(path, picture.getvalue())
    return True


def _draw(axes: Axes, title: str, by_rule: dict[str, list[tuple[int, float, float, float]]]) -> None:
    for rule, points in by_rule.items():
        label, colour, line, marker = STYLES[rule]
        ks, values, lows, highs = zip(*points, strict=True)
        axes.plot(ks, values, color=colour, linestyle=line, marker=marker, markersize=4, linewidth=1.5, label=label)
        if rule == "majority":  # one band: six of them would hide each other
            axes.fill_between(ks, lows, highs, color=colour, alpha=0.12, linewidth=0, label="its 95 % interval")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("samples of a problem")
    axes.set_ylabel("accuracy, %")
    axes.grid(alpha=0.25)


def _curves(result: SetResult) -> dict[str, list[tuple[int, float, float, float]]]:
    """Return (k, percent, low, high) by rule, without rules that have fewer than two numbers of samples."""
    curves = {rule: [(m.k, *(100 * part for part in m.estimate)) for m in result.metrics if m.name == rule]
              for rule in STYLES}
    return {rule: points for rule, points in curves.items() if len(points) > 1}
