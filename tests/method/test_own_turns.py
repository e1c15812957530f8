"""Methods of a user: three that are functions of a Turn and nothing else, and mistakes that are told before stage 1."""

import contextlib
import dataclasses
import inspect
import json

import numpy as np
import pytest

from support import own_turns
from support.paths import CONFIGS, TESTS
from support.turns import Said, settings, solution, turn_of, verification
from tango_jax.cli.command_line import load_config
from tango_jax.method.lesson import advantages_of
from tango_jax.method.load import load_method
from tango_jax.method.rewards import graded
from tango_jax.method.tango import judged_steps
from tango_jax.method.turn import Turn, joined
from tango_jax.records import Lesson, Memory, Rewards, TurnResult
from tango_jax.rl.schedule import Place
from tango_jax.runtime.console import Console
from tango_jax.tasks.registry import make_task
from tango_jax.text.prompts import JUDGE, SECOND_JUDGEMENT, SECOND_TRY, SOLVE
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.rollout_dump import read_rollouts
from tango_jax.tracking.rollout_rows import turn_rows
from tango_jax.tracking.turn_metrics import turn_metrics
from tango_jax.train import train
from torture.runs import ROLES, SMALL

SILENT = Console(enabled=False)
FILE = TESTS / "support/own_turns.py"
METHODS = {"agreed": own_turns.solve_where_both_agree, "rewriting": own_turns.solve_and_rewrite,
           "debate": own_turns.judge_a_debate}


# --------------------------------------------------------------------------------------------------- what they teach


def total_of(lesson) -> np.ndarray:
    return sum(np.reshape(weight, (-1, 1)) * adv_BT for weight, adv_BT in lesson.terms.values())


def test_only_solutions_on_which_both_judgements_agree_are_rewarded_by_steps():
    solved = [solution(grade, tokens=5, steps=("a", "b"), step_ends=(1, 3)) for grade in (True, False)]
    said = [verification(judgements=pair) for pair in ((True, False), (True, False), (True, True), (True, False))]
    t = turn_of(settings(1, 2, alpha_schedule="none", alpha_initial=0.5), "generator",
                {"generator": solved, "verifier": said})
    lesson = own_turns.solve_where_both_agree(t)
    assert [one.of_steps for one in lesson.step_rewards] == [[(0.5, -0.5), None]]
    assert lesson.metrics["generator/agreed"] == 0.5
    # Steps +1/2 and -1/2 have mean 0 and sample deviation 1/sqrt(2); a token gets those still to come.
    np.testing.assert_allclose(lesson.terms["agreed steps"][1], [
        [0, 0, -np.sqrt(0.5), -np.sqrt(0.5), 0], [0] * 5], rtol=1e-4, atol=1e-6)


def test_a_rewritten_step_is_graded_in_its_solution_and_both_are_trained_on():
    text = "<think><step>one</step><step>two</step></think><answer>\\boxed{%s}</answer>"
    first = [solution(False, text=text % "a", steps=("one", "two")), solution(True, text=text % "b")]
    said = [verification("INCORRECT", (True, False)), verification()]
    new = "<think><step>deux</step></think><answer>\\boxed{b}</answer>"
    t = turn_of(settings(1, 2), "generator", {"generator": first, "verifier": said,
                "rewrite": [solution(False, text=new, steps=("deux",), tokens=3)]})
    lesson = own_turns.solve_and_rewrite(t)
    [_, _, (name, [judged])] = t._work.asked
    assert name == "rewrite" and judged is t.sampled[1][0]
    fields = own_turns.REWRITE.fields(judged, True)
    assert fields.question(fields.text) == "q\n<think><step>one</step>"
    assert own_turns.with_the_step_rewritten(lesson.responses[2]) == (
        "<think><step>one</step><step>deux</step></think><answer>\\boxed{b}</answer>")
    # Grades 0, 1 and, of the spliced text, 1: mean 2/3 and sample deviation 1/sqrt(3).
    np.testing.assert_array_equal(lesson.reward.reward_B, [0, 1, 1])
    np.testing.assert_allclose(total_of(lesson)[:, 0], np.array([-2, 1, 1]) / 3 * np.sqrt(3), rtol=1e-4)
    assert lesson.metrics == {} and lesson.responses.most_prompts == 4


