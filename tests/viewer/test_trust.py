"""Whether the verifier can be trusted: rates, matrices and intervals of made-up judgements, against counts by hand."""

from pathlib import Path

import pytest

from tango_jax.config import default_config, flatten
from tango_jax.tracking.intervals import wilson
from tango_jax.viewer import quality, trust
from tango_jax.viewer.panels import panel, rated
from tango_jax.viewer.quality import Judged
from tango_jax.viewer.runs import Run

T, F, N = True, False, None
RUN = Run("one", Path("one"), flatten(default_config()), [], True)


def items(*rows, role="generator") -> list[Judged]:
    return [Judged(turn, role, all(gold), verdict, judgements, gold, *kinds)
            for turn, verdict, judgements, gold, *kinds in rows]  # fmt: skip


def rollout(role="generator", is_aligned=True) -> dict:
    solution = {"is_correct": True, "gold_steps": [T, F], "steps": [[0, 1]] * 2, "step_kinds": ["easy", "hard"]}
    said = {"verdict": "CORRECT", "judgements": [T, T] if is_aligned else [T], "is_aligned": is_aligned}
    return {"turn": 3, "role": role, "solution": solution, "verifications": [said]}


def test_a_misaligned_verification_judges_no_step_and_an_evaluation_is_not_counted():
    judged = Judged(3, "generator", T, "CORRECT", (T, T), (T, F), ("easy", "hard"))
    assert quality.judged(rollout()) == [judged]
    assert quality.judged(rollout("verifier")) == [judged._replace(role="verifier")]
    assert quality.judged(rollout(is_aligned=False)) == [judged._replace(judgements=(N, N))]
    assert quality.judged(rollout("evaluation")) == []


MADE = items((1, "CORRECT", (T,), (T,)), (1, "CORRECT", (T,), (F,)), (2, "INVALID", (N,), (F,)),
             (9, "INCORRECT", (F,), (T,)))  # fmt: skip


def test_confusion_early_and_late():
    parts = quality.early_and_late(MADE)
    assert {name: len(part) for name, part in parts.items()} == {
        "generator's turns 1 to 1": 2, "generator's turns 9 to 9": 1,
    }  # fmt: skip
    assert quality.confusion(MADE) == {"right": {"CORRECT": 1, "INCORRECT": 1, "INVALID": 0},
                                       "wrong": {"CORRECT": 1, "INCORRECT": 0, "INVALID": 1}}  # fmt: skip
    assert quality.step_confusion(MADE) == {"right": {"CORRECT": 1, "INCORRECT": 1, "not judged": 0},
                                            "wrong": {"CORRECT": 1, "INCORRECT": 0, "not judged": 1}}  # fmt: skip
    assert list(quality.early_and_late(MADE[:2])) == ["all turns of the generator"]
    assert quality.early_and_late([]) == {}


def test_the_verifiers_turns_count_only_where_the_generators_have_no_verdicts():
    own = items((1, "CORRECT", (T,), (T,)), (2, "CORRECT", (T,), (T,)), role="verifier")
    assert quality.of_one_role(own + MADE) == MADE and quality.of_one_role(own) == own
    (table, _) = trust.confusion_tables(own[:1])
    assert (table["caption"], table["role"]) == (
        "Verdicts by the grade of the answer, all turns of the verifier", "verifier"
    )  # fmt: skip
    (shown,) = (item for item in trust.panels(RUN, own) if item["title"] == "Agreement with gold steps")
    assert shown["caption"] == "For steps with a known label, in the verifier's turns."
    assert "the dumped rollouts of the generator's turns" in trust.measured_on(RUN, MADE)


