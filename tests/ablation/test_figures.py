"""Figures from a small table made by hand: which files there are, and the numbers that are drawn."""

import struct

import pytest

from support.ablation_cases import evaluation, run_rows
from tango_jax.ablation import figures
from tango_jax.ablation.figures import draw_figures

FAST, SLOW, NEVER = (0.0, 0.9, 1.0), (0.0, 0.4, 0.9), (0.0, 0.1, 0.2)


def judged(rows: list, f1: float) -> list:
    return [row._replace(verifier_step_f1=f1, verifier_live_step_f1=f1 - 0.1) for row in rows]


def table() -> list:
    rows = []
    for seed in (0, 1):
        for words, rate, method, baseline in (("4", 0.3, FAST, FAST), ("16", 0.0, SLOW, NEVER)):
            other = {"seed": seed, "setting": f"words={words}", "sampled_accuracy": rate}
            rows += judged(run_rows("tango", method, **other), 0.9) + run_rows("grpo", baseline, **other)
        rows += judged(run_rows("tango", NEVER, seed=seed, setting="words=16,verifier=weak"), 0.5)
        rows += run_rows("tango", FAST, seed=seed, setting="words=16,alpha=constant")
    return rows


def png_size(path) -> tuple[int, int]:
    """Width and height from the header of a PNG file."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.fixture
def drawn(monkeypatch):
    """Figures by the name of their file, in place of the files."""
    found = {}
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: found.update({path.name: figure}))
    return found


@pytest.mark.filterwarnings("error")  # matplotlib's, numpy's
def test_all_figures_are_drawn(tmp_path):
    files = draw_figures(table(), tmp_path)
    assert sorted(path.name for path in files) == sorted([
        "curves_last_letter_words=4.png", "curves_last_letter_words=16.png",
        "curves_last_letter_words=16,verifier=weak.png", "curves_last_letter_words=16,alpha=constant.png",
    ])
    # With a panel for what the method is ahead of the baseline, where both are there.
    assert {path.name for path in files if png_size(path)[0] == 1500} == {
        "curves_last_letter_words=4.png", "curves_last_letter_words=16.png"}
    assert {png_size(path)[0] for path in files} == {1200, 1500}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rows, names", [
    ([], []),
    ([evaluation(0, 0.5)], []),  # the generator never moved
    (run_rows("grpo", NEVER), ["curves_last_letter.png"]),
    ([row._replace(setting=f"words={words}", task=r"a b/c.py:make") for words in (1, 2) for row in
      run_rows("my_arm", NEVER, verifier_step_f1=None)],
     ["curves_c.py_make_words=1.png", "curves_c.py_make_words=2.png"]),
], ids=["nothing", "one point", "one run", "unknown"])
def test_figures_are_drawn_whatever_is_missing(tmp_path, rows, names):
    assert [path.name for path in draw_figures(rows, tmp_path)] == names


def lines_of(axes, label=None) -> list:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
            if label is None or line.get_label() == label]


def test_curves_over_steps_and_tokens(drawn, tmp_path):
    draw_figures(run_rows("grpo", SLOW), tmp_path)
    steps, tokens = drawn["curves_last_letter.png"].axes
    assert lines_of(steps)[0] == ([0, 10, 20], [0.0, 0.4, 0.9])
    assert lines_of(tokens)[0][0][-1] == 2000
    assert lines_of(tokens)[0][1][-1] == pytest.approx(0.9)
    assert drawn["curves_last_letter.png"].get_suptitle().startswith("last_letter: 1 start (3), 1 seed (0)\n")
    assert [text.get_text() for text in drawn["curves_last_letter.png"].legends[0].get_texts()] == [
        "GRPO (no verifier) (1 run)"]


def test_a_run_without_a_generator_step_is_left_out_of_the_curves_and_counted(drawn, tmp_path):
    draw_figures([*run_rows("grpo", SLOW), *run_rows("grpo", SLOW[:1], seed=1)], tmp_path)
    figure = drawn["curves_last_letter.png"]
    assert lines_of(figure.axes[0])[0] == ([0, 10, 20], [0.0, 0.4, 0.9])
    assert figure.get_suptitle().endswith("\nLeft out, without a generator step: 1 of 2 runs of grpo.")


def test_a_panel_says_what_the_method_is_ahead(drawn, tmp_path):
    draw_figures(table(), tmp_path)
    assert drawn["curves_last_letter_words=16.png"].get_suptitle().startswith("last_letter, words=16: ")
    *by_arm, ahead = drawn["curves_last_letter_words=16.png"].axes
    assert [len(axes.lines) for axes in by_arm] == [3, 3]  # two arms and the level
    assert lines_of(ahead)[0] == ([0, 10, 20], pytest.approx([0.0, 0.3, 0.7]))  # SLOW minus NEVER
    assert ahead.get_title() == "mean over 20 steps +0.325\nshaded: range"
    assert ahead.get_ylabel() == "tango minus grpo, 2 pairs"


def test_a_few_starts_are_drawn_as_a_range_and_the_difference_with_an_interval(drawn, tmp_path):
    rows = []
    for start in (1, 2, 3):
        for seed in (0, 1):
            gain = 0.1 * start
            rows += run_rows("tango", (0.0, gain, gain), start=start, seed=seed)
            rows += run_rows("grpo", (0.0, 0.0, 0.0), start=start, seed=seed)
    draw_figures(rows, tmp_path)
    figure = drawn["curves_last_letter.png"]
    assert figure.get_suptitle().startswith("last_letter: 3 starts (1, 2, 3), 2 seeds (0, 1)\n")
    low, high = (bound(figure.axes[0].collections[-1].get_paths()[0].vertices[:, 1]) for bound in (min, max))
    assert (low, high) == pytest.approx((0.0, 0.3))  # of tango, on top
    # 0.075, 0.15 and 0.225 over the run: deviation 0.075, and 4.3027 for two degrees of freedom.
    assert figure.axes[-1].get_title() == "mean over 20 steps +0.150 [-0.036, +0.336]\nshaded: 95 % interval (t)"
