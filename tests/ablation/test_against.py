"""Arms of several settings against one of them: numbers worked by hand, what is marked, and what is refused."""

import pytest

from support.ablation_cases import run_rows
from tango_jax.ablation.against import compare
from tango_jax.ablation.figures import learning, left_out

SLOW, FAST = (0.0, 0.2, 0.4), (0.0, 0.4, 0.8)


def rows() -> list:
    """The baseline from two starts, and beside it in another setting an arm that samples twice the tokens."""
    found = []
    for start in (1, 2):
        for arm, accuracy in (("grpo", SLOW), ("gold_steps", FAST)):
            found += run_rows(arm, accuracy, start=start, setup="one")
        found += [row._replace(sampled_tokens=2 * row.sampled_tokens, setting="trust=on", setup="two")
                  for row in run_rows("tango", (*FAST[:-1], FAST[-1] + 0.08 * start), start=start)]
    return found


def cells(table: str, first: str) -> list[str]:
    [line] = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_arms_of_all_settings_are_compared_over_steps_and_over_equal_tokens():
    table, _ = compare(learning(rows()), "grpo")
    assert "mean over 2k tokens" in table  # 20 steps of 100 tokens
    assert cells(table, "grpo") == ["grpo", "2", "0.000", "0.200 (0.200 0.200)", "", "", "", "", "0.400",
                                    "0.200 (0.200 0.200)", "", "2", ""]
    # Over steps: (10 * 0.2 + 10 * (0.4 + 0.88) / 2) / 20 and, ending at 0.96, 0.44. Over the first 2,000 of its 4,000
    # tokens it goes from 0 to 0.4.
    tango = cells(table, "tango, trust=on †")
    assert tango[3:7] == ["0.430 (0.420 0.440)", "2", "20", "+0.230"]
    assert [tango[8], tango[9], tango[11]] == ["0.920", "0.200 (0.200 0.200)", "4"] and tango[10][1:] == "0.000"
    assert tango[7] == "1.150"  # of the gap from 0.2 to 0.4
    assert cells(table, "gold_steps")[6:8] == ["+0.200", "1"]
    # 0.8 is reached after 1,000 + 2,000 * 0.4 / 0.48 = 3,667 tokens and 3,429; the baseline never reaches it in 2,000.
    assert tango[-1] == "≤ 1.774"


def test_flops_stand_beside_tokens_where_all_runs_have_them():
    """`scored` samples as much as the baseline, for three times its FLOPs of 1, 2 and 3 * 10^12."""
    found = [row._replace(flops=index * size * 1e12) for arm, size, accuracy in (("grpo", 1, SLOW), ("scored", 3, FAST))
             for index, row in enumerate(run_rows(arm, accuracy))]
    table, figure = compare(learning(found), "grpo")
    assert "mean over 2.00 TFLOPs" in table and "| TFLOPs to 0.8, ratio |" in table
    # Of its 6: after 2 of the 3 of its first part, from 0 to 0.4 * 2 / 3; it reaches 0.8 at its end.
    assert cells(table, "scored")[-4:] == ["0.133", "-0.067", "6.00", "≤ 3.000"]
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "over the generator steps", "over the same tokens", "over the same TFLOPs", "minus grpo, by steps"]
    without, _ = compare(learning([*found[:-1], found[-1]._replace(flops=None)]), "grpo")
    assert "TFLOPs to 0.8" not in without


def test_arms_that_differ_in_the_arm_alone_are_not_marked():
    table, _ = compare(learning(rows()), "grpo")
    assert "| gold_steps |" in table and "| tango, trust=on † |" in table


def test_the_figure_has_a_row_for_each_arm_and_a_panel_for_each_measure():
    table, figure = compare(learning(rows()), "tango:trust=on")
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(names) == 3 and names[-1].endswith("trust=on")
    assert len(figure.axes) == 3
    means = [[float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() not in ("|", "None")]
             for axes in figure.axes]
    # Arms in the order of the table; the reference has no difference from itself.
    shown = [cells(table, name) for name in ("grpo †", "gold_steps †", "tango, trust=on")]
    assert means[0] == pytest.approx([float(row[3].split()[0]) for row in shown], abs=0.001)
    assert means[2] == pytest.approx([float(row[6].split()[0]) for row in shown[:2]], abs=0.001)
    assert [text.get_text() for text in figure.axes[2].texts] == ["2 pairs, 20 steps"] * 2


def test_an_arm_with_few_of_the_references_runs_is_compared_over_these():
    """Six runs of an arm, two of which have a pair: no interval stands beside two numbers."""
    found = []
    for seed in range(6):
        found += run_rows("tango", (0.0, 0.3 + 0.02 * seed, 0.6), seed=seed) + run_rows("gold_steps", FAST, seed=seed)
    found += [row for seed in (0, 1) for row in run_rows("grpo", SLOW, seed=seed)]
    tango = cells(compare(learning(found), "grpo")[0], "tango")
    assert tango[1] == "6" and "[" not in " ".join(tango)
    # (0.3 + 0.6 / 2) / 2 = 0.3 and 0.31, less 0.2; of the gap to 0.4.
    assert tango[4:8] == ["2", "20", "+0.105", "0.525"]


def test_a_share_of_the_gap_says_how_many_pairs_it_is_of():
    found = [row for seed in range(6) for arm, accuracy in (("tango", FAST), ("grpo", SLOW))
             for row in run_rows(arm, accuracy, seed=seed)]
    found += [row for seed in (0, 1) for row in run_rows("gold_steps", FAST[:2], seed=seed)]
    tango = cells(compare(learning(found), "grpo")[0], "tango")
    assert tango[4:8] == ["6", "20", "+0.200", "1.000 (of 2, over 10 steps)"]


