"""The section on the verifier's quality: rates, matrices and intervals of made-up judgements, counted by hand."""

from pathlib import Path

import pytest

from tango_jax.config import default_config, flatten
from tango_jax.tracking.intervals import wilson
from tango_jax.viewer import charts, quality
from tango_jax.viewer.panels import panel, rated
from tango_jax.viewer.quality import Judged
from tango_jax.viewer.runs import Run

T, F, N = True, False, None
RUN = Run("one", Path("one"), flatten(default_config()), [], True)


def items(*rows, role="generator") -> list[Judged]:
    return [Judged(turn, role, all(gold), verdict, judgements, gold) for turn, verdict, judgements, gold in rows]


def rollout(role="generator", is_aligned=True) -> dict:
    solution = {"is_correct": True, "gold_steps": [T, F], "steps": [[0, 1]] * 2}
    said = {"verdict": "CORRECT", "judgements": [T, T] if is_aligned else [T], "is_aligned": is_aligned}
    return {"turn": 3, "role": role, "solution": solution, "verifications": [said]}


def test_a_misaligned_verification_judges_no_step_and_an_evaluation_is_not_counted():
    judged = Judged(3, "generator", T, "CORRECT", (T, T), (T, F))
    assert quality.judged(rollout()) == [judged]
    assert quality.judged(rollout("verifier")) == [judged._replace(role="verifier")]
    assert quality.judged(rollout(is_aligned=False)) == [judged._replace(judgements=(N, N))]
    assert quality.judged(rollout("evaluation")) == []
    stopped = rollout()
    stopped["verifications"][0]["judgements"] = [F, N]
    assert quality.judged(stopped) == [judged._replace(judgements=(F, quality.STOPPED))]
    [_, steps] = quality.confusion_tables(quality.judged(stopped))
    assert [cell["name"] for cell in steps["rows"][0]["cells"]] == [*quality.SAID.values(), quality.STOPPED]


def test_judgements_that_are_read_are_not_called_sampled():
    """The verifier's turns of a scored run; and generator's turns, such as those with a process reward model."""
    for role, phase, other in (("verifier", "warmup", "generator"), ("generator", "generator", "verifier")):
        run = RUN._replace(rows=[{"phase": phase, "step": 1, "verifier/tokens_sampled": 0,
                                   "verifier/tokens_scored": 9}])
        made = items((1, "CORRECT", (T,), (T,)), role=role)
        assert f"of the {role}'s turns, whose judgements are read in one pass" in quality.section(run, made)["note"]
        assert "sampled at temperature" not in quality.section(run, made)["note"]
        assert "sampled at temperature" in quality.section(run, items((1, "CORRECT", (T,), (T,)), role=other))["note"]


def test_dynamic_sampling_is_said_of_the_turns_that_draw_again():
    """The verifier of arm scored_exact takes the problems that it draws."""
    run = RUN._replace(rows=[{"phase": "generator", "step": 1, "generator/batches_sampled": 2}])
    for role in ("generator", "verifier"):
        note = quality.section(run, items((1, "CORRECT", (T,), (T,)), role=role))["note"]
        assert ("Dynamic sampling" in note) == (role == "generator")


MADE = items((1, "CORRECT", (T,), (T,)), (1, "CORRECT", (T,), (F,)), (2, "INVALID", (N,), (F,)),
             (9, "INCORRECT", (F,), (T,)))


@pytest.mark.parametrize("told, size", [({"verifier/pool/solutions": 30}, 30), ({}, 200)])
def test_a_fixed_pool_is_as_large_as_the_evaluations_say(told, size):
    run = RUN._replace(rows=[{"phase": "eval", "step": 0, "verifier/pool/step_f1": 0.5} | told])
    assert f"on {size} fixed solutions" in quality.panels(run, [])[0]["caption"]
    assert charts.headline(run)[0][3] == f"greedy, {size} fixed solutions"
    stops = run._replace(settings=run.settings | {"verifier.stop_at_first_error": True})
    for told in (charts.headline(stops)[0][3], quality.panels(stops, [])[0]["caption"]):
        assert "counts as missed the steps that a verifier leaves out" in told


def test_a_fixed_pool_is_named_only_where_there_is_one():
    run = RUN._replace(rows=[{"phase": "eval", "step": 0, "verifier/pool/outcome_f1": 0.5}])
    assert quality.section(run, MADE)["note"].startswith("The fixed pool is judged greedily")
    assert quality.section(RUN, MADE)["note"].startswith("The tables, disagreements and gold steps count")


