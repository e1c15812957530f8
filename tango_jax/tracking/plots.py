"""Figures for a README: the curves of one run, and the arms of an ablation side by side.

Takes rows of metrics.jsonl as dicts and writes PNG files 1200 pixels wide, after a run. Metrics that a run did not log,
and runs with at most one point, leave a gap instead of raising an error.
"""

import io
import os
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tango_jax.arms import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, Look
from tango_jax.runtime.atomic import write_atomically
from tango_jax.tracking.curves import MARKERS, Series, label_of, looks_of, over_seeds, series, smooth

ABLATION_PANELS = [
    ("generator/accuracy", "Generator: accuracy"),
    ("verifier/pool/step_f1", "Verifier: step F1"),
    ("verifier/pool/outcome_f1", "Verifier: outcome F1"),
]
SIZE_INCHES, DPI = (8.0, 3.3), 150
LEAST_SPAN = 0.2  # minimum range of a score's axis, so that a flat curve looks flat
MAX_MARKERS = 12


def plot_curves(metrics_rows: Sequence[dict], path: str | os.PathLike, title: str) -> None:
    """Plot one run: the generator's accuracy, the verifier's F1 on the fixed pool, and the verifier's verdicts."""
    figure, (left, middle, right) = make_figure(title)
    _draw_generator(left, metrics_rows)
    _draw_verifier_f1(middle, metrics_rows)
    if series(metrics_rows, {"warmup", "verifier"}, "step", "verifier/rate_correct").x.size:
        _draw_verdicts(right, metrics_rows)
    else:
        _draw_entropy(right, metrics_rows)
    for axes in (left, middle, right):
        finish_axes(axes)
        if axes.lines:
            axes.legend(fontsize=7.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), handlelength=2.4,
                        labelspacing=0.3)
    for axes in (left, middle):
        _limit_scores(axes)
    save_figure(figure, path)


def plot_ablation(runs: dict[str, dict[int, list[dict]]], path: str | os.PathLike) -> None:
    """Plot the arms over generator steps, like figure 4 of the paper: mean over seeds, with a min-max band."""
    figure, panels = make_figure()
    looks = looks_of(runs)
    drawn = {}
    for axes, (name, heading) in zip(panels, ABLATION_PANELS, strict=True):
        axes.set_title(heading)
        axes.set_xlabel("generator step (below 0: warm-up)")
        for arm in reversed(runs):  # so that the first arm is drawn last, on top
            x, values = over_seeds(runs[arm].values(), name)
            if x.size:
                drawn[arm] = _draw_arm(axes, x, values, looks[arm])
        finish_axes(axes)
        _limit_scores(axes)
    if drawn:
        arms = [arm for arm in runs if arm in drawn]
        figure.legend([drawn[arm] for arm in arms], [label_of(arm) for arm in arms], fontsize=8,
                      loc="outside lower center", ncols=min(len(arms), 3), frameon=False, handlelength=3.4)
    save_figure(figure, path)


def _draw_generator(axes: Axes, rows: Sequence[dict]) -> None:
    axes.set_title("Generator")
    axes.set_xlabel("generator step")
    _noisy(axes, series(rows, {"generator"}, "generator_step", "generator/reward/outcome"), GREY,
           "right answers, sampled in training")
    accuracy = series(rows, {"eval"}, "generator_step", "generator/accuracy")
    _line(axes, accuracy, VERMILION, "-", "o", "greedy accuracy, held out")


def _draw_verifier_f1(axes: Axes, rows: Sequence[dict]) -> None:
    axes.set_title("Verifier on the fixed pool")
    axes.set_xlabel("training step (both roles)")
    _line(axes, series(rows, {"eval"}, "step", "verifier/pool/outcome_f1"), BLUE, "--", "s", "outcome macro-F1")
    _line(axes, series(rows, {"eval"}, "step", "verifier/pool/step_f1"), GREEN, "-", "^", "step macro-F1")
    _shade_warmup(axes, rows, label="warm-up")


