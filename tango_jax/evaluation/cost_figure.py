"""The figure of an evaluation with a verifier: accuracy of the rules over sampled tokens and over FLOPs. The two rules
by approved steps are in the tables alone."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from tango_jax.evaluation.measures import Metric, SetResult
from tango_jax.method.arms import BLACK, BLUE, GREEN, VERMILION, Look
from tango_jax.tracking.curves import Series
from tango_jax.tracking.plots import HEIGHT, WIDTH, add_legend, draw_line, make_figure, style

LOOKS = {
    "majority": Look(BLACK, ":", "circle"),
    "best_of_by_verdict": Look(BLUE, "--", "square"),
    "vote_by_verdict": Look(BLUE, "-", "square"),
    "best_of_by_probability": Look(GREEN, "--", "triangle-up"),
    "vote_by_probability": Look(GREEN, "-", "triangle-up"),
    "best_of_by_scored": Look(VERMILION, "--", "diamond"),
    "vote_by_scored": Look(VERMILION, "-", "diamond"),
}
PANELS = {"tokens": "sampled tokens a problem", "flops": "FLOPs a problem"}


def draw_costs(results: Sequence[SetResult], labels: Mapping[str, str]) -> Figure | None:
    """A row for each set whose samples were judged; None without one. `labels`: of the rules."""
    sets = {result.name: [metric for metric in result.metrics if metric.cost and metric.name in LOOKS]
            for result in results}
    sets = {name: points for name, points in sets.items()
            if any(point.name != "majority" and point.k > 1 for point in points)
            and all(point.cost.tokens > 0 for point in points)}  # 0: no prompt was short enough
    if not sets:
        return None
    figure, drawn = make_figure(width=WIDTH, height=HEIGHT * len(sets) + 0.8), {}
    for (name, points), row in zip(sets.items(), figure.subplots(len(sets), len(PANELS), squeeze=False), strict=True):
        for axes, measure in zip(row, PANELS, strict=True):
            drawn |= _draw(axes, points, measure, labels)
        row[0].set_ylabel(f"accuracy, {name}", fontsize=8)
        row[1].sharey(row[0])
        row[1].tick_params(labelleft=False)
    add_legend(figure, {label: drawn[label] for rule in LOOKS if (label := labels[rule]) in drawn})
    return figure


def _draw(axes: Axes, points: Sequence[Metric], measure: str, labels: Mapping[str, str]) -> dict:
    drawn = {}
    for rule, look in LOOKS.items():
        own = [point for point in points if point.name == rule]
        if own:
            x, y = [getattr(point.cost, measure) for point in own], [point.estimate.value for point in own]
            drawn[labels[rule]] = draw_line(axes, Series(x, y), look)
    style(axes)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(PANELS[measure], fontsize=8)
    return drawn