def test_the_verifier_of_a_debate_names_the_better_solution():
    said = {"generator": [solution(grade) for grade in (True, False, False, True, False, False)],
            "debate": [verification(verdict, tokens=3) for verdict in
                       ("CORRECT", "INCORRECT", "CORRECT", "INCORRECT", "INVALID", "CORRECT")]}
    t = turn_of(settings(3, 2), "verifier", said, phase="warmup")
    lesson = own_turns.judge_a_debate(t)
    # The first of the first pair is right, the second of the second; of the third none is, and either will do.
    np.testing.assert_array_equal(lesson.reward.reward_B, [1, 0, 0, 1, 0, 1])
    assert [one.of for one in lesson.responses] == [pair for pair in lesson.responses.parents for _ in range(2)]
    np.testing.assert_allclose(total_of(lesson)[:, 2], np.array([1, -1, -1, 1, -1, 1]) * np.sqrt(0.5), rtol=1e-4)


@pytest.mark.parametrize("function", METHODS.values())
def test_each_is_written_in_a_few_lines(function):
    assert len(inspect.getsource(function).splitlines()) <= 25


# ---------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_each_is_trained_from_a_file(name, tiny_train, tiny_run, tmp_path):
    """A cycle, from a stage 1 that has learned the format."""
    start = [f"{role}.{setting}" for role in ROLES for setting in (f"init_from={tiny_run.workdir}", "mesh.fsdp=1")]
    config = load_config(str(CONFIGS / "tiny.py"), [
        *tiny_train.overrides, *start, f"arm={FILE}:{name}", "rollouts.every=1", "rl.generator_steps=3",
        "rl.warmup_steps=1", "compile_cache="])
    summary = train(config, tmp_path / "run", SILENT)
    assert (summary["arm"], summary["compiles_after_warmup"]) == (name, 0)
    rows = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if row["phase"] != "eval"]
    assert [row["phase"] for row in rows] == ["warmup", *["generator"] * 3, "verifier"]
    assert all(row[f"{row['phase']}/logprob_gap_max"] < 1e-4 for row in rows[1:])
    assert any(row["generator/grad_norm"] > 0 for row in rows[1:4])
    dumped = list(read_rollouts(tmp_path / "run/rollouts"))
    assert {row["turn"] for row in dumped} == {1, 2, 3, 4, 5}
    if name == "agreed":
        assert any(row["generator/agreed"] > 0 for row in rows[1:4])
        assert all(len(row["verifications"]) == 2 for row in dumped if row["role"] == "generator")
    if name == "rewriting":
        assert sum(row["generator/rewritten"] for row in rows[1:4]) > 0
        assert sum("rewrite/tokens_sampled" in row for row in rows) > 0
        assert any("second_try" in row for row in dumped)
    if name == "debate":
        assert all("debate/tokens_sampled" in row for row in rows if row["phase"] != "generator")
        # It judges two solutions: its verdict is about neither alone.
        assert all((row["solution"] is None) == (row["role"] == "verifier") for row in dumped)


def rows_of(t: Turn, lesson) -> list[dict]:
    """What a run would write of the turn."""
    adv_BT = advantages_of(lesson, t.role, t.config)
    metrics = turn_metrics(t, lesson, {})
    rows = turn_rows(t.config, t.place, TurnResult({}, metrics, t.sampled, lesson, adv_BT, t.memory))
    return json.loads(json.dumps(rows))


def test_judgements_by_a_prompt_of_ones_own_are_measured_and_shown():
    critique = dataclasses.replace(JUDGE, name="critique")
    said = {"generator": [solution(True), solution(False)],
            "critique": [verification(), verification("INCORRECT", (False,))]}
    t = turn_of(settings(1, 2), "generator", said)
    solutions, reward = graded(t, t.sample("generator", t.problems(), 2))
    judged = t.sample("verifier", solutions, prompt=critique)
    lesson = Lesson(solutions, reward, {"outcome": (1.0, t.algorithm.outcome(reward, solutions))},
                    step_rewards=judged_steps(t, solutions, judged))
    assert turn_metrics(t, lesson, {})["verifier/live_accept_gap"] == 1.0
    assert [row["verifications"][0]["verdict"] for row in rows_of(t, lesson)] == ["CORRECT", "INCORRECT"]


