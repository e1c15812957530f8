"""Figures of Matplotlib: the style of all, and the curves of one run."""

import io
import os
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from tango_jax.method.arms import BLUE, GREEN, GREY, VERMILION, Look
from tango_jax.runtime.atomic import write_atomically
from tango_jax.tracking.curves import (
    MARKERS,
    Series,
    score_range,
    series,
    smooth,
)
from tango_jax.tracking.learning_curve import LEVEL, Band

WIDTH, HEIGHT, DPI = 8.0, 3.3, 150  # inches, and dots per inch
MAX_MARKERS = 12
MAX_IN_THREE = 36  # characters of a label for three columns of a legend
OVER = {"steps": "generator step", "tokens": "sampled tokens, both roles", "flops": "FLOPs, both roles"}


def make_figure(
    title: str = "", width: float = WIDTH, height: float = HEIGHT, dpi: int = DPI, layout: str = "constrained"
) -> Figure:
    figure = Figure(figsize=(width, height), dpi=dpi, layout=layout)
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10, fontweight="bold")
    return figure


def style(axes: Axes) -> None:
    axes.tick_params(labelsize=8, length=3, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def style_accuracy(axes: Axes, over: str) -> None:
    style(axes)
    axes.axhline(LEVEL, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_xlabel(OVER[over], fontsize=8)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=over == "steps"))
    if over != "steps":
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))


def draw_line(axes: Axes, curve: Series, look: Look, label: str | None = None, width: float = 1.6) -> Line2D:
    every = max(1, len(curve.x) // MAX_MARKERS)
    [line] = axes.plot(curve.x, curve.y, color=look.colour, linestyle=look.dash, marker=MARKERS[look.marker],
                       markevery=every, markersize=3.5, linewidth=width, label=label)
    return line


def draw_band(axes: Axes, band: Band, look: Look) -> Line2D:
    axes.fill_between(band.x, band.low, band.high, color=look.colour, alpha=0.15, linewidth=0)
    return draw_line(axes, Series(band.x, band.mean), look)


def add_legend(figure: Figure, drawn: Mapping[str, Artist]) -> None:
    if drawn:
        columns = 3 if max(map(len, drawn)) <= MAX_IN_THREE else 2
        figure.legend(drawn.values(), drawn.keys(), fontsize=8, loc="outside lower center", frameon=False,
                      ncols=min(len(drawn), columns), handlelength=3.4)


def png_of(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi="figure", facecolor="white")
    return picture.getvalue()


def save_figure(figure: Figure, path: str | os.PathLike) -> None:
    write_atomically(path, png_of(figure))


# Figures of metrics.


def plot_curves(metrics_rows: Sequence[dict], title: str, stops: bool = False) -> Figure:
    """One run: the generator's accuracy, the verifier's F1 on the fixed pool, and its verdicts. `stops`: its
    verifications end at their first error."""
    figure = make_figure(title)
    left, middle, right = figure.subplots(1, 3)
    _draw_generator(left, metrics_rows)
    _draw_verifier_f1(middle, metrics_rows, "step macro-F1" + ", steps left out are missed" * stops)
    _draw_verdicts(right, metrics_rows)
    for axes in (left, middle, right):
        _finish(axes, are_scores=axes is not right)
        if axes.lines:
            axes.legend(fontsize=7.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), handlelength=2.4,
                        labelspacing=0.3)
    return figure


def _draw_generator(axes: Axes, rows: Sequence[dict]) -> None:
    axes.set_title("Generator")
    axes.set_xlabel("generator step")
    _noisy(axes, series(rows, {"generator"}, "generator_step", "generator/reward/outcome"), GREY,
           "right answers, sampled in training")
    _evaluated(axes, series(rows, {"eval"}, "generator_step", "generator/accuracy"), Look(VERMILION, "-", "circle"),
               "greedy accuracy, held out")


def _draw_verifier_f1(axes: Axes, rows: Sequence[dict], of_steps: str) -> None:
    axes.set_title("Verifier on the fixed pool")
    axes.set_xlabel("training step (both roles)")
    for name, look, label in [("outcome_f1", Look(BLUE, "--", "square"), "outcome macro-F1"),
                              ("step_f1", Look(GREEN, "-", "triangle-up"), of_steps)]:
        _evaluated(axes, series(rows, {"eval"}, "step", f"verifier/pool/{name}"), look, label)
    _shade_warmup(axes, rows)


def _draw_verdicts(axes: Axes, rows: Sequence[dict]) -> None:
    axes.set_title("Verifier's verdicts in training")
    axes.set_xlabel("training step (both roles)")
    phases, prefixes = {"warmup", "verifier"}, ("",)
    agrees = "reward/correctness", "agrees with the grader"
    if not any(row.get("phase") in phases for row in rows):  # it judges in the generator's turns alone
        phases, prefixes = {"generator"}, ("live_", "judged_")
        agrees = "outcome_balanced_accuracy", "balanced accuracy"
    for (name, label), colour, dash in [
        (agrees, GREEN, "-"),
        (("rate_correct", "says CORRECT"), BLUE, "--"),
        (("rate_invalid", "INVALID"), VERMILION, ":"),
    ]:
        for prefix in prefixes:
            part = f"{label}, of those judged" if prefix == "judged_" else label
            _noisy(axes, series(rows, phases, "step", f"verifier/{prefix}{name}"), colour, part, dash)
    _shade_warmup(axes, rows)


def _evaluated(axes: Axes, curve: Series, look: Look, label: str) -> None:
    if curve.x.size:
        draw_line(axes, curve, look, label)


def _noisy(axes: Axes, curve: Series, colour: str, label: str, dash: str = "-") -> None:
    if not curve.x.size:
        return
    axes.plot(curve.x, curve.y, color=colour, alpha=0.22, linewidth=0.7)
    marker = "." if len(curve.x) == 1 else None
    axes.plot(curve.x, smooth(curve.y), color=colour, linestyle=dash, marker=marker, markersize=3.5, label=label)


def _shade_warmup(axes: Axes, rows: Iterable[dict]) -> None:
    steps = [row["step"] for row in rows if row.get("phase") == "warmup" and row.get("step") is not None]
    if steps:
        axes.axvspan(0, max(steps), color="black", alpha=0.06, linewidth=0, label="warm-up")


def _finish(axes: Axes, are_scores: bool) -> None:
    style(axes)
    axes.title.set_fontsize(9)
    axes.xaxis.label.set_fontsize(8)
    axes.set_xlim(right=max(axes.dataLim.x1, 1.0) * 1.04 if axes.lines else 1.0)
    axes.set_xlim(left=min(axes.dataLim.x0 if axes.lines else 0.0, 0.0) - 0.04 * axes.get_xlim()[1])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    if not axes.lines:
        axes.text(0.5, 0.5, "not logged by this run", transform=axes.transAxes, ha="center", va="center", fontsize=8,
                  color=GREY)
    elif are_scores:
        axes.set_ylim(score_range(*axes.get_ylim()))