def test_a_short_run_shortens_the_comparisons_of_its_arm_alone_and_the_table_says_so():
    table, figure = compare(learning(rows() + run_rows("my_arm", FAST[:2], start=1)), "grpo")
    assert "Over the first 10 generator steps, which all runs have (to their ends: grpo 20, gold_steps 20, " \
        "my_arm 10, tango, trust=on 20)." in table
    assert cells(table, "gold_steps")[4:7] == ["2", "20", "+0.200"]
    assert cells(table, "my_arm")[4:7] == ["1", "10", "+0.100"]
    assert "over the first 10 generator steps" in figure.get_suptitle()


def test_a_run_without_a_generator_step_is_left_out_and_counted():
    """It alone: the other run of its arm stays. Without it the comparison would be over no step."""
    found = [*rows(), *run_rows("tango", FAST[:1], start=3, setting="trust=on"), *run_rows("scored", FAST[:1])]
    table, figure = compare(learning(found), "grpo", left_out(found))
    told = "Left out, without a generator step: 1 of 1 runs of scored; 1 of 3 runs of tango, trust=on."
    assert all(told in text.replace("\n", " ") for text in (table, figure.get_suptitle()))
    assert cells(table, "tango, trust=on †")[1:7] == cells(compare(learning(rows()), "grpo")[0],
                                                           "tango, trust=on †")[1:7]
    assert "Left out" not in compare(learning(rows()), "grpo", left_out(rows()))[0]


def test_means_and_differences_are_over_starts_alike():
    """One start has three seeds, the other one: a mean of runs would not fit the difference beside it."""
    found = []
    for start, seeds, gain in ((1, (0, 1, 2), 0.1), (2, (0,), 0.5)):
        for seed in seeds:
            found += run_rows("tango", (0.0, gain, gain), start=start, seed=seed)
            found += run_rows("grpo", (0.0, 0.0, 0.0), start=start, seed=seed)
    tango = cells(compare(learning(found), "grpo")[0], "tango")
    assert tango[3] == "0.225 (0.075 0.375)" and tango[6] == "+0.225"


def test_another_start_of_the_verifier_is_marked():
    found = [*run_rows("tango", FAST, generator_start="a", verifier_start="b"),
             *run_rows("fixed_verifier", FAST, generator_start="a", verifier_start="c"),
             *run_rows("grpo", SLOW, generator_start="a", verifier_start="c")]
    table, _ = compare(learning(found), "tango")
    assert "| fixed_verifier † |" in table
    assert "| grpo |" in table  # asks no verifier
    table, _ = compare(learning([row._replace(verifier_start="") if row.arm == "tango" else row for row in found]),
                       "tango")
    assert "| fixed_verifier |" in table  # a table that did not record it compares with all


def test_other_checkpoints_before_stage_one_are_marked():
    """No start is recorded here: the weights alone tell that tango began elsewhere."""
    found = [*run_rows("tango", FAST, weights="a"), *run_rows("fixed_verifier", FAST, weights="b"),
             *run_rows("gold_steps", FAST), *run_rows("grpo", SLOW, weights="b")]
    table, _ = compare(learning(found), "grpo")
    assert "| tango † |" in table and "| fixed_verifier |" in table
    assert "| gold_steps |" in table  # a table that did not record it compares with all


def test_another_setting_is_marked_unless_the_table_tells_that_it_is_none():
    def marked(**digests) -> bool:
        found = run_rows("grpo", SLOW, **digests) + run_rows("tango", FAST, setting="part=a", **digests)
        return "| tango, part=a † |" in compare(learning(found), "grpo")[0]

    assert marked() and not marked(setup="one", method="two")


@pytest.mark.parametrize("against, told", [
    ("nobody", "--against=nobody matches none of the arms and settings: choose one of grpo, gold_steps, tango:trust="),
    ("tango:trust=off", "--against=tango:trust=off matches none"),
])
def test_a_reference_that_is_not_there_is_refused(against, told):
    with pytest.raises(ValueError, match=told):
        compare(learning(rows()), against)


def test_a_reference_in_several_settings_needs_its_own():
    def in_settings(*settings):
        others, own = ([row for row in rows() if (row.arm == "grpo") == is_own] for is_own in (False, True))
        return learning(others + [row._replace(setting=setting) for setting in settings for row in own])

    with pytest.raises(ValueError, match="--against=grpo matches 2 of the arms and settings: choose one of.*, grpo:b"):
        compare(in_settings("a", "b"), "grpo")
    # The one without a setting has no other name.
    table, _ = compare(in_settings("", "b"), "grpo")
    assert cells(table, "grpo")[6] == "" and cells(table, "grpo, b")[6] == "+0.000"


def test_runs_of_different_source_code_are_named():
    rows = [*run_rows("tango", (0.1, 0.5), source="aa"), *run_rows("grpo", (0.1, 0.4), source="bb")]
    table, _ = compare(learning(rows), "grpo")
    assert "made with different source code of tango_jax (aa, bb)" in table


def test_runs_of_two_tasks_are_refused():
    both = rows() + [row._replace(task="math") for row in rows()]
    with pytest.raises(ValueError, match="compares runs of one task.*last_letter, math"):
        compare(learning(both), "grpo")