@pytest.mark.parametrize("judged, prefix", [(4, "verifier/live_"), (2, "verifier/judged_")])
def test_solutions_to_a_prompt_of_ones_own_are_solutions(judged, prefix):
    """All of them are judged, or those to one prompt."""
    terse = dataclasses.replace(SOLVE, name="terse")
    one = [solution(True), solution(False)]
    two = [solution(grade, steps=("a", "b", "c"), step_ends=(0, 1, 2), tokens=3) for grade in (True, False)]
    said = {"terse": one, "generator": two, "verifier": [verification(judgements=(True,) * 3)] * judged}
    t = turn_of(settings(1, 2), "generator", said)
    problems = t.problems()
    solved = [t.sample("generator", problems, 2, prompt=terse), t.sample("generator", problems, 2)]
    both = joined(solved, most_prompts=4)
    t.sample("verifier", both if judged == 4 else solved[1])
    _, reward = graded(t, both)
    metrics = turn_metrics(t, Lesson(both, reward, {"outcome": (1.0, t.algorithm.outcome(reward, both))}), {})
    assert f"{prefix}outcome_f1" in metrics and metrics["generator/steps_mean"] == 2.0


def test_a_verifier_may_learn_from_its_second_judgements_as_well():
    said = {"generator": [solution(True), solution(False)], "verifier": [verification(tokens=3)] * 4,
            "second_judgement": [verification("INCORRECT", (False,))] * 4}
    t = turn_of(settings(2, 2), "verifier", said, phase="warmup")
    judged = t.sample("verifier", t.sample("generator", t.problems("verifier")), 2)
    both = joined([judged, t.sample("verifier", judged, prompt=SECOND_JUDGEMENT)], most_prompts=8)
    reward = Rewards(np.arange(8, dtype=np.float32), {"verifier/reward/correctness": 0.5})
    rows = rows_of(t, Lesson(both, reward, {"outcome": (1.0, t.algorithm.outcome(reward, both))}))
    assert [row["reward"]["total"] for row in rows] == [0, 1, 4, 5, 2, 3, 6, 7]  # by problems
    assert [row["verifications"][0]["verdict"] for row in rows] == ["CORRECT"] * 2 + ["INCORRECT"] * 2 + (
        ["CORRECT"] * 2 + ["INCORRECT"] * 2)


def test_a_verifiers_turn_may_end_in_second_tries():
    """It is rewarded for what the generator makes of its judgement."""
    said = {"generator": [solution(False)] * 2, "verifier": [verification("INCORRECT", (False,))] * 4,
            "second_try": [solution(grade, tokens=3) for grade in (True, False, True, True)]}
    t = turn_of(settings(2, 2), "verifier", said, phase="warmup")
    judged = t.sample("verifier", t.sample("generator", t.problems("verifier")), 2)
    tried = t.sample("generator", judged, prompt=SECOND_TRY)
    reward = Rewards(np.array([one.is_correct for one in tried], np.float32), {"verifier/reward/helped": 0.75})
    rows = rows_of(t, Lesson(judged, reward, {"outcome": (1.0, t.algorithm.outcome(reward, judged))}))
    assert [row["reward"]["total"] for row in rows] == [1, 0, 1, 1]
    assert rows[0]["advantage"]["total"] == [[2, pytest.approx(0.5 * np.sqrt(2), rel=1e-3), 2]]


@pytest.mark.parametrize("name, role", [("rewriting", "generator"), ("debate", "verifier")])
def test_stage_one_has_no_examples_of_a_users_prompt_and_says_so(name, role):
    """Nobody has written any: it teaches the roles' own prompts as it would without."""
    config = load_config("tiny", [f"arm={FILE}:{name}"])
    method = load_method(config)
    [prompt] = method.further_prompts(role)
    task, plain = make_task(config, {}, {role: (prompt,)}), make_task(config, {})
    assert [task.sft_example(role, "train", index) for index in range(6)] == [
        plain.sft_example(role, "train", index) for index in range(6)]
    assert any(f"stage 1 has no examples of {prompt.name}" in note for note in task.notes)


@pytest.mark.parametrize("prompt", [JUDGE, SECOND_JUDGEMENT], ids=lambda prompt: prompt.name)
def test_nor_of_one_with_the_name_of_another(prompt):
    own = dataclasses.replace(prompt, fields=own_turns.two_solutions)
    task = make_task(load_config("tiny"), {}, {"verifier": (own,)})
    assert not any(task.sft_example("verifier", "train", index).prompt for index in range(6))
    assert any(f"stage 1 has no examples of {prompt.name}" in note for note in task.notes)