def _draw_verdicts(axes: Axes, rows: Sequence[dict]) -> None:
    axes.set_title("Verifier's verdicts in training")
    axes.set_xlabel("training step (both roles)")
    for name, colour, style, label in [
        ("verifier/reward/correctness", GREEN, "-", "agrees with the grader"),
        ("verifier/rate_correct", BLUE, "--", "says CORRECT"),
        ("verifier/rate_invalid", VERMILION, ":", "INVALID"),
    ]:
        _noisy(axes, series(rows, {"warmup", "verifier"}, "step", name), colour, label, style)
    _shade_warmup(axes, rows)


def _draw_entropy(axes: Axes, rows: Sequence[dict]) -> None:
    axes.set_title("Generator: entropy and KL")
    axes.set_xlabel("generator step")
    for name, colour, style, label in [("generator/entropy", PURPLE, "-", "entropy (nats per token)"),
                                       ("generator/kl", ORANGE, "--", "KL to the reference")]:
        _noisy(axes, series(rows, {"generator"}, "generator_step", name), colour, label, style)


def _draw_arm(axes: Axes, x: np.ndarray, values: np.ndarray, look: Look):
    """Draw the mean over the seeds of `values` [seed, point], and the band between the lowest and the highest seed."""
    if len(values) > 1:
        axes.fill_between(x, values.min(0), values.max(0), color=look.colour, alpha=0.15, linewidth=0)
    return _line(axes, Series(x, values.mean(0)), look.colour, look.dash, MARKERS[look.marker])


def _line(axes: Axes, curve: Series, colour: str, style: str, marker: str, label: str | None = None):
    if not curve.x.size:
        return None
    every = max(1, len(curve.x) // MAX_MARKERS)
    return axes.plot(curve.x, curve.y, color=colour, linestyle=style, marker=marker, markevery=every, label=label)[0]


def _noisy(axes: Axes, curve: Series, colour: str, label: str, style="-") -> None:
    """Draw a per-batch metric: the raw values faintly, and their running mean on top."""
    if not curve.x.size:
        return
    axes.plot(curve.x, curve.y, color=colour, alpha=0.22, linewidth=0.7)
    marker = "." if len(curve.x) == 1 else None
    axes.plot(curve.x, smooth(curve.y), color=colour, linestyle=style, marker=marker, label=label)


def _shade_warmup(axes: Axes, rows: Iterable[dict], label: str = "") -> None:
    steps = [row["step"] for row in rows if row.get("phase") == "warmup" and row.get("step") is not None]
    if steps:
        axes.axvspan(0, max(steps), color="black", alpha=0.06, linewidth=0)
        axes.text(max(steps) / 2, 0.98, label, rotation=90, ha="center", va="top", fontsize=7, color=GREY,
                  transform=axes.get_xaxis_transform())


def make_figure(title: str | None = None, num_panels: int = 3) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure, its panels side by side."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10, fontweight="bold")
    return figure, figure.subplots(1, num_panels)


def finish_axes(axes: Axes) -> None:
    """Apply the common style to a panel."""
    axes.title.set_fontsize(9)
    axes.xaxis.label.set_fontsize(8)
    axes.tick_params(labelsize=8, length=3, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlim(right=max(axes.dataLim.x1, 1.0) * 1.04 if axes.lines else 1.0)
    axes.set_xlim(left=min(axes.dataLim.x0 if axes.lines else 0.0, 0.0) - 0.04 * axes.get_xlim()[1])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    for line in axes.lines:
        line.set_markersize(3.5)
        line.set_linewidth(min(line.get_linewidth(), 1.6))
    if not axes.lines:
        axes.text(0.5, 0.5, "not logged by this run", transform=axes.transAxes, ha="center", va="center", fontsize=8,
                  color=GREY)


def _limit_scores(axes: Axes) -> None:
    """Set y limits for scores: never beyond 0 and 1, and never so narrow that noise looks like progress."""
    if not axes.lines:
        return
    low, high = axes.get_ylim()
    spare = max(LEAST_SPAN - (high - low), 0.0) / 2
    low, high = max(low - spare, -0.02), min(high + spare, 1.02)
    axes.set_ylim(min(low, high - LEAST_SPAN), max(high, low + LEAST_SPAN))


def save_figure(figure: Figure, path: str | os.PathLike) -> None:
    """Write a figure as PNG, whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor="white")
    write_atomically(path, picture.getvalue())
