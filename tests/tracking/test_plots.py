"""Figures: the numbers that are drawn, and files that are written whatever a run did not log."""

import struct

import numpy as np
import pytest

from tango_jax.tracking import curves
from tango_jax.tracking.plots import plot_curves, save_figure


def eval_row(step: int, accuracy: float | None, **more) -> dict:
    return {"step": 10 + step, "phase": "eval", "generator_step": step, "generator/accuracy": accuracy, **more}


def png_size(path) -> tuple[int, int]:
    """Width and height from the header of a PNG file."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_series_keeps_complete_points_in_order():
    rows = [eval_row(4, 0.5), eval_row(0, 0.25), eval_row(2, None), {"step": 3, "phase": "eval"},
            {"step": 9, "phase": "generator", "generator_step": 9, "generator/accuracy": 1.0}, eval_row(4, 0.75)]
    series = curves.series(rows, {"eval"}, "generator_step", "generator/accuracy")
    assert (series.x.tolist(), series.y.tolist()) == ([0, 4], [0.25, 0.75])


def test_seeds_are_compared_where_all_have_a_point():
    seeds = [[eval_row(0, 0.1), eval_row(5, 0.2), eval_row(10, 0.3)], [eval_row(0, 0.3), eval_row(10, 0.5)],
             [{"step": 0, "phase": "eval", "generator_step": 0}]]
    x, values = curves.over_seeds(seeds, "generator/accuracy")
    assert x.tolist() == [0, 10]
    assert values.tolist() == [[0.1, 0.3], [0.3, 0.5]]


def test_the_start_of_a_warmup_is_drawn_before_the_first_step():
    rows = [eval_row(-10, 0.1) | {"generator_step": 0}, eval_row(0, 0.2), eval_row(5, 0.3)]  # turns 0, 10 and 15
    x, values = curves.over_seeds([rows], "generator/accuracy")
    assert (x.tolist(), values.tolist()) == ([-10, 0, 5], [[0.1, 0.2, 0.3]])


def test_running_mean_keeps_both_ends():
    y = np.zeros(24)
    y[[0, 12, 23]] = [6.0, 3.0, 9.0]
    smooth = curves.smooth(y)  # 24 points: a window of one point to either side
    assert smooth[[0, 1, 11, 12, 13, 22, 23]].tolist() == [6.0, 2.0, 1.0, 1.0, 1.0, 3.0, 9.0]


FULL = [eval_row(0, 0.2, **{"verifier/pool/step_f1": 0.4, "verifier/pool/outcome_f1": 0.5}), eval_row(5, 0.4),
        {"step": 1, "phase": "warmup", "verifier/reward/correctness": 0.5, "verifier/rate_correct": 0.9,
         "verifier/rate_invalid": None},
        {"step": 2, "phase": "generator", "generator_step": 1, "generator/reward/outcome": 0.3, "generator/kl": 0.0}]


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")  # matplotlib's, numpy's
@pytest.mark.parametrize("rows", [[], FULL[:1], FULL[3:], FULL], ids=["empty", "one point", "no eval", "full"])
def test_curves_are_drawn_whatever_is_missing(tmp_path, rows):
    path = tmp_path / "figures" / "curves.png"
    save_figure(plot_curves(rows, "a run"), path)
    assert png_size(path)[0] == 1200


@pytest.mark.parametrize("accuracy, limits", [(0.0, (-0.02, 0.18)), (1.0, (0.82, 1.02)), (0.5, (0.4, 0.6))])
def test_the_axis_of_a_flat_score_stays_within_0_and_1(accuracy, limits):
    figure = plot_curves([eval_row(0, accuracy), eval_row(5, accuracy)], "a run")
    assert figure.axes[0].get_ylim() == pytest.approx(limits)


@pytest.mark.parametrize("stops", [False, True])
def test_the_legend_tells_of_a_verifier_that_stops(stops):
    labels = [text.get_text() for text in plot_curves(FULL, "a run", stops).axes[1].get_legend().get_texts()]
    assert ("step macro-F1, steps left out are missed" in labels) == stops


def test_no_curve_runs_through_the_name_of_the_warm_up():
    """It stands in the legend, and not in the panel."""
    rows = [{"step": step, "phase": "warmup", "verifier/reward/correctness": 0.5, "verifier/rate_correct": 1.0}
            for step in range(1, 9)]
    _, f1, verdicts = plot_curves([*FULL, *rows], "a run").axes
    for axes in (f1, verdicts):
        assert not axes.texts
        assert "warm-up" in [text.get_text() for text in axes.get_legend().get_texts()]