# ------------------------------------------------------------------------------------------------------- mistakes


HEAD = """
import dataclasses
import time

import numpy as np

from tango_jax.method import tango
from tango_jax.method.arms import ARMS
from tango_jax.method.rewards import graded
from tango_jax.method.turn import joined
from tango_jax.records import Lesson, Rewards

def solved(t):
    return graded(t, t.sample("generator", t.problems(), t.rl.samples_per_prompt))

def taught(t, solutions, reward, **fields):
    return Lesson(solutions, reward, {"outcome": (1.0, t.algorithm.outcome(reward, solutions))}, **fields)

def solve(t):
"""
TAIL = """
mine = dataclasses.replace(ARMS["tango"], label="mine", turns=ARMS["tango"].turns | {"generator": solve})
"""
USUAL = "solutions, reward = solved(t)\njudged = t.sample('verifier', solutions)\n"
MISTAKES = {
    "a sample whose count depends on data": (
        "solutions, reward = solved(t)\n"
        "t.sample('verifier', [one for one in solutions if one.is_correct])\nreturn taught(t, solutions, reward)",
        r"t\.sample\(\.\.\., prompt=verifier\) has 0 to 4 parents, depending on data: give at_most=, the largest"),
    "more than at_most": (
        "solutions, reward = solved(t)\n"
        "t.sample('verifier', [one for one in solutions if one.is_correct], at_most=2)\n"
        "return taught(t, solutions, reward)",
        r"has [34] parents, and at_most=2: raise it"),
    "samples that depend on data": (
        "solutions, reward = solved(t)\n"
        "t.sample('verifier', solutions, 1 + solutions[0].is_correct)\nreturn taught(t, solutions, reward)",
        r"t\.sample\(\.\.\., prompt=verifier\) takes 1 to 2 samples, depending on earlier samples: take one number"),
    "a call that depends on data": (
        "solutions, reward = solved(t)\nif solutions[0].is_correct:\n    t.sample('verifier', solutions)\n"
        "return taught(t, solutions, reward)",
        r"its calls depend on the responses: generator, verifier where they are mixed, generator where all are wrong"),
    "what is trained on depends on data": (
        USUAL + "second = t.sample('generator', [one.problem for one in solutions if not one.is_correct], at_most=4)\n"
        "both = joined([solutions, second], 4 + len(second))\n"
        "return taught(t, both, Rewards(np.arange(len(both), dtype=np.float32), {}))",
        r"the number of responses that are trained on depends on data \(4 x 1, .*\): join them with most_prompts="),
    "an advantage of other rows": (
        USUAL + "lesson = taught(t, solutions, reward)\n"
        "return dataclasses.replace(lesson, terms={'own': (1.0, lesson.terms['outcome'][1][:3])})",
        r"the lesson's term 'own' is of shape \[3, \d+\]; it must have a finite number for each token, \[4, \d+\]"),
    "an infinite advantage": (
        USUAL + "lesson = taught(t, solutions, reward)\n"
        "return dataclasses.replace(lesson, terms={'own': (1.0, lesson.terms['outcome'][1] + np.inf)})",
        r"the lesson's term 'own' is of shape \[4, \d+\] and not finite; it must have"),
    "a weight of other rows": (
        USUAL + "lesson = taught(t, solutions, reward)\n"
        "return dataclasses.replace(lesson, terms={'own': (np.ones(3), lesson.terms['outcome'][1])})",
        r"the weight of the lesson's term 'own' is of shape \[3\]; it must be one finite number, or one for each of 4"),
    "rewards of other rows": (
        USUAL + "lesson = taught(t, solutions, reward)\n"
        "return dataclasses.replace(lesson, reward=Rewards(np.zeros(17, np.float32), {}))",
        r"the lesson's reward is of shape \[17\]; it must be Rewards with a finite number for each response, 4"),
    "no rewards": (
        USUAL + "return dataclasses.replace(taught(t, solutions, reward), reward=1.0)",
        r"the lesson's reward is 1\.0; it must be Rewards with a finite number"),
    "no terms": (
        USUAL + "return Lesson(solutions, reward, {})", "the lesson has no terms: name at least one"),
    "no lesson": (USUAL + "return reward.reward_B", r"it returned .*; it must return a Lesson \(tango_jax\.records\)"),
    "nothing": (USUAL.rstrip(), r"it returned None; it must return a Lesson"),
    "responses of the other role": (
        USUAL + "return taught(t, judged, Rewards(np.arange(4, dtype=np.float32), {}))",
        r"the lesson's responses are 4 of the verifier; they must be at least one response of the generator"),
    "responses of both roles": (
        USUAL + "both = joined([solutions, judged], 8)\n"
        "return taught(t, both, Rewards(np.arange(len(both), dtype=np.float32), {}))",
        "joined responses are of generator and of verifier: a turn trains one role"),
    "a metric that is no number": (
        USUAL + "return taught(t, solutions, reward, metrics={'generator/mine': reward.reward_B})",
        r"its metric generator/mine is .*; it must be a number"),
    "a metric that another part of the turn has": (
        USUAL + "return taught(t, solutions, reward, metrics={'generator/reward/outcome': 1.0, "
        "'generator/length_max': 1.0})",
        "metrics named generator/length_max and generator/reward/outcome: rename"),
    "memory changed in place": (
        USUAL + "t.memory.own['turns'] = 1.0\nreturn taught(t, solutions, reward)",
        r"own\.py, line \d+: TypeError: 'mappingproxy' object does not support item assignment"),
    "a field of the memory changed in place": (
        USUAL + "t.memory.label_counts = (1.0, 2.0)\nreturn taught(t, solutions, reward)",
        r"own\.py, line \d+: FrozenInstanceError: cannot assign to field 'label_counts'"),
    "no memory": (
        USUAL + "return taught(t, solutions, reward, memory={'turns': 1.0})",
        r"the lesson's memory is .*; it must be t\.memory\.replace\(\.\.\.\), or None"),
    "a clock": (
        USUAL + "own = Rewards(reward.reward_B + np.float32(time.perf_counter_ns() % 1e6), reward.metrics)\n"
        "return taught(t, solutions, own)",
        "with the same responses it has another result each time: a turn must be a function of the Turn alone"),
    "random numbers": (
        USUAL + "own = Rewards(np.random.random(len(solutions)).astype(np.float32), reward.metrics)\n"
        "return taught(t, solutions, own)",
        "it has another result each time: .* without a clock or random numbers"),
    "another stream": (
        "solutions = t.sample('generator', t.problems('hard'), 2)\nreturn taught(t, *graded(t, solutions))",
        r"there is no stream of problems 'hard': choose one of train, verifier, curriculum"),
    "another role's prompt": (
        "from tango_jax.text.prompts import JUDGE\nsolutions = t.sample('generator', t.problems(), 2, prompt=JUDGE)\n",
        r"t\.sample\('generator', \.\.\., prompt=verifier\): this is a verifier's prompt"),
    "the reference of the other role": (
        "from tango_jax.text.prompts import INFORMED\n" + USUAL + "t.reference_logps(judged, INFORMED)\n"
        "return taught(t, solutions, reward)",
        r"t\.reference_logps\(responses of the verifier, prompt=informed of the verifier\) in a turn of the generator"),
    "an error of its own": (
        USUAL + "return taught(t, solutions, reward.rewards)", r"own\.py, line \d+: AttributeError:"),
}


