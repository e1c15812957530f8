"""The results in Markdown: the numbers of hand-made runs, and what is said where runs are few or never get there."""

import re

import pytest

from support.ablation_cases import evaluation, run_rows
from tango_jax.ablation.summary import outcome_only, summarize, upper_bound

GOLD, METHOD, BASELINE = (0.0, 0.8, 1.0), (0.0, 0.4, 1.0), (0.0, 0.2, 0.4)


def experiment(seeds: int, starts: tuple[int, ...] = (3,)) -> list:
    """Three arms, alike in all runs but for a little in the last evaluation."""
    rows = []
    for start in starts:
        for seed in range(seeds):
            for arm, accuracy in (("tango", METHOD), ("grpo", BASELINE), ("gold_steps", GOLD)):
                moved = (*accuracy[:-1], accuracy[-1] - 0.01 * seed)
                tokens = 3 if arm == "tango" else 1
                rows += [row._replace(sampled_tokens=tokens * row.sampled_tokens,
                                      verifier_step_f1=0.5 + 0.02 * row.generator_step if arm == "tango" else 0.5)
                         for row in run_rows(arm, moved, start=start, seed=seed)]
    return rows


def cells(summary: str, first: str) -> list[str]:
    [line] = [line for line in summary.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_few_runs_are_shown_one_by_one():
    summary = summarize(experiment(2))
    assert "## last_letter: 1 start (3), 2 seeds (0, 1)" in summary
    tango = cells(summary, "tango")
    # (10 * 0.2 + 10 * 0.7) / 20 = 0.45 and, ending at 0.99, 0.4475; 0.8 is reached 2/3 on the way from step 10 to 20.
    assert tango[1:5] == ["2", "0.449 (0.45, 0.45)", "0.995 (1.00, 0.99)", "2 of 2"]
    assert tango[5] == "16.7 (16.7, 16.8)"
    assert tango[6] == "5.0 (5.0, 5.0)"  # 300 tokens a step
    assert tango[7] == "0.900 (0.90, 0.90)" and cells(summary, "grpo")[7] == "0.500, as it was"
    assert cells(summary, "grpo")[2:7] == ["0.199 (0.20, 0.20)", "0.395 (0.40, 0.39)", "0 of 2", "", ""]


def test_means_of_few_runs_are_over_the_starts_as_differences_are():
    """Three seeds from one start and one from another: means of runs would be 0.15 and 0, and the difference 0.225."""
    rows = [row for start, seed, gain in ((1, 0, 0.1), (1, 1, 0.1), (1, 2, 0.1), (2, 0, 0.5))
            for row in (*run_rows("tango", (0.0, gain, gain), start=start, seed=seed, verifier_step_f1=gain),
                        *run_rows("grpo", (0.0, 0.0, 0.0), start=start, seed=seed))]
    summary = summarize(rows)
    tango = cells(summary, "tango")
    assert tango[2:4] == ["0.225 (0.07, 0.07, 0.07, 0.38)", "0.300 (0.10, 0.10, 0.10, 0.50)"]
    assert tango[7] == "0.300, as it was"
    assert cells(summary, "tango / grpo")[5] == "+0.225"


def test_steps_of_few_runs_are_over_the_starts_too():
    rows = [row for start, seed, steps in ((1, 0, GOLD), (1, 1, GOLD), (1, 2, GOLD), (2, 0, (0.0, 0.4, 0.8)))
            for row in run_rows("grpo", steps, start=start, seed=seed)]
    assert cells(summarize(rows), "grpo")[5] == "15.0 (10.0, 10.0, 10.0, 20.0)"


def test_arms_are_compared_with_the_baseline_and_its_gap_to_the_upper_bound():
    summary = summarize(experiment(2))
    assert "share of the gap from grpo to gold_steps" in summary
    _, pairs, over, steps, tokens, more, share = cells(summary, "tango / grpo")
    assert (pairs, over, more) == ("2", "20", "+0.250")
    assert steps == "≤ 0.836"  # 16.72 of the 20 steps that grpo had without reaching it
    assert tokens == "≤ 2.508"
    assert share == f"{0.25 / 0.45:.3f}"  # from 0.2 to 0.65 over the run
    assert cells(summary, "gold_steps / grpo")[-1] == "1"
    assert cells(summary, "tango / gold_steps")[3] == "1.672"  # 16.72 to 10


def test_many_runs_have_intervals():
    summary = summarize(experiment(3, starts=(1, 2)))
    assert "## last_letter: 2 starts (1, 2), 3 seeds (0, 1, 2)" in summary
    # Both starts have the same mean, which is no certainty; of one start the seeds' interval is shown.
    assert cells(summary, "tango")[2] == "0.448"
    summary = summarize(experiment(6))
    # 0.4500, 0.4475 ... 0.4375: mean 0.44375, deviation 0.00468, and 2.5706 for five degrees of freedom.
    assert cells(summary, "tango")[2] == "0.444 [0.439, 0.449]"
    assert re.fullmatch(r"≤ 0\.848 \[0\.83\d, 0\.86\d\]", cells(summary, "tango / grpo")[3])


def test_a_ratio_of_censored_arms_is_marked():
    rows = [*run_rows("tango", BASELINE), *run_rows("grpo", BASELINE)]
    assert cells(summarize(rows), "tango / grpo")[3] == "neither reaches it"
    rows += [*run_rows("tango", GOLD, seed=1), *run_rows("grpo", GOLD, seed=1)]
    assert cells(summarize(rows), "tango / grpo")[3] == "~ 1.000"
    rows = [*run_rows("tango", BASELINE), *run_rows("grpo", GOLD)]
    assert cells(summarize(rows), "tango / grpo")[3] == "≥ 2.000"


def test_settings_have_a_section_each_with_their_start():
    rows = [row._replace(setting=f"words={words}", sampled_accuracy=0.03) for words in (4, 8) for row in experiment(1)]
    summary = summarize(rows)
    assert [line for line in summary.splitlines() if line.startswith("## ")] == [
        "## last_letter, words=4: 1 start (3), 1 seed (0)", "## last_letter, words=8: 1 start (3), 1 seed (0)"
    ]
    assert "Start: greedy accuracy 0.000, verifier step F1 on the fixed pool 0.500" in summary
    assert "; 3 % of the solutions of tango's first generator turn are right." in summary
    nearly_all = [row._replace(sampled_accuracy=0.998) for row in experiment(1)]
    assert "; 99.8 % of the solutions of tango's first generator turn are right." in summarize(nearly_all)
    assert "fixed pool 0.500, outcome F1 0.250.\n" in summarize(experiment(1))  # nothing was sampled


def test_the_sampled_verifier_is_followed_from_first_to_last():
    rows = [evaluation(0, 0.1, arm="tango", turn=0),
            *(evaluation(step, 0.1, arm="tango", turn=step + 5, verifier_live_step_f1=0.5 + 0.01 * step)
              for step in (0, 10, 30))]
    assert cells(summarize(rows), "tango")[-1] == "0.500 to 0.800: +0.300"


def test_arms_of_other_starts_and_seeds_are_told_not_to_compare():
    assert "were not run from the same starts and seeds" not in summarize(experiment(2))
    rows = [row for row in experiment(2, starts=(1, 2)) if row.arm != "grpo" or row.start == 1]
    assert ("The arms were not run from the same starts and seeds (2 are common to all): compare their differences, "
            "which are over pairs, and not their means.") in summarize(rows)


def test_one_policy_beside_two_is_told():
    rows = [*run_rows("grpo", GOLD, method="a/generator"), *run_rows("tango", GOLD, method="a")]
    assert "tango and grpo also differ in whether both roles are one policy" in summarize(rows)
    rows[3:] = run_rows("self_verify", GOLD, method="a")
    assert "also differ" not in summarize(rows)


@pytest.mark.filterwarnings("error")
def test_an_arm_that_does_not_train_the_generator_is_not_compared():
    # Its generator steps are those that the other arms make meanwhile.
    rows = [evaluation(0, 0.2, arm="fixed_generator", turn=0), evaluation(9, 0.2, arm="fixed_generator", turn=9)]
    summary = summarize([*rows, *run_rows("grpo", GOLD), *run_rows("my_arm", GOLD, verifier_step_f1=None)])
    assert cells(summary, "fixed_generator")[2:7] == ["0.200 (0.20)", "0.200 (0.20)", "", "", ""]
    assert "fixed_generator / grpo" not in summary and "my_arm / grpo" in summary


def test_what_an_arm_is_compared_with_follows_from_how_it_learns():
    arms = dict.fromkeys(("gold_steps", "fixed_generator", "tango", "grpo", "unknown"))
    assert (outcome_only(arms), upper_bound(arms)) == ("grpo", "gold_steps")
    assert outcome_only({"tango": None}) is upper_bound({"tango": None}) is None


def test_a_share_of_the_gap_counts_the_runs_that_all_three_arms_have():
    rows = [row for row in experiment(6) if row.arm != "gold_steps" or row.seed < 2]
    _, pairs, *_, share = cells(summarize(rows), "tango / grpo")
    assert pairs == "6" and re.fullmatch(r"0\.5\d\d \(of 2\)", share)


def test_a_level_that_both_arms_begin_at_has_no_ratio():
    rows = [row for arm in ("tango", "grpo") for seed in range(2) for row in run_rows(arm, (0.9, 0.95, 1.0), seed=seed)]
    assert cells(summarize(rows), "tango / grpo")[3:5] == ["both begin there"] * 2
    apart = [row for seed in range(2) for row in (*run_rows("tango", (0.9, 0.95, 1.0), seed=seed),
                                                  *run_rows("grpo", (0.1, 0.5, 0.9), seed=seed))]
    assert cells(summarize(apart), "tango / grpo")[3:5] == ["the first begins there"] * 2


def test_runs_of_other_lengths_are_compared_over_the_steps_that_they_share():
    rows = [*run_rows("tango", (0.0, 0.2)), *run_rows("grpo", (0.0, 0.2, 0.8)), *run_rows("gold_steps", GOLD)]
    summary = summarize(rows)
    assert "Over the first 10 generator steps, which all runs have (to their ends: tango 10, grpo 20, gold_steps 20)." \
        in summary
    assert cells(summary, "grpo")[2:4] == ["0.100 (0.10)", "0.200 (0.20)"]
    # tango and grpo are alike as far as both go; the gap to gold_steps is 0.1 to 0.4 there.
    _, pairs, over, *_, more, share = cells(summary, "tango / grpo")
    assert (pairs, over, more, share) == ("1", "10", "+0.000", "0.000")
    assert cells(summary, "gold_steps / grpo")[2] == "20"
    assert "which all runs have" not in summarize(experiment(1))


def test_a_share_says_over_which_steps_it_is_where_the_bound_is_shorter():
    rows = [*run_rows("tango", METHOD), *run_rows("grpo", BASELINE), *run_rows("gold_steps", GOLD[:2])]
    assert cells(summarize(rows), "tango / grpo")[-1] == f"{(0.2 - 0.1) / (0.4 - 0.1):.3f} (over 10 steps)"


def test_the_start_of_the_verifier_is_of_arms_that_use_it():
    rows = [*run_rows("tango", METHOD, verifier_step_f1=0.1), *run_rows("grpo", BASELINE, verifier_step_f1=0.9)]
    for order in (rows, rows[::-1]):
        assert "verifier step F1 on the fixed pool 0.100" in summarize(sorted(order, key=lambda row: row.turn))


def test_starts_of_the_verifier_that_differ_are_told_by_arm():
    rows = [*run_rows("tango", METHOD, verifier_step_f1=0.45), *run_rows("scored", METHOD, verifier_step_f1=0.7),
            *run_rows("fixed_verifier", METHOD, verifier_step_f1=0.45)]
    for order in (rows, rows[::-1]):
        assert ("Start: greedy accuracy 0.000, verifier step F1 on the fixed pool 0.450 of tango, fixed_verifier and "
                "0.700 of scored, outcome F1 0.250.") in summarize(sorted(order, key=lambda row: row.turn))


def test_runs_of_different_source_code_are_named():
    rows = [*run_rows("tango", METHOD, source="aa"), *run_rows("grpo", BASELINE, source="bb"), *run_rows("mine", GOLD)]
    assert "made with different source code of tango_jax (aa, bb)" in summarize(rows)
    assert "source code" not in summarize([row for row in rows if row.source != "bb"])


def test_the_span_is_told_by_arms_that_train_the_generator():
    """An arm that does not ends with the last whole cycle, and cuts no other."""
    rows = [*run_rows("tango", METHOD), *run_rows("fixed_generator", METHOD[:2])]
    assert "which all runs have" not in summarize(rows)


def test_arms_that_differ_in_other_settings_are_named():
    rows = [*run_rows("tango", METHOD, method="aa"), *run_rows("grpo", BASELINE, method="bb"),
            *run_rows("gold_steps", GOLD, method="aa"), *run_rows("my_arm", GOLD)]
    assert "tango, gold_steps and grpo also differ in other settings, such as a schedule, a reward, a loss or a " \
        "learning rate: do not compare them as arms." in summarize(rows)
    assert "also differ in other settings" not in summarize([row._replace(method="aa") for row in rows])


def test_flops_to_the_level_stand_beside_tokens_where_all_runs_have_them():
    """0.8 is at the end of `scored`, after 30, and halfway between 10 and 20 of the baseline's, by 0.4 and 1.2."""
    rows = [row._replace(flops=index * size * 1e12) for arm, size, accuracy in
            (("grpo", 10, (0.0, 0.4, 1.2)), ("scored", 15, (0.0, 0.4, 0.8)))
            for index, row in enumerate(run_rows(arm, accuracy))]
    text = summarize(rows)
    assert "| steps | 1000 tokens | TFLOPs |" in text and "| tokens, ratio | FLOPs, ratio |" in text
    [scored] = [line for line in text.splitlines() if line.startswith("| scored |")]
    [ratio] = [line for line in text.splitlines() if line.startswith("| scored / grpo |")]
    assert "| 30.0 (30.0) |" in scored and "| 2.000 |" in ratio
    assert "TFLOPs |" not in summarize([*rows[:-1], rows[-1]._replace(flops=None)])
