"""Problems of which the generator should get half right, worked by hand."""

import dataclasses

import pytest

from support.turns import settings as turn_settings
from support.turns import solution, turn_of
from tango_jax.config import default_config
from tango_jax.method.arms import ARMS, turns_of
from tango_jax.method.baselines import solve_alone
from tango_jax.method.practice import CANDIDATES, DECAY, candidates_of, half_right, passes_after, remembering
from tango_jax.method.rewards import graded
from tango_jax.method.turn import cursors_after, problems_of_a_draw
from tango_jax.records import Lesson, Memory, Problem, Solution
from tango_jax.text.prompts import SOLVE


def settings(practice: str = "half_right"):
    rl = default_config().rl
    rl.practice, rl.prompts_per_step, rl.dynamic_sampling = practice, 3, 1
    return rl


def problem(number: int, size: int = 0) -> Problem:
    return Problem(f"p{number}", "q", "a", size)


def solved(of: Problem, is_right: bool, label: bool | None = None) -> Solution:
    return Solution(of, "", (), (), 0.0, is_right, None, label=label)


def test_problems_closest_to_half_right_are_taken_in_their_order():
    # Expected to be right: 2 words (8 + .5) / 9, 3 words (3 + .5) / 7 = 1/2, 4 words (1 + .5) / 5 = .3, 5 not known.
    passes = {"2": (8.0, 8.0), "3": (3.0, 6.0), "4": (1.0, 4.0)}
    problems = [problem(number, size) for number, size in enumerate((2, 4, 3, 2, 5, 4, 3))]
    assert [each.size for each in half_right(problems, 3, passes)] == [3, 5, 3]
    assert [each.id for each in half_right(problems, 4, passes)] == ["p1", "p2", "p4", "p6"]  # the first of the fours
    assert half_right(problems, 7, passes) == problems


def test_problems_of_files_are_known_by_their_ids():
    passes = {"id p0": (4.0, 4.0), "id p1": (2.0, 4.0)}
    assert [each.id for each in half_right([problem(number) for number in range(3)], 2, passes)] == ["p1", "p2"]


def test_a_problem_is_taken_once_where_candidates_go_round_a_file():
    """Eight candidates from a file of three problems."""
    passes = {"id p0": (0.0, 4.0), "id p1": (2.0, 4.0), "id p2": (1.0, 4.0)}
    candidates = [problem(number) for number in (0, 1, 2, 1, 0, 2, 2, 1)]
    assert [each.id for each in half_right(candidates, 2, passes)] == ["p1", "p2"]
    assert [each.id for each in half_right(candidates, 3, passes)] == ["p0", "p1", "p2"]
    assert [each.id for each in half_right(candidates, 4, passes)] == ["p0", "p1", "p2", "p1"]  # there are three


def test_counts_by_size_fade_and_those_by_id_are_replaced():
    passes = {"2": (4.0, 8.0), "3": (1.0, 2.0), "id p7": (1.0, 1.0), "id p8": (1.0, 4.0)}
    answers = [solved(problem(1, 2), True), solved(problem(2, 2), False), solved(problem(3, 5), False),
               solved(problem(8), True), solved(problem(8), False)]
    assert passes_after(passes, answers) == {
        "2": pytest.approx((4 * DECAY + 1, 8 * DECAY + 2)), "3": pytest.approx((DECAY, 2 * DECAY)), "5": (0.0, 1.0),
        "id p7": (1.0, 1.0), "id p8": (1.0, 2.0),
    }
    assert passes_after({}, [solved(problem(1, 2), True, label=False)]) == {"2": (0.0, 1.0)}


def test_a_turn_that_remembers_counts_its_own_solutions():
    said = {"generator": [solution(True), solution(False), solution(True), solution(True)]}
    t = turn_of(turn_settings(2, 2, practice="half_right"), "generator", said, memory=Memory(passes={"9": (1.0, 1.0)}))
    lesson = remembering(solve_alone)(t)
    assert lesson.memory.passes == {"9": (DECAY, DECAY), "id 0": (1.0, 2.0), "id 1": (2.0, 2.0)}


def test_solutions_to_a_prompt_of_ones_own_count_as_well():
    t = turn_of(turn_settings(1, 2, practice="half_right"), "generator", {"hint": [solution(True), solution(False)]})

    def solve_with_a_hint(t):
        solutions, reward = graded(t, t.sample("generator", t.problems(), 2, dataclasses.replace(SOLVE, name="hint")))
        return Lesson(solutions, reward, {"outcome": (1.0, t.algorithm.outcome(reward, solutions))})

    assert remembering(solve_with_a_hint)(t).memory.passes == {"id 0": (1.0, 2.0)}


def test_as_published_all_problems_are_taken_and_nothing_is_counted():
    arm = ARMS["tango"]
    assert turns_of(arm, settings("all")) == arm.turns
    counted = turns_of(arm, settings())
    assert {role: turn.__wrapped__ for role, turn in counted.items()} == arm.turns
    assert candidates_of(settings("all"), "verifier") == candidates_of(settings(), "generator") == 1


def test_all_candidates_are_set_apart():
    assert problems_of_a_draw(settings(), "verifier") == 2 * 3 * CANDIDATES
    assert problems_of_a_draw(settings(), "generator") == problems_of_a_draw(settings("all"), "verifier") == 2 * 3


def test_a_turn_takes_the_candidates_closest_to_half_right():
    config = turn_settings(1, 1, practice="half_right", dynamic_sampling=0)
    passes = {f"id {number}": counts for number, counts in enumerate([(4.0, 4.0), (0.0, 4.0), (2.0, 4.0), (4.0, 4.0)])}
    for role, taken in (("verifier", "2"), ("generator", "0")):
        for stream in ("verifier", "train"):  # the turns of one's own arm may draw either
            t = turn_of(config, role, {}, memory=Memory(passes=passes))
            assert [each.id for each in t.problems(stream)] == [taken]
    assert cursors_after(config.rl, {"train": 5}, "verifier", {"train": 1}) == {"train": 5 + CANDIDATES}
    assert cursors_after(config.rl, {"train": 5}, "generator", {"verifier": 2}) == {"train": 5, "verifier": 2}
