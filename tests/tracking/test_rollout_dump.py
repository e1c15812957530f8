"""The rollout dump: what each line says, against numbers worked by hand, and which turns are on disk."""

import dataclasses
import json
import types

import numpy as np
import pytest

from tango_jax.config import default_config
from tango_jax.method.texts import make_solution, with_parents
from tango_jax.method.turn import joined
from tango_jax.records import (
    Lesson,
    Memory,
    Problem,
    Responses,
    Rewards,
    Rollout,
    StepRewards,
    Term,
    TurnResult,
    Verification,
)
from tango_jax.rl.algorithms import ALGORITHMS
from tango_jax.rl.schedule import Place
from tango_jax.runtime import hosts
from tango_jax.tracking import rollout_dump
from tango_jax.tracking.rollout_dump import RolloutDump, dumped_turns, read_rollouts
from tango_jax.tracking.rollout_rows import block_spans, turn_rows

PROBLEM = Problem("p0", "ab#1 cd#2", "bd", size=2)
STEPS = ["<think>", "<step>b</step>", "<step>c</step>", "</think>", r"<answer>\boxed{bc}</answer>", ""]
VERDICT = r"</step_verification><final_verification>\boxed{INCORRECT}</final_verification>"
VERIFICATION = [r"<step_verification><step>one \boxed{CORRECT}</step>", r"<step>two \boxed{INCORRECT}</step>", VERDICT]
TASK = types.SimpleNamespace(min_steps=2, gold_steps=lambda problem, steps: (True, False))


def ends_of(tokens: list[str]) -> list[int]:
    return np.cumsum([len(token) for token in tokens]).tolist()


def solution(is_correct=False, is_truncated=False):
    return make_solution(TASK, PROBLEM, "".join(STEPS), ends_of(STEPS), is_correct, is_truncated)


def verification(verdict="INCORRECT", is_truncated=False):
    return Verification("".join(VERIFICATION), (True, False), verdict, 1.0, True, ("one", "two"),
                        tuple(ends_of(VERIFICATION)), is_truncated)


def config_of(**rollouts):
    config = default_config()
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 1, 2
    config.rollouts.update(rollouts)
    return config


def responses_of(role, group_size, parents, records, name="") -> Responses:
    """Every token has the log-prob -0.3."""
    lengths = [len(record.token_ends) for record in records]
    rollout = Rollout((), tuple(np.full(length, -0.3) for length in lengths), np.zeros(len(records), bool), 0, 0)
    owners = [parent for parent in parents for _ in range(group_size)]
    return Responses(role, parents, [], group_size, rollout, with_parents(records, owners), {}, name or role)


