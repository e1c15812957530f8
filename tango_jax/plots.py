"""Figures for a README: the curves of one run, and the arms of an ablation side by side.

In: rows of metrics.jsonl as dicts. Out: PNG files 1200 pixels wide. Stage: after a run. Names that a run did not log,
and runs with one point or none, leave a gap and no error.
"""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe-Ito colours, told apart by readers who are colour-blind; the line style repeats the difference for print.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6E6E6E")
ARM_LABELS = {
    "tango": "Tango (trained together)", "grpo": "GRPO (no verifier)", "fixed_verifier": "fixed verifier",
    "fixed_verifier_warm": "fixed verifier, warmed up",
    "fixed_generator": "fixed generator", "gold_steps": "gold step labels",
}
ARM_STYLES = {
    "tango": (VERMILION, "-", "o"), "grpo": (BLUE, "--", "s"), "fixed_verifier": (GREEN, "-.", "^"),
    "fixed_generator": (PURPLE, ":", "D"), "gold_steps": (ORANGE, (0, (5, 1, 1, 1, 1, 1)), "v"),
}
SPARE_STYLES = [(SKY, "-", "P"), (GREY, "--", "X"), ("black", ":", "*")]
ABLATION_PANELS = [
    ("generator/accuracy", "Generator: accuracy"),
    ("verifier/pool/step_f1", "Verifier: step F1"),
    ("verifier/pool/outcome_f1", "Verifier: outcome F1"),
]
SIZE_INCHES, DPI = (8.0, 3.3), 150
LEAST_SPAN = 0.2  # of a score's axis: a flat curve shall look flat
SMOOTHING_SHARE = 12  # a curve is smoothed over one twelfth of its points
MAX_MARKERS = 12


class Series(NamedTuple):
    """Points of one curve, x ascending."""

    x: np.ndarray
    y: np.ndarray


def plot_curves(metrics_rows: Sequence[dict], path: str | os.PathLike, title: str) -> None:
    """Draw one run: the generator's accuracy, the verifier's F1 on the fixed pool, and the verifier's verdicts."""
    figure, (left, middle, right) = _make_figure(title)
    _draw_generator(left, metrics_rows)
    _draw_verifier_f1(middle, metrics_rows)
    if _series(metrics_rows, {"warmup", "verifier"}, "step", "verifier/rate_correct").x.size:
        _draw_verdicts(right, metrics_rows)
    else:
        _draw_entropy(right, metrics_rows)
    for axes in (left, middle, right):
        _finish(axes)
        if axes.lines:
            axes.legend(fontsize=7.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), handlelength=2.4,
                        labelspacing=0.3)
    for axes in (left, middle):
        _limit_scores(axes)
    _save(figure, path)


def plot_ablation(runs: dict[str, dict[int, list[dict]]], path: str | os.PathLike) -> None:
    """Draw the arms over generator steps, like figure 4 of the paper: mean over seeds, band from worst to best."""
    figure, panels = _make_figure()
    spare = iter(SPARE_STYLES * (1 + len(runs)))
    styles = {arm: ARM_STYLES.get(arm) or next(spare) for arm in runs}
    drawn = {}
    for axes, (name, heading) in zip(panels, ABLATION_PANELS, strict=True):
        axes.set_title(heading)
        axes.set_xlabel("generator step (below 0: warm-up)")
        for arm in reversed(runs):  # the first arm is drawn last, on top
            x, values = _over_seeds(runs[arm].values(), name)
            if x.size:
                drawn[arm] = _draw_arm(axes, x, values, styles[arm])
        _finish(axes)
        _limit_scores(axes)
    if drawn:
        arms = [arm for arm in runs if arm in drawn]
        figure.legend([drawn[arm] for arm in arms], [ARM_LABELS.get(arm, arm) for arm in arms], fontsize=8,
                      loc="outside lower center", ncols=min(len(arms), 3), frameon=False, handlelength=3.4)
    _save(figure, path)


def _draw_generator(axes: Axes, rows: Sequence[dict]) -> None:
    axes.set_title("Generator")
    axes.set_xlabel("generator step")
    _noisy(axes, _series(rows, {"generator"}, "generator_step", "generator/reward/outcome"), GREY,
           "training reward")
    accuracy = _series(rows, {"eval"}, "generator_step", "generator/accuracy")
    _line(axes, accuracy, VERMILION, "-", "o", "greedy accuracy, held out")


def _draw_verifier_f1(axes: Axes, rows: Sequence[dict]) -> None:
    axes.set_title("Verifier on the fixed pool")
    axes.set_xlabel("training step (both roles)")
    _line(axes, _series(rows, {"eval"}, "step", "verifier/pool/outcome_f1"), BLUE, "--", "s", "outcome macro-F1")
    _line(axes, _series(rows, {"eval"}, "step", "verifier/pool/step_f1"), GREEN, "-", "^", "step macro-F1")
    _shade_warmup(axes, rows, label="warm-up")