def test_chosen_problems_are_told_beside_the_verdicts_without_dumped_rollouts():
    row = {"phase": "verifier", "step": 1, "verifier/rate_correct": 0.5}
    for practice, is_told in (("all", False), ("half_right", True)):
        run = RUN._replace(rows=[row], settings=RUN.settings | {"rl.practice": practice})
        [drawn] = quality.panels(run, [])
        assert ("rl.practice chose the problems" in drawn["caption"]) == is_told
    [drawn] = quality.panels(run._replace(rows=[row | {"generator/label_accuracy": 0.5}]), [])
    assert "solve half the time, by the labels of no_labels." in drawn["caption"]


def test_confusion():
    assert quality.confusion([(T, "a"), (F, "b"), (T, "a")], ("a", "b")) == {
        "right": {"a": 2, "b": 0}, "wrong": {"a": 0, "b": 1}}
    verdicts, steps = (
        [{cell["name"]: cell["count"] for cell in row["cells"]} for row in table["rows"]]
        for table in quality.confusion_tables(MADE)
    )
    assert verdicts == [{"CORRECT": 1, "INCORRECT": 1, "INVALID": 0}, {"CORRECT": 1, "INCORRECT": 0, "INVALID": 1}]
    assert steps == [{"CORRECT": 1, "INCORRECT": 1, "not judged": 0}, {"CORRECT": 1, "INCORRECT": 0, "not judged": 1}]
    assert quality.confusion_tables([]) == []


def test_the_verifiers_turns_count_only_where_the_generators_have_no_verdicts():
    own = items((1, "CORRECT", (T,), (T,)), (2, "CORRECT", (T,), (T,)), role="verifier")
    assert quality.of_one_role(own + MADE) == MADE and quality.of_one_role(own) == own
    (table, _) = quality.confusion_tables(own[:1])
    assert table["rows"][1]["cells"][0]["link"] == "only=false_accept&grade=wrong&role=verifier"
    (shown,) = (item for item in quality.panels(RUN, own) if item["title"] == "Agreement with gold steps")
    assert shown["caption"].startswith("For steps with a known label, in the verifier's turns.")
    assert "count the dumped rollouts of the generator's turns" in quality.section(RUN, MADE)["note"]
    assert "sampled at temperature 1." in quality.section(RUN, MADE)["note"]
    assert quality.section(RUN, [])["note"].startswith("No rollouts of a verifier were dumped")


def test_matrices_link_to_filters_and_have_intervals():
    verdicts, steps = quality.confusion_tables(MADE)
    links = [cell["link"].partition("&")[0] for cell in verdicts["rows"][1]["cells"]]
    assert links == ["only=false_accept", "", "only=invalid"]
    links = [cell["link"] for cell in steps["rows"][1]["cells"]]
    assert links == ["only=misjudged&role=generator", "", "only=misaligned&role=generator"]
    assert verdicts["rows"][0]["cells"][0]["share"] == "50 % [9, 91]"  # 1 of 2
    without_labels = [item._replace(gold=None) for item in MADE]
    assert {table["of"] for table in quality.confusion_tables(without_labels)} == {"answer"}


def test_rates_by_turn():
    """Step 1: of ten at turn 4 all right ones approved; at turn 5 wrong ones, of which four of five are rejected."""
    made = items(*[(4, "CORRECT", (T, T), (T, T))] * 5, *[(5, "CORRECT", (F, T), (F, T))] * 4,
                 (5, "CORRECT", (T, N), (F, T)))
    right = quality.recall_by_turn(made, True)
    assert (right.y.tolist(), right.n.tolist()) == ([1.0, 0.8], [10, 5])
    assert (right.low[1], right.high[1]) == pytest.approx(wilson(0.8, 5))
    wrong = quality.recall_by_turn(made, False)
    assert (wrong.x.tolist(), wrong.y.tolist()) == ([5], [0.8])
    assert quality.disagreement_by_turn(made, "CORRECT", False).y.tolist() == [0.0, 1.0]


def test_steps_that_a_verifier_is_to_leave_out_do_not_count():
    """It stops at the first of two wrong steps, or is misaligned; one that approves all misses both."""
    stops = items((1, "INCORRECT", (T, F, quality.STOPPED), (T, F, F)))
    misses = items((1, "CORRECT", (T, T, T), (T, F, F)))
    misaligned = items((1, "CORRECT", (N, N, N), (T, F, F)))
    for made, approved, rejected in ((stops, (1.0, 1), (1.0, 1)), (misses, (1.0, 1), (0.0, 2)),
                                     (misaligned, (0.0, 1), (0.0, 2))):
        for label, expected in ((True, approved), (False, rejected)):
            found = quality.recall_by_turn(made, label)
            assert (found.y.tolist(), found.n.tolist()) == ([expected[0]], [expected[1]])


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