def result_of(
    reward_B, adv_BT, solutions, verifications=None, adv_terms=None, step_rewards=(), reward_terms=()
) -> TurnResult:
    """A turn's records: two solutions of each problem, or one, and verifications of them. Those are trained on of which
    there are as many as rewards."""
    group_size, judges = min(len(solutions), 2), len(verifications or ()) // len(solutions)
    problems = [dataclasses.replace(PROBLEM) for _ in range(len(solutions) // group_size)]
    sampled = [responses_of("generator", group_size, problems, solutions)]
    if verifications is not None:
        sampled.append(responses_of("verifier", judges, sampled[0].records, verifications))
    learner = sampled[0] if len(sampled[0]) == len(reward_B) else sampled[1]
    lesson = Lesson(learner, Rewards(reward_B, {}, reward_terms), adv_terms or {}, step_rewards=step_rewards)
    return TurnResult({}, {}, sampled, lesson, adv_BT, Memory())


OUTCOME_BT = np.array([[-0.7071] * 6 + [0], [0.7071] * 6 + [0]], np.float32)
STEP_BT = np.array([[0.5, 0.5, -0.75, 0, 0, 0, 0], [0] * 7], np.float32)  # to go: the second of two normalised elements


def steps_of(*of_steps) -> StepRewards:
    """The rewards of the steps of each solution."""
    return StepRewards(np.zeros((len(of_steps), 7), np.float32), np.zeros((len(of_steps), 7), bool), list(of_steps))


def generator_result(verifications=None, more_steps=()) -> TurnResult:
    """Two samples: a wrong one whose steps are judged right, wrong; a right one whose verification is misaligned."""
    return result_of(
        np.float32([0.0, 1.0]), (0.8 * OUTCOME_BT + 0.2 * STEP_BT).astype(np.float32),
        [solution(), solution(is_correct=True, is_truncated=True)],
        verifications or [verification(), verification("INVALID", is_truncated=True)],
        {"outcome": (0.8, OUTCOME_BT), "steps": (0.2, STEP_BT)}, [steps_of((0.5, -0.5), None), *more_steps],
        (Term("grade", 1.0, np.float32([0, 1])), Term("format score", 0.0, np.float32([1, 1]))),
    )


def verifier_result() -> TurnResult:
    """Two verifications of one wrong solution, whose class weighs 1.5: the first verdict is right."""
    outcome_BT = np.array([[0.7071] * 3 + [0], [-0.7071] * 3 + [0]], np.float32)
    terms = {"by class": (np.float32([1.5, 1.5]), outcome_BT)}
    rewards = (Term("agreement", 1.0, np.float32([1, 0])), Term("format score", 0.8, np.float32([1, 1])))
    return result_of(np.float32([1.8, 0.8]), 1.5 * outcome_BT, [solution()],
                     [verification(), verification("CORRECT")], terms, reward_terms=rewards)


def test_a_generator_line_says_how_its_advantage_came_about():
    formula = ALGORITHMS["grpo"].formula
    rows = turn_rows(config_of(), Place(33, "generator", "generator", 20), generator_result(), formula)
    first, second = json.loads(json.dumps(rows))
    names = ("turn", "row", "rows_in_turn", "role", "phase", "generator_step", "group", "sample")
    assert [first[name] for name in names] == [34, 0, 2, "generator", "generator", 20, 0, 0]
    assert (first["group_rewards"], first["group_mean"], first["group_std"]) == ([0.0, 1.0], 0.5, 0.707107)
    assert first["formula"] == formula and first["notes"] == []
    assert first["problem"] == {"id": "p0", "question": "ab#1 cd#2", "answer": "bd", "size": 2}
    assert first["reward"] == {"total": 0.0, "terms": [
        {"name": "grade", "weight": 1.0, "value": 0.0}, {"name": "format score", "weight": 0.0, "value": 1.0}]}
    assert (first["step_rewards"], first["step_formula"]) == ([[0.5, -0.5]], "±1 / K, K = 2")
    # Tokens 0 and 1 lead to step 1's end, token 2 is step 2, tokens 3 to 5 follow it; the mask's seventh is no token.
    # Characters: <think> has 7, a step 14, </think> 8, the answer 27.
    assert first["advantage"] == {
        "total": [[2, -0.46568, 21], [1, -0.71568, 35], [3, -0.56568, 70]],
        "terms": [{"name": "outcome", "weight": 0.8, "runs": [[6, -0.7071]]},
                  {"name": "steps", "weight": 0.2, "runs": [[2, 0.5], [1, -0.75], [3, 0.0]]}],
    }
    assert second["step_rewards"] == [None] and second["reward"]["total"] == 1.0
    assert second["advantage"]["total"] == [[6, 0.56568, 70]]
    assert second["notes"] == ["No step has a reward: the steps were not judged, or their labels do not count."]
    unread = dataclasses.replace(verification("INVALID"), is_aligned=False)
    _, second = turn_rows(config_of(), Place(33, "generator", "generator", 20),
                          generator_result([verification(), unread]), formula)
    assert second["notes"] == ["No step has a reward: no labels match the steps."]


def test_advantages_are_shown_by_the_terms_of_the_lesson_or_by_their_total_alone():
    result = generator_result()
    terms = {"luck": (np.float32([2, 3]), OUTCOME_BT), "patience": (-1.0, STEP_BT)}
    for given in (terms, {}):
        result = dataclasses.replace(result, lesson=dataclasses.replace(result.lesson, terms=given))
        rows = turn_rows(config_of(), Place(0, "generator", "generator", 0), result)
        assert [[(term["name"], term["weight"]) for term in row["advantage"]["terms"]] for row in rows] == [
            [("luck", weight), ("patience", -1.0)] if given else [] for weight in (2.0, 3.0)]
        assert rows[1]["advantage"]["total"] == [[6, 0.56568, 70]]


def test_a_row_that_is_masked_out_says_so():
    config = config_of()
    config.generator.loss.mask_overlong = True
    _, truncated = turn_rows(config, Place(0, "generator", "generator", 0), generator_result())
    assert truncated["notes"][0] == "The response was cut off, and is masked out of the loss (mask_overlong)."


def test_a_response_that_is_alone_in_its_group_has_no_statistics():
    config = config_of()
    config.rl.samples_per_prompt = 1
    result = generator_result()
    alone = dataclasses.replace(result.lesson, responses=result.lesson.responses.replace(group_size=1))
    row, _ = turn_rows(config, Place(0, "generator", "generator", 0), dataclasses.replace(result, lesson=alone))
    assert (row["group_rewards"], row["group_mean"], row["group_std"]) == ([0.0], None, None)


def test_second_tries_are_in_the_group_by_which_advantages_are_normalised():
    result = result_of(np.float32([0.0, 1.0]), np.zeros((3, 7), np.float32), [solution(), solution(True)],
                       [verification(), verification("CORRECT")])
    first, judged = result.sampled
    second = responses_of("generator", 1, judged.records[:1], [solution(True)], "second_try")
    lesson = Lesson(joined([first, second], 4), Rewards(np.float32([0.0, 1.0, 1.5]), {}), {})
    result = dataclasses.replace(result, sampled=[first, judged, second], lesson=lesson)
    rows = turn_rows(config_of(), Place(0, "generator", "generator", 0), result)
    assert len(rows) == 2 and [row["group_rewards"] for row in rows] == [[0.0, 1.0, 1.5]] * 2
    assert rows[0]["group_mean"] == pytest.approx(2.5 / 3) and "second_try" not in rows[1]
    assert rows[0]["second_try"]["reward"]["total"] == 1.5


def test_every_later_try_stands_in_the_row_of_the_first():
    """Two second tries of the first solution, and a third try after the second of them."""
    result = result_of(np.float32([0.0, 1.0]), np.zeros((5, 7), np.float32), [solution(), solution(True)],
                       [verification(), verification("CORRECT")])
    first, judged = result.sampled
    second = responses_of("generator", 2, judged.records[:1], [solution(), solution(True)], "second_try")
    again = responses_of("verifier", 1, second.records[1:], [verification()])
    third = responses_of("generator", 1, again.records, [solution(True)], "second_try")
    lesson = Lesson(joined([first, second, third], 8), Rewards(np.float32([0, 1, 2, 3, 4]), {}), {})
    result = dataclasses.replace(result, sampled=[first, judged, second, again, third], lesson=lesson)
    rows = turn_rows(config_of(), Place(0, "generator", "generator", 0), result)
    assert [row["reward"]["total"] for row in rows] == [0, 1]
    assert rows[0]["second_try"]["reward"]["total"] == 2 and "after_verdict" not in rows[0]["solution"]
    assert [one["reward"]["total"] for one in rows[0]["later_tries"]] == [3, 4] and "later_tries" not in rows[1]


def test_a_second_try_names_the_verdict_that_it_answers():
    """The second of two verifications rejects: the try is after that one."""
    result = result_of(np.float32([0.0, 1.0]), np.zeros((3, 7), np.float32), [solution(), solution(True)],
                       [verification("CORRECT"), verification("INCORRECT"), *[verification("CORRECT")] * 2])
    first, judged = result.sampled
    second = responses_of("generator", 1, judged.records[1:2], [solution(True)], "second_try")
    lesson = Lesson(joined([first, second], 4), Rewards(np.float32([0.0, 1.0, 1.5]), {}), {})
    rows = turn_rows(config_of(), Place(0, "generator", "generator", 0),
                     dataclasses.replace(result, sampled=[first, judged, second], lesson=lesson))
    assert [one["verdict"] for one in rows[0]["verifications"]] == ["CORRECT", "INCORRECT"]
    assert rows[0]["second_try"]["after_verdict"] == "INCORRECT"


def test_spans_and_judgements_point_into_the_texts():
    row = turn_rows(config_of(), Place(0, "generator", "generator", 0), generator_result())[0]
    written = row["solution"]
    assert [written["text"][start:end] for start, end in written["steps"]] == STEPS[1:3]
    assert (written["step_ends"], written["gold_steps"], written["tokens"]) == ([1, 2], [True, False], 6)
    (judged,) = row["verifications"]
    words = [judged["text"][start:end] for start, end in judged["blocks"]]
    assert words == [r"<step>one \boxed{CORRECT}</step>", r"<step>two \boxed{INCORRECT}</step>"]
    assert (judged["judgements"], judged["verdict"], judged["is_aligned"]) == ([True, False], "INCORRECT", True)
    truncated = turn_rows(config_of(), Place(0, "generator", "generator", 0), generator_result())[1]
    assert truncated["solution"]["is_truncated"] and truncated["verifications"][0]["is_truncated"]


def test_a_verifier_line_says_how_its_advantage_came_about():
    first, second = turn_rows(config_of(), Place(11, "verifier", "verifier", 3), verifier_result())
    assert first["reward"] == {"total": 1.8, "terms": [
        {"name": "agreement", "weight": 1.0, "value": 1.0}, {"name": "format score", "weight": 0.8, "value": 1.0}]}
    assert (second["reward"]["terms"][0]["value"], second["reward"]["total"]) == (0.0, 0.8)
    assert first["group_rewards"] == [1.8, 0.8] and first["step_rewards"] == []
    characters = len("".join(VERIFICATION))
    assert first["advantage"] == {"total": [[3, 1.06065, characters]],
                                  "terms": [{"name": "by class", "weight": 1.5, "runs": [[3, 0.7071]]}]}
    assert second["solution"] == first["solution"] and second["verifications"][0]["verdict"] == "CORRECT"


def test_a_verifier_line_holds_the_solution_that_it_judges():
    reward_B, adv_BT = np.float32([1.8, 0.8, 0.8, 1.8]), np.zeros((4, 4), np.float32)
    said = [verification(), verification("CORRECT")]
    result = result_of(reward_B, adv_BT, [solution(), solution(is_correct=True)], said * 2)
    rows = turn_rows(config_of(), Place(11, "verifier", "verifier", 3), result)
    assert [row["solution"]["is_correct"] for row in rows] == [False, False, True, True]
    assert [row["verifications"][0]["verdict"] for row in rows] == ["INCORRECT", "CORRECT"] * 2
    assert [(row["group"], row["sample"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_every_verification_of_a_solution_is_kept():
    said = [verification("CORRECT"), verification("INCORRECT"), verification("INVALID"), verification("INCORRECT")]
    result = generator_result(said, [steps_of(None, (0.5, 0.5))])
    rows = turn_rows(config_of(), Place(0, "generator", "generator", 0), result)
    verdicts = [[item["verdict"] for item in row["verifications"]] for row in rows]
    assert verdicts == [["CORRECT", "INCORRECT"], ["INVALID", "INCORRECT"]]
    assert [row["step_rewards"] for row in rows] == [[[0.5, -0.5], None], [None, [0.5, 0.5]]]


def test_an_arm_without_verifier_has_lines_without_verifications():
    result = result_of(np.float32([0.0, 1.0]), OUTCOME_BT, [solution(), solution(is_correct=True)],
                       adv_terms={"outcome": (1.0, OUTCOME_BT)})
    row = turn_rows(config_of(), Place(0, "generator", "generator", 0), result)[0]
    assert (row["verifications"], row["step_rewards"], row["notes"]) == ([], [], [])
    assert row["advantage"] == {"total": [[6, -0.7071, 70]],
                                "terms": [{"name": "outcome", "weight": 1.0, "runs": [[6, -0.7071]]}]}


def test_probabilities_of_steps_are_kept_where_they_are_the_reward():
    said = dataclasses.replace(verification(), p_steps=(0.75, None))
    soft = steps_of((0.25, None), None)._replace(y_BT=np.zeros((2, 7), np.float32))
    one = generator_result([said, verification()])
    one = dataclasses.replace(one, lesson=dataclasses.replace(one.lesson, step_rewards=[soft]))
    first, second = turn_rows(config_of(), Place(0, "generator", "generator", 0), one)
    assert first["verifications"][0]["p_steps"] == [0.75, None] and "p_steps" not in second["verifications"][0]
    assert first["step_rewards"] == [[0.25, None]] and first["step_formula"] == "(2 P(CORRECT) − 1) / K, K = 2"


def test_the_kinds_of_steps_are_kept_where_the_task_names_them():
    result = verifier_result()
    rows = turn_rows(config_of(), Place(11, "verifier", "verifier", 3), result,
                     step_kinds_fn=lambda problem, steps: tuple(f"{problem.id} {step}" for step in steps))
    assert rows[0]["solution"]["step_kinds"] == ["p0 b", "p0 c"]
    plain = turn_rows(config_of(), Place(11, "verifier", "verifier", 3), verifier_result())[0]
    assert "step_kinds" not in plain["solution"]


@pytest.mark.parametrize("text", ["", "<step>a</step>", "</step_verification><step_verification><step>a</step>"])
def test_without_a_closed_section_there_are_no_blocks(text):
    assert block_spans(text) == []


# ------------------------------------------------------------------------------------------------- which turns are kept


def write_turns(folder, config, turns: range, resume_after: int = 0) -> None:
    """Generator turns, of which each is one group of two lines."""
    dump = RolloutDump(folder, config, resume_after)
    for index in turns:
        dump.write(Place(index, "generator", "generator", index), generator_result())


def kept(folder) -> list[int]:
    return [turn for _, turn, _ in dumped_turns(folder)]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_fifth_turn_of_each_role_is_written(tmp_path):
    dump = RolloutDump(tmp_path, config_of(every=5))
    for index in range(2):
        dump.write(Place(index, "verifier", "warmup", 0), verifier_result())
    for index in range(2, 9):
        dump.write(Place(index, "generator", "generator", index - 2), generator_result())
    names = [path.name for path, *_ in dumped_turns(tmp_path)]
    assert names == ["turn_000001_verifier_000000.jsonl", "turn_000003_generator_000000.jsonl",
                     "turn_000008_generator_000005.jsonl"]
    lines = [(row["turn"], row["row"]) for row in read_rollouts(tmp_path)]
    assert lines == [(1, 0), (1, 1), (3, 0), (3, 1), (8, 0), (8, 1)]


def test_a_killed_and_resumed_run_leaves_the_same_files(tmp_path):
    config = config_of(every=2)
    write_turns(tmp_path / "whole", config, range(10))
    write_turns(tmp_path / "killed", config, range(7))  # the checkpoint is of turn 4, so turns 5 to 7 come again
    (tmp_path / "killed" / "turn_000007_generator_000006.partial").write_text('{"turn"')
    write_turns(tmp_path / "killed", config, range(4, 10), resume_after=4)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_turns_that_the_checkpoint_does_not_know_are_removed(tmp_path):
    write_turns(tmp_path, config_of(every=1), range(6))
    RolloutDump(tmp_path, config_of(every=4), resume_after=2)  # turns 3 to 6 might not come again
    assert kept(tmp_path) == [1, 2]


def test_a_turn_larger_than_a_file_is_cut_between_groups(tmp_path, monkeypatch):
    one, groups = generator_result(), 3
    write_turns(tmp_path / "one", config_of(every=1), range(1))
    size = sum(map(len, contents(tmp_path / "one").values()))
    arrays = [np.concatenate([part] * groups) for part in (one.lesson.reward.reward_B, one.adv_BT)]
    terms = {name: (weight, np.concatenate([value] * groups)) for name, (weight, value) in one.lesson.terms.items()}
    reward_terms = [dataclasses.replace(term, value=np.concatenate([term.value] * groups))
                    for term in one.lesson.reward.terms]
    steps = [steps_of(*rewards.of_steps * groups) for rewards in one.lesson.step_rewards]
    result = result_of(*arrays, *(said.records * groups for said in one.sampled), terms, steps, reward_terms)
    for share, lines in ((2.5, 4), (0.5, 2)):
        monkeypatch.setattr(rollout_dump, "MAX_BYTES", int(share * size))
        RolloutDump(tmp_path / "run", config_of(every=1)).write(Place(0, "generator", "generator", 0), result)
        rows = list(read_rollouts(tmp_path / "run"))
        assert len(rows) == lines and {row["rows_in_turn"] for row in rows} == {6}


def write_evaluations(folder, config, numbers: range, resume_after: int = 0) -> None:
    """An evaluation of three problems after every second turn."""
    dump = RolloutDump(folder, config, resume_after)
    for number in numbers:
        dump.write_evaluation(number, 2 * number, number, [solution()] * 3, [verification()] * 3, {})


def test_the_first_problems_of_every_evaluation_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_dump, "EVAL_PROBLEMS", 2)
    folder = tmp_path / "run"
    write_turns(folder, config_of(every=1), range(3))
    write_evaluations(folder, config_of(every=1), range(3), resume_after=3)
    rows = list(read_rollouts(folder, with_evaluations=True))
    found = [(row["turn"], row["role"], row["row"]) for row in rows]
    made = [(turn, "generator", row) for turn in (1, 2) for row in (0, 1)]
    assert found == [(0, "evaluation", 0), (0, "evaluation", 1), *made, (2, "evaluation", 0), (2, "evaluation", 1),
                     (3, "generator", 0), (3, "generator", 1), (4, "evaluation", 0), (4, "evaluation", 1)]
    assert rows[0]["reward"] is None and rows[0]["advantage"] is None and rows[0]["rows_in_turn"] == 2
    assert rows[0]["verifications"][0]["verdict"] == "INCORRECT"
    assert {row["role"] for row in read_rollouts(folder)} == {"generator"}  # unless they are asked for
    RolloutDump(folder, config_of(every=1), resume_after=2)
    assert sorted(contents(folder)) == ["evaluation_000000_000000.jsonl", "evaluation_000002_000001.jsonl",
                                          "turn_000001_generator_000000.jsonl",
                                          "turn_000002_generator_000001.jsonl"]


def test_nothing_is_written_where_it_should_not_be(tmp_path, monkeypatch):
    write_turns(tmp_path / "off", config_of(every=0), range(3))
    monkeypatch.setattr(hosts, "is_first", lambda: False)
    write_turns(tmp_path / "second", config_of(every=1), range(3))
    assert not list(tmp_path.iterdir())


def test_a_damaged_line_is_named(tmp_path):
    write_turns(tmp_path, config_of(every=1), range(1))
    path = dumped_turns(tmp_path)[0][0]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"turn_000001_generator_000000\.jsonl line 2 is not JSON .* delete that file"):
        list(read_rollouts(tmp_path))
