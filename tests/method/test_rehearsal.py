"""A rehearsal runs every function of a user on made-up responses before a run begins, and says what a turn will do."""

import pytest

from support.paths import CONFIGS
from tango_jax.cli.command_line import load_config
from tango_jax.config import default_config
from tango_jax.method import rehearsal
from tango_jax.method.arms import ARMS
from tango_jax.method.load import load_method
from tango_jax.method.rehearsal import made_up_task
from tango_jax.records import Problem
from tango_jax.rl.algorithms import ALGORITHMS
from tango_jax.rl.step_norm import FORMS
from tango_jax.text.prompts import INFORMED, SECOND_JUDGEMENT, SECOND_TRY

PROBLEM = Problem("p0", "1+1?", "2")


def task(min_steps: int = 2):
    return made_up_task(PROBLEM)._replace(min_steps=min_steps)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = default_config()
    config.generator.rewards, config.verifier.rewards = ("own.py:generator",), ("own.py:verifier",)
    return config


def write(text: str) -> None:
    with open("own.py", "w") as file:
        file.write(text)


@pytest.mark.parametrize("min_steps", [0, 3])
def test_each_function_sees_whole_and_empty_right_and_wrong_responses(config, min_steps):
    write(f"solved, judged = [], []  # a file of this content is run once: {min_steps}\n"
          "def generator(solution):\n    solved.append(solution)\n    return 0\n"
          "def verifier(verification, solution):\n    judged.append((verification, solution))\n    return 0\n")
    own = load_method(config, task(min_steps)).own_rewards
    assert set(own) == {"generator", "verifier"}
    seen = own["generator"][0].function.function.__globals__
    whole = next(one for one in seen["solved"] if one.is_correct)
    assert whole.problem == PROBLEM and whole.format_score == 1.0
    assert len(whole.steps) == len(whole.step_ends) == max(min_steps, 2)
    assert [whole.text[:end].endswith("</step") for end in whole.step_ends] == [True] * len(whole.steps)
    empty = next(one for one in seen["solved"] if not one.text)
    assert (empty.text, empty.steps, empty.is_correct) == ("", (), False)
    assert any(one.text and not one.is_correct for one in seen["solved"])
    assert all(verification.of is solution for verification, solution in seen["judged"])
    judged = next(one for one, solution in seen["judged"] if one.verdict == "CORRECT" and solution.steps)
    assert judged.is_aligned and judged.judgements == (True,) * len(whole.steps)
    unjudged = next(one for one, _ in seen["judged"] if not one.text)
    assert (unjudged.text, unjudged.verdict, unjudged.judgements) == ("", "INVALID", ())
    assert {(one.verdict, bool(solution.text), solution.is_correct) for one, solution in seen["judged"]} >= {
        ("CORRECT", True, True), ("INCORRECT", True, False), ("INCORRECT", True, True), ("INVALID", False, False)}


def test_a_function_that_only_fails_on_an_empty_response_is_found_now(config):
    write("def generator(solution):\n    return len(solution.steps[0])\n"
          "def verifier(verification, solution):\n    return 0\n")
    with pytest.raises(ValueError) as error:
        load_method(config, task())
    assert str(error.value) == (
        "arm=tango, the generator's turn: generator.rewards=own.py:generator: own.py, line 2: IndexError: tuple index "
        "out of range (for the response '' to problem 'p0'); the responses were made up to try the method before the "
        "run"
    )


@pytest.mark.parametrize("arm, prompts", [
    ("tango", {}), ("no_labels", {}), ("second_try", {"generator": (SECOND_TRY,)}),
    ("taught_verifier", {"verifier": (INFORMED,)}), ("meta_judged", {"verifier": (SECOND_JUDGEMENT,)})])
def test_the_prompts_that_an_arm_has_beside_the_roles_own(arm, prompts):
    method = load_method(load_config("tiny", [f"arm={arm}"]))
    for role in ("generator", "verifier"):
        assert method.further_prompts(role) == prompts.get(role, ())