def _draw_verdicts(axes: Axes, rows: Sequence[dict]) -> None:
    axes.set_title("Verifier's verdicts in training")
    axes.set_xlabel("training step (both roles)")
    for name, colour, style, label in [
        ("verifier/reward/correctness", GREEN, "-", "agrees with the grader"),
        ("verifier/rate_correct", BLUE, "--", "says CORRECT"),
        ("verifier/rate_invalid", VERMILION, ":", "INVALID"),
    ]:
        _noisy(axes, _series(rows, {"warmup", "verifier"}, "step", name), colour, label, style)
    _shade_warmup(axes, rows)


def _draw_entropy(axes: Axes, rows: Sequence[dict]) -> None:
    axes.set_title("Generator: entropy and KL")
    axes.set_xlabel("generator step")
    for name, colour, style, label in [("generator/entropy", PURPLE, "-", "entropy (nats per token)"),
                                       ("generator/kl", ORANGE, "--", "KL to the reference")]:
        _noisy(axes, _series(rows, {"generator"}, "generator_step", name), colour, label, style)


def _draw_arm(axes: Axes, x: np.ndarray, values: np.ndarray, style: tuple):
    """Mean over the rows of `values` [seed, point], and the band between the lowest and the highest row."""
    colour, dashes, marker = style
    if len(values) > 1:
        axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
    return _line(axes, Series(x, values.mean(0)), colour, dashes, marker)


def _line(axes: Axes, series: Series, colour: str, style, marker: str, label: str | None = None):
    if not series.x.size:
        return None
    every = max(1, len(series.x) // MAX_MARKERS)
    return axes.plot(series.x, series.y, color=colour, linestyle=style, marker=marker, markevery=every, label=label)[0]


def _noisy(axes: Axes, series: Series, colour: str, label: str, style="-") -> None:
    """A value per batch: faint as it is, and a running mean over it."""
    if not series.x.size:
        return
    axes.plot(series.x, series.y, color=colour, alpha=0.22, linewidth=0.7)
    marker = "." if len(series.x) == 1 else None
    axes.plot(series.x, _smooth(series.y), color=colour, linestyle=style, marker=marker, label=label)


def _smooth(y: np.ndarray) -> np.ndarray:
    """Centred running mean whose window shrinks at the ends, so that the first and last points are not invented."""
    half = len(y) // SMOOTHING_SHARE // 2
    sums = np.concatenate([[0.0], np.cumsum(y)])
    middle = np.arange(len(y))
    reach = np.minimum(half, np.minimum(middle, len(y) - 1 - middle))
    return (sums[middle + reach + 1] - sums[middle - reach]) / (2 * reach + 1)


def _series(rows: Iterable[dict], phases: set[str], x_name: str, y_name: str) -> Series:
    """Points that have both values, in order of x; of two with the same x the later row counts."""
    points = {row[x_name]: row[y_name] for row in rows
              if row.get("phase") in phases and row.get(x_name) is not None and row.get(y_name) is not None}
    x = sorted(points)
    return Series(np.array(x, float), np.array([points[key] for key in x], float))


def _over_seeds(seeds: Iterable[list[dict]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The x that every seed has, and the values [seed, point] there; seeds without the metric are left out."""
    curves = [_series(_from_warmup(rows), {"eval"}, "x", name) for rows in seeds]
    curves = [curve for curve in curves if curve.x.size]
    if not curves:
        return np.empty(0), np.empty((0, 0))
    x = curves[0].x
    for curve in curves[1:]:
        x = np.intersect1d(x, curve.x)
    return x, np.array([curve.y[np.isin(curve.x, x)] for curve in curves])


def _from_warmup(rows: Iterable[dict]) -> list[dict]:
    """The evaluations with an `x`: generator steps, and before the first one the verifier's warm-up, down from 0."""
    evaluations = [row for row in rows if row.get("phase") == "eval" and row.get("generator_step") is not None]
    warmup = max((row["step"] for row in evaluations if row["generator_step"] == 0), default=0)
    return [row | {"x": row["generator_step"] or row["step"] - warmup} for row in evaluations]


def _shade_warmup(axes: Axes, rows: Iterable[dict], label: str = "") -> None:
    steps = [row["step"] for row in rows if row.get("phase") == "warmup" and row.get("step") is not None]
    if steps:
        axes.axvspan(0, max(steps), color="black", alpha=0.06, linewidth=0)
        axes.text(max(steps) / 2, 0.98, label, rotation=90, ha="center", va="top", fontsize=7, color=GREY,
                  transform=axes.get_xaxis_transform())


def _make_figure(title: str | None = None) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10, fontweight="bold")
    return figure, figure.subplots(1, 3)


def _finish(axes: Axes) -> None:
    """One look for all panels."""
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
    """Limits for shares and scores: never beyond 0 and 1, and never so narrow that noise looks like progress."""
    if not axes.lines:
        return
    low, high = axes.get_ylim()
    spare = max(LEAST_SPAN - (high - low), 0.0) / 2
    low, high = max(low - spare, -0.02), min(high + spare, 1.02)
    axes.set_ylim(min(low, high - LEAST_SPAN), max(high, low + LEAST_SPAN))


def _save(figure: Figure, path: str | os.PathLike) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor="white")