def test_matrices_name_filters_and_intervals():
    early, early_steps, late, _ = trust.confusion_tables(MADE)
    assert [cell["filter"] for cell in early["rows"][1]["cells"]] == ["false_accept", None, "invalid"]
    assert [cell["filter"] for cell in early_steps["rows"][1]["cells"]] == ["misjudged", None, "misaligned"]
    assert early["caption"] == "Verdicts by the grade of the answer, generator's turns 1 to 1"
    assert early["rows"][0]["cells"][0]["share"] == "100 % [21, 100]"  # 1 of 1
    assert early["role"] == "generator"
    assert (late["turns"], late["rows"][0]["total"], late["rows"][1]["cells"][0]["share"]) == ([9, 9], 1, "")
    without_labels = [item._replace(gold=None) for item in MADE]
    assert {table["of"] for table in trust.confusion_tables(without_labels)} == {"answer"}


def test_step_scores_by_position_and_turn():
    # Step 1: five right ones approved, five wrong ones of which four are rejected. F1 of right: 2*5/(6+5) = 10/11; of
    # wrong: 2*4/(4+5) = 8/9. Step 2 is always right: no F1.
    made = items(*[(4, "CORRECT", (T, T), (T, T))] * 5, *[(5, "CORRECT", (F, T), (F, T))] * 4,
                 (5, "CORRECT", (T, N), (F, T)))  # fmt: skip
    by_position = quality.step_f1_by_position(made)
    assert by_position.x.tolist() == [1] and by_position.y[0] == pytest.approx((10 / 11 + 8 / 9) / 2)
    # J of right: 5 of 6, of wrong: 4 of 5; the F1 of a bound J is 2 J / (1 + J).
    bounds = [[2 * bound / (1 + bound) for bound in wilson(hits / n, n)] for hits, n in ((5, 6), (4, 5))]
    assert by_position.low[0] == pytest.approx((bounds[0][0] + bounds[1][0]) / 2)
    assert by_position.high[0] == pytest.approx((bounds[0][1] + bounds[1][1]) / 2) and by_position.n.tolist() == [10]
    right = quality.recall_by_turn(made, True)
    assert (right.y.tolist(), right.n.tolist()) == ([1.0, 0.8], [10, 5])
    assert (right.low[1], right.high[1]) == pytest.approx(wilson(0.8, 5))
    wrong = quality.recall_by_turn(made, False)
    assert (wrong.x.tolist(), wrong.y.tolist()) == ([5], [0.8])
    assert quality.disagreement_by_turn(made, "CORRECT", False).y.tolist() == [0.0, 1.0]
    # Of solutions with two steps: 20 judgements, 15 right (14 approved), 5 wrong (4 rejected, 1 approved).
    by_count = quality.step_f1_by_count(made)
    assert by_count.x.tolist() == [2] and by_count.y[0] == pytest.approx((2 * 14 / (15 + 15) + 2 * 4 / (4 + 5)) / 2)


def test_right_verdicts_with_a_misjudged_step():
    made = items(
        (1, "CORRECT", (T, F), (T, T)), (1, "CORRECT", (T, T), (T, T)), (1, "INCORRECT", (F, T), (T, F)),
        (1, "CORRECT", (T, T), (T, F)),  # a wrong verdict
        (1, "CORRECT", (N, N), (T, T)),  # judges no step
        (2, "CORRECT", (T,), (T,)), (3, "INVALID", (F,), (T,)),
    )  # fmt: skip
    rates = quality.wrong_steps_by_turn(made)
    assert (rates.x.tolist(), rates.y.tolist(), rates.n.tolist()) == ([1, 2], [pytest.approx(2 / 3), 0.0], [3, 1])
    assert quality.wrong_steps_by_turn([item._replace(gold=None) for item in made]).x.tolist() == []