def written(folder, body: str, **changed: str):
    """The settings of a small run of an arm whose generator's turn has this body."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    (folder / "own.py").write_text(HEAD + lines + TAIL)
    return load_config(str(CONFIGS / "tiny.py"), [*SMALL, f"arm={folder / 'own.py'}:mine", "compile_cache=",
                                                  *(f"{key}={value}" for key, value in changed.items())])


def refused(config, folder) -> str:
    with pytest.raises(ValueError) as error:
        train(config, folder / "run", SILENT)
    assert not (folder / "run/sft").exists() and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("body, message", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_is_one_line_before_stage_one(body, message, tmp_path):
    said = refused(written(tmp_path, body), tmp_path)
    assert said.startswith(f"arm={tmp_path / 'own.py'}:mine, the generator's turn: ")
    assert said.endswith("; the responses were made up to try the method before the run")
    with pytest.raises(ValueError, match=message):
        raise ValueError(said)


GOOD = USUAL + "return taught(t, solutions, reward)"


def test_what_the_mistakes_were_made_in_is_a_method(tmp_path):
    method = load_method(written(tmp_path, GOOD))
    assert method.arm.label == "mine" and method.rehearsals["generator"].learner[:2] == (2, 2)


def test_settings_of_trust_need_a_turn_that_takes_them(tmp_path):
    config = written(tmp_path, GOOD, **{"rl.trust": "(0.4,0.55)"})
    assert refused(config, tmp_path) == (
        "rl.trust=(0.4, 0.55) and rl.judge=all change tango.solve, and the generator's turn of "
        f"arm={tmp_path}/own.py:mine does not use it: build the turn on tango_jax.method.trust.solve, or set "
        "rl.trust=() and rl.judge=all")
    assert "rl.judge=failed change tango.solve" in refused(written(tmp_path, GOOD, **{"rl.judge": "failed"}), tmp_path)
    on_trust = "from tango_jax.method import trust\nreturn trust.solve(t)"
    method = load_method(written(tmp_path, on_trust, **{"rl.trust": "(0.4,0.55)"}))
    assert "generator/judged_share" in method.rehearsals["generator"].metrics


def test_settings_of_step_rewards_are_no_matter_of_a_turn_without_them(tmp_path):
    without = USUAL + "return Lesson(solutions, reward, {'outcome': (1.0, t.algorithm.outcome(reward, solutions))}, {})"
    load_method(written(tmp_path, without, **{"rl.alpha_final": "0.0"}))
    with pytest.raises(ValueError, match="exponential alpha schedule cannot start or end at 0"):
        load_method(written(tmp_path, "return tango.solve(t)", **{"rl.alpha_final": "0.0"}))


@pytest.mark.parametrize("count, settings, message", [
    ("1", {}, r"^generator\.loss\.algorithm=grpo compares the responses to a prompt, and the turn takes only one"),
    ("4", {"rl.samples_per_prompt": "1", "verifier.loss.algorithm": "reinforce_pp"}, ""),
    ("4", {"generator.row_buckets": "(3,)"}, ""),  # of no 2 samples
    ("2", {"generator.row_buckets": "(3,)"}, r"^generator\.row_buckets ends in 3, which is not a multiple of "),
])
def test_the_samples_of_the_calls_count_and_not_the_setting_alone(count, settings, message, tmp_path):
    """Its labels are no majority, so one sample a problem would be enough for them."""
    body = (f"solutions = t.sample('generator', t.problems(), {count})\n"
            "solutions = t.labelled(solutions, [bool(one.text) for one in solutions])\n"
            "t.sample('verifier', solutions)\nreturn taught(t, *graded(t, solutions))")
    config = written(tmp_path, body, **settings)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        assert load_method(config).rehearsals["generator"].labels


def test_a_reward_that_the_turn_does_not_add_is_refused(tmp_path):
    (tmp_path / "reward.py").write_text("def f(solution):\n    return 0.0\n")
    own = {"generator.rewards": (f"{tmp_path / 'reward.py'}:f",)}
    by_hand = ("solutions = t.sample('generator', t.problems(), 2)\nt.sample('verifier', solutions)\n"
               "return taught(t, solutions, Rewards(np.arange(len(solutions), dtype=np.float32), {}))")
    said = refused(written(tmp_path, by_hand, **own), tmp_path)
    assert "generator.rewards is set, and the turn does not add it: use graded or agreement" in said


def test_more_parents_than_the_rehearsal_said_is_one_error(tmp_path):
    """What is made up has two steps; a solution of three is judged twice here."""
    body = ("solutions, reward = solved(t)\nt.sample('verifier', [one for one in solutions for _ in one.steps[1:]], "
            "at_most=4)\nreturn taught(t, solutions, reward)")
    config = written(tmp_path, body)
    method = load_method(config)

    def turn(num_steps: int) -> Turn:
        said = {"generator": [solution(steps=("s",) * num_steps)] * 4, "verifier": [verification()] * 8}
        t = turn_of(config, "generator", said)
        return Turn(config, t.task, Place(0, "generator", "generator", 0), Memory(), method.algorithms["generator"],
                    Said(said, t.task), (), method.rehearsals["generator"].calls)

    assert len(method.turns["generator"](turn(2)).responses) == 4
    with pytest.raises(ValueError) as error:
        method.turns["generator"](turn(3))
    assert "\n" not in str(error.value)
    assert "t.sample(..., prompt=verifier), call 1 of that prompt, has 8 parents with 1 samples each, and the " in str(
        error.value)
    assert "rehearsal had at most 4 with 1: give at_most=, the largest number possible" in str(error.value)