@pytest.mark.parametrize("arm", [*ARMS])
def test_what_a_turn_samples_and_trains_on(arm):
    """Of 4 problems, 2 samples each, 3 verifications a solution."""
    config = load_config("tiny", [f"arm={arm}", "rl.verifications_per_solution=3"])
    found = {
        role: ({name: (call.prompts, call.samples) for (name, _), call in rehearsal.calls.items()},
               (rehearsal.learner.prompts, rehearsal.learner.samples), dict(rehearsal.draws))
        for role, rehearsal in load_method(config).rehearsals.items()
    }
    alone = ({"generator": (4, 2)}, (4, 2), {"train": 1})
    solve = ({"generator": (4, 2), "verifier": (8, 3)}, (4, 2), {"train": 1})
    judge = ({"generator": (4, 1), "verifier": (4, 2)}, (4, 2), {"verifier": 1})
    expected = {
        "tango": {"generator": solve, "verifier": judge},
        "grpo": {"generator": alone},
        "fixed_verifier": {"generator": solve},
        "fixed_verifier_warm": {"generator": solve, "verifier": judge},
        "fixed_generator": {"verifier": judge},
        "gold_steps": {"generator": alone},
        "grpo_curriculum": {"generator": (*alone[:2], {"curriculum": 1})},
        "self_verify": {"generator": alone, "verifier": judge},
        "no_labels": {"generator": ({"generator": (4, 2), "verifier": (8, 1)}, (4, 2), {"train": 1}),
                      "verifier": ({"generator": (4, 2), "verifier": (4, 2)}, (4, 2), {"verifier": 1})},
        "second_try": {"generator": ({"generator": (4, 2), "verifier": (8, 1), "second_try": (8, 1)}, (16, 1),
                                     {"train": 1}), "verifier": judge},
        "taught_verifier": {"generator": solve, "verifier": judge},
        "meta_judged": {"generator": solve, "verifier": ({**judge[0], "second_judgement": (8, 1)}, *judge[1:])},
        "scored": {"generator": solve,
                   "verifier": ({"generator": (4, 2), "verifier": (8, 2)}, (8, 1), {"verifier": 1})},
        "scored_exact": {"generator": solve,
                         "verifier": ({"generator": (4, 2), "verifier": (8, 1)}, (8, 1), {"verifier": 1})},
    }
    assert found == expected[arm]


@pytest.mark.parametrize("arm", [*ARMS])
def test_terms_of_a_reward_sum_to_it(arm, monkeypatch):
    """Of the built-in turns, on the made-up responses that a user's are tried on."""
    seen, checked = [], rehearsal.advantages_of
    monkeypatch.setattr(rehearsal, "advantages_of", lambda lesson, *args: seen.append(lesson) or checked(lesson, *args))
    load_method(load_config("tiny", [f"arm={arm}", "rl.format_weight=0.25", "rl.gamma=0.5"]))
    assert seen
    for lesson in seen:
        total = sum(term.weight * term.value for term in lesson.reward.terms)
        assert total == pytest.approx(lesson.reward.reward_B, abs=1e-6)
    assert any(lesson.reward.reward_B.min() < lesson.reward.reward_B.max() for lesson in seen)



def test_a_prompt_may_be_sampled_several_times_in_a_turn(config):
    """The calls of a prompt are told apart by their number; what they log is put together."""
    config.generator.rewards = config.verifier.rewards = ()
    config.arm, config.generator.max_response = "own.py:mine", 40
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 3, 2
    write("""
import dataclasses
from tango_jax.method import tango
from tango_jax.method.arms import ARMS
def solve(t):
    t.sample("verifier", t.sample("generator", t.problems("verifier")))
    return tango.solve(t)
mine = dataclasses.replace(ARMS["tango"], label="mine", turns={"generator": solve})
""")
    calls = load_method(config, task()).rehearsals["generator"].calls
    assert {key: call[1:3] for key, call in calls.items()} == {
        ("generator", 0): (3, 1), ("verifier", 0): (3, 1), ("generator", 1): (3, 2), ("verifier", 1): (6, 1)}


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_form_of_step_advantages_passes_the_rehearsal(form, algorithm):
    """Of whole, empty, right and wrong responses: each token has a finite advantage."""
    keys = [f"generator.loss.step_norm={form}", f"generator.loss.algorithm={algorithm}"]
    assert load_method(load_config(str(CONFIGS / "tiny.py"), keys)).rehearsals["generator"].prompts
