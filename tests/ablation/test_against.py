"""Arms of several settings against one of them: numbers worked by hand, what is marked, and what is refused."""

import pytest

from support.ablation_cases import run_rows
from tango_jax.ablation.against import compare
from tango_jax.ablation.figures import learning

SLOW, FAST = (0.0, 0.2, 0.4), (0.0, 0.4, 0.8)


def rows() -> list:
    """The baseline from two starts, and beside it in another setting an arm that samples twice the tokens."""
    found = []
    for start in (1, 2):
        for arm, accuracy in (("grpo", SLOW), ("gold_steps", FAST)):
            found += run_rows(arm, accuracy, start=start, setup="one")
        found += [row._replace(sampled_tokens=2 * row.sampled_tokens, setting="trust=on", setup="two")
                  for row in run_rows("tango", (*FAST[:-1], FAST[-1] + 0.08 * start), start=start)]  # fmt: skip
    return found


def cells(table: str, first: str) -> list[str]:
    [line] = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_arms_of_all_settings_are_compared_over_steps_and_over_equal_tokens():
    table, _ = compare(learning(rows()), "grpo")
    assert "mean over 2k tokens" in table  # 20 steps of 100 tokens
    assert cells(table, "grpo") == ["grpo", "2", "0.000", "0.200 (0.200 0.200)", "", "", "0.200 (0.200 0.200)", "",
                                    "0.400", "2", ""]  # fmt: skip
    # Over steps: (10 * 0.2 + 10 * (0.4 + 0.88) / 2) / 20 and, ending at 0.96, 0.44. Over the first 2,000 of its 4,000
    # tokens it goes from 0 to 0.4.
    tango = cells(table, "tango, trust=on †")
    assert tango[3:5] == ["0.430 (0.420 0.440)", "+0.230"]
    assert [tango[6], *tango[8:10]] == ["0.200 (0.200 0.200)", "0.920", "4"] and tango[7][1:] == "0.000"
    assert tango[5] == "1.15"  # of the gap from 0.2 to 0.4
    assert cells(table, "gold_steps")[4:6] == ["+0.200", "1"]
    # 0.8 is reached after 1,000 + 2,000 * 0.4 / 0.48 = 3,667 tokens and 3,429; the baseline never reaches it in 2,000.
    assert tango[-1] == "≤ 1.774"


def test_arms_that_differ_in_the_arm_alone_are_not_marked():
    table, _ = compare(learning(rows()), "grpo")
    assert "| gold_steps |" in table and "| tango, trust=on † |" in table


def test_the_figure_has_a_row_for_each_arm_and_a_panel_for_each_measure():
    table, figure = compare(learning(rows()), "tango:trust=on")
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(names) == 3 and names[-1].endswith("trust=on")
    assert len(figure.axes) == 3
    means = [[float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() not in ("|", "None")]
             for axes in figure.axes]  # fmt: skip
    # Arms in the order of the table; the reference has no difference from itself.
    shown = [cells(table, name) for name in ("grpo †", "gold_steps †", "tango, trust=on")]
    assert means[0] == pytest.approx([float(row[3].split()[0]) for row in shown], abs=0.001)
    assert means[2] == pytest.approx([float(row[4].split()[0]) for row in shown[:2]], abs=0.001)


@pytest.mark.parametrize("against, told", [
    ("nobody", "--against=nobody names none of the arms and settings: choose one of grpo, gold_steps, tango:trust=on"),
    ("tango:trust=off", "--against=tango:trust=off names none"),
])  # fmt: skip
def test_a_reference_that_is_not_there_is_refused(against, told):
    with pytest.raises(ValueError, match=told):
        compare(learning(rows()), against)


def test_a_reference_in_several_settings_needs_its_own():
    def in_settings(*settings):
        others, own = ([row for row in rows() if (row.arm == "grpo") == is_own] for is_own in (False, True))
        return learning(others + [row._replace(setting=setting) for setting in settings for row in own])

    with pytest.raises(ValueError, match="--against=grpo names 2 of the arms and settings: choose one of.*, grpo:b"):
        compare(in_settings("a", "b"), "grpo")
    # The one without a setting has no other name.
    table, _ = compare(in_settings("", "b"), "grpo")
    assert cells(table, "grpo")[4] == "" and cells(table, "grpo, b")[4] == "+0.000"


def test_runs_of_two_tasks_are_refused():
    both = rows() + [row._replace(task="math") for row in rows()]
    with pytest.raises(ValueError, match="compares runs of one task.*last_letter, math"):
        compare(learning(both), "grpo")