def test_groups_all_wrong_mixed_and_all_right():
    grades = {(1, 0): [F, F], (1, 1): [T, F], (1, 2): [T, T], (1, 3): [F, T], (4, 0): [T, T]}
    shares = {name: rates.y.tolist() for name, rates in quality.groups_by_turn(grades).items()}
    assert shares == {"all wrong": [0.25, 0.0], "mixed": [0.5, 0.0], "all right": [0.25, 1.0]}
    (panel,) = trust.groups(RUN, grades)
    assert [trace["name"] for trace in panel["traces"]] == ["all wrong", "mixed", "all right"]
    assert panel["traces"][1]["text"][0] == "0.500 [0.15, 0.85], n = 4"
    assert "dynamic_sampling" not in panel["caption"] and trust.groups(RUN, {}) == []
    resampled = RUN._replace(settings=RUN.settings | {"rl.dynamic_sampling": 2})
    (panel,) = trust.groups(resampled, grades)
    assert panel["caption"].endswith("=2 chose; of all that were sampled, a smaller share may be mixed.")


ONLY_MIXED = "Only mixed groups have an outcome advantage"


@pytest.mark.parametrize("settings, said", [
    ({}, ONLY_MIXED),
    ({"generator.loss.algorithm": "rloo"}, ONLY_MIXED),
    ({"generator.loss.algorithm": "reinforce_pp"}, "REINFORCE++ compares the rewards of a whole turn"),
    ({"generator.reward": "own.py:f"}, "rewards, to which generator.reward=own.py:f adds"),
    ({"rl.format_weight": 0.5, "generator.reward": "own.py:f"}, "which rl.format_weight=0.5 and generator.reward=own"),
    ({"rl.samples_per_prompt": 1}, "keeps its reward"),
    ({"generator.loss.algorithm": "own.py:best"}, "depends on generator.loss.algorithm=own.py:best."),
    ({"arm": "own.py:min_form"}, "depends on arm=own.py:min_form."),
])  # fmt: skip
def test_which_groups_have_an_advantage_follows_from_the_settings(settings, said):
    (panel,) = trust.groups(RUN._replace(settings=RUN.settings | settings), {(1, 0): [T, F]})
    assert said in panel["caption"] and (ONLY_MIXED in panel["caption"]) == (said == ONLY_MIXED)


def test_errors_by_the_kind_of_the_step():
    kinds = ("easy", "slip")
    made = items(*[(1, "CORRECT", (T, T), (T, F), kinds)] * 3, (1, "INCORRECT", (F, F), (T, F), kinds),
                 (1, "INVALID", (N, N), (T, F), kinds), (1, "CORRECT", (T,), (T,)))  # fmt: skip
    table = trust.kinds_table(made)
    assert table["head"] == ["kind of step or mistake", "gold label", "all turns of the generator"]
    low, high = (round(100 * bound) for bound in wilson(0.75, 4))
    assert table["rows"] == [["slip", "wrong", f"75 % [{low}, {high}], n = 4"],
                             ["easy", "right", f"25 % [{100 - high}, {100 - low}], n = 4"]]  # fmt: skip
    assert trust.kinds_table([item._replace(kinds=None) for item in made]) is None


def test_few_cases_are_drawn_pale_with_their_interval():
    rates = quality.recall_by_turn(items((1, "CORRECT", (T,) * 30, (T,) * 30), (2, "CORRECT", (T, F), (T, T))), True)
    (trace,) = rated("recall", rates, "#D55E00")
    assert trace["marker"]["opacity"] == [1.0, 0.45] and trace["marker"]["size"] == [7, 4]
    assert trace["text"][1] == "0.500 [0.09, 0.91], n = 2"
    assert trace["error_y"]["arrayminus"][1] == pytest.approx(0.5 - wilson(0.5, 2)[0], abs=1e-4)
    assert rated("recall", quality.recall_by_turn([], True), "#D55E00") == []


def test_an_axis_has_room_for_the_intervals():
    rates = quality.recall_by_turn(items((1, "CORRECT", (T, F), (T, T)), (2, "CORRECT", (T, F), (T, T))), True)
    drawn = panel("Recall", "", rated("recall", rates, "#D55E00"), "turn", score=True)
    low, high = drawn["layout"]["yaxis"]["range"]
    assert low <= wilson(0.5, 2)[0] and high >= wilson(0.5, 2)[1]
