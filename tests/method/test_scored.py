"""Verifiers that do not write: their advantages, worked by hand and against JAX's gradients of the plain losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.paths import CONFIGS
from support.turns import Said, settings, solution, task_of, turn_of, verification
from tango_jax.cli.command_line import load_config
from tango_jax.method import tango, trust
from tango_jax.method.arms import ARMS, Arm
from tango_jax.method.baselines import solve_alone
from tango_jax.method.load import load_method, own_prompts, stage_one_kind
from tango_jax.method.scored import judge_drawn, judge_exactly, on_one_text
from tango_jax.records import Lesson, Memory
from tango_jax.rl.algorithms import ALGORITHMS
from tango_jax.rl.losses import clipped_loss_BT
from tango_jax.runtime.user_code import given
from tango_jax.text.prompts import JUDGE, OWN, SCORED, SECOND_JUDGEMENT

TWO = ("first", "second")


class Read(Said):
    """Verifications of solutions with two steps, whose marks are tokens 1 and 3 of five. `p`: P(CORRECT) of both, by
    solution; None: the marks had no room."""

    def __init__(self, p: list, said: dict):
        super().__init__(said, task_of())
        self.p = p

    def respond(self, prompt, parents, samples, path):
        responses = super().respond(prompt, parents, samples, path)
        if prompt.role == "generator":
            return responses
        rows = [p for p in self.p for _ in range(samples)]
        logps = [np.array([0, 1, 0, 1, 0]) * np.log(np.repeat(p or (1, 1), [2, 3])) for p in rows]
        others = [np.array([-1, 9, -1, 9, -1] if p else [-1] * 5) for p in rows]
        rollout = dataclasses.replace(responses.rollout, logps=tuple(one.astype(np.float32) for one in logps),
                                      others=tuple(others), is_truncated_B=np.array([p is None for p in rows]))
        return responses.replace(rollout=rollout)


def read_turn(p: list, is_correct: list[bool], marks: list, prompts: int = 1, dynamic: int = 0, **others):
    """A turn of the verifier, about solutions of `prompts` problems."""
    said = {"generator": [solution(one, steps=TWO) for one in is_correct],
            "verifier": [verification("CORRECT" if all(one) else "INCORRECT", one, tokens=5,
                                      is_aligned=len(one) == 2) for one in marks]}
    t = turn_of(settings(prompts, len(is_correct) // prompts, dynamic_sampling=dynamic), "verifier", {}, **others)
    t._work, t._own = Read(p, said), {**OWN, "verifier": SCORED}
    return t


def advantage_of(lesson: Lesson) -> np.ndarray:
    return sum(np.reshape(weight, (-1, 1)) * adv_BT for weight, adv_BT in lesson.terms.values())


P = [(0.9, 0.8), (0.9, 0.8), (0.3, 0.6)]  # of a right solution, a wrong one, another wrong one


def test_the_likelihood_of_the_grade_by_hand():
    t = read_turn([*P, None], [True, False, False, False], [(True, True), (True, True), (False, True), ()])
    lesson = judge_exactly(t)
    # Right: 1 at each mark. Wrong: -P / (1 - P), with P = 0.72 and 0.18; what was not read teaches nothing.
    expected = np.zeros((4, 5))
    expected[:3, [1, 3]] = np.array([[1.0], [-0.72 / 0.28], [-0.18 / 0.82]])
    np.testing.assert_allclose(advantage_of(lesson), expected, rtol=1e-5)
    np.testing.assert_allclose(lesson.reward.reward_B[:3], [0.72, 0.28, 0.82], rtol=1e-5)
    assert lesson.metrics["verifier/log_likelihood"] == pytest.approx(np.log([0.72, 0.28, 0.82]).mean(), rel=1e-5)
    # Right are the verdicts on the first, CORRECT, and the third, INCORRECT. Without a mark it is CORRECT.
    assert lesson.reward.metrics["verifier/reward/correctness"] == 2 / 4
    assert lesson.responses.group_size == 1 and lesson.reward.terms[0].name == "likelihood of the grade"


def surrogate_gradient(lesson: Lesson, logits: np.ndarray) -> np.ndarray:
    """Of the loss that an update takes, summed over the marks, in the log-odds of both marks of each solution."""
    adv = jnp.asarray(advantage_of(lesson)[:, [1, 3]], jnp.float32)

    def loss(logits):
        logp = jax.nn.log_sigmoid(logits)
        return clipped_loss_BT(logp - jax.lax.stop_gradient(logp), adv, 0.2, 0.2)[0].sum()

    return np.asarray(jax.grad(loss)(jnp.asarray(logits, jnp.float32)))


def log_odds(p: list) -> np.ndarray:
    return np.log(np.array(p)) - np.log1p(-np.array(p))


def test_the_gradient_is_that_of_the_likelihood():
    is_right = np.array([True, False, False])
    lesson = judge_exactly(read_turn(P, is_right.tolist(), [(True, True), (True, True), (False, True)]))

    def loss(logits):
        log_P = jax.nn.log_sigmoid(logits).sum(axis=1)
        return -jnp.where(is_right, log_P, jnp.log1p(-jnp.exp(log_P))).sum()

    plain = np.asarray(jax.grad(loss)(jnp.asarray(log_odds(P), jnp.float32)))
    np.testing.assert_allclose(surrogate_gradient(lesson, log_odds(P)), plain, rtol=1e-4)
    # The blame of a wrong solution: P (1 - p_k) / (1 - P), more for the step that is less sure.
    np.testing.assert_allclose(plain[1], [0.72 * 0.1 / 0.28, 0.72 * 0.2 / 0.28], rtol=1e-4)


def test_a_wrong_solution_that_is_surely_right_has_a_finite_gradient():
    """1 - P would be 0 in float32; the blame is shared evenly."""
    sure = [(1 - 1e-9, 1 - 1e-9)]
    lesson = judge_exactly(read_turn(sure, [False], [(True, True)]))
    np.testing.assert_allclose(surrogate_gradient(lesson, np.full((1, 2), 20.7)), [[0.5, 0.5]], rtol=0.05)
    certain = judge_exactly(read_turn([(1.0, 1.0)], [False], [(True, True)]))
    assert np.isfinite(advantage_of(certain)).all()


DRAWS = [(True, True), (False, True), (True, False), (True, True)]  # two of a right solution, two of a wrong one
ONE_TEXT = [(0.9, 0.8), (0.3, 0.6)]


def test_draws_of_a_text_are_trained_on_as_one():
    t = read_turn(ONE_TEXT, [True, False], DRAWS, memory=Memory())
    lesson = judge_drawn(t)
    # Agreement 1, 0 and 1, 0 (format scores are equal): advantages of +-0.7071 in each group, classes of equal weight.
    a = 0.5 / (np.sqrt(0.5) + 1e-6)
    expected = np.zeros((2, 5))
    expected[0, [1, 3]] = (a - a * -0.9 / 0.1) / 2, (a - a) / 2
    expected[1, [1, 3]] = (a - a) / 2, (a * -0.6 / 0.4 - a) / 2
    np.testing.assert_allclose(advantage_of(lesson), expected, rtol=1e-4, atol=1e-6)
    responses = lesson.responses
    assert len(responses) == 2 == len(responses.prompts) and responses.group_size == 1
    assert [record.of for record in responses] == list(responses.parents) == list(t.sampled[0])
    np.testing.assert_allclose(lesson.reward.reward_B, [0.5 + 0.8, 0.5 + 0.8])
    assert lesson.metrics["verifier/label_count_correct"] == 2  # verifications, as in tango.judge
    # The report's row has the first draw, and says that the rest is of all of them.
    assert all(term.name.endswith(", mean of 2 draws") for term in lesson.reward.terms)
    assert lesson.formula.startswith("mean of 2 draws, of which the first is shown")
    assert ALGORITHMS["grpo"].formula in lesson.formula


def test_the_gradient_is_that_of_the_drawn_marks():
    t = read_turn(ONE_TEXT, [True, False], DRAWS, memory=Memory(label_counts=(1.0, 4.0)))
    lesson = judge_drawn(t)
    drawn = t.sampled[1]
    plain_lesson = tango.class_balanced(t, drawn, tango.agreement(t, drawn)[1])
    [(weight_B, adv_BT)] = plain_lesson.terms.values()
    adv = jnp.asarray(weight_B * adv_BT[:, 1], jnp.float32)
    assert len({round(abs(float(one)), 4) for one in adv}) == 2  # the classes weigh differently

    def loss(logits):
        logits = jnp.repeat(logits, 2, axis=0)
        logp = jnp.where(np.array(DRAWS), jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits))
        return -(adv[:, None] * logp).sum() / 2

    plain = jax.grad(loss)(jnp.asarray(log_odds(ONE_TEXT), jnp.float32))
    np.testing.assert_allclose(surrogate_gradient(lesson, log_odds(ONE_TEXT)), plain, rtol=1e-4, atol=1e-6)


def tiny(arm: str, *overrides: str):
    return load_config(str(CONFIGS / "tiny.py"), [f"arm={arm}", *overrides])


def test_both_turns_use_what_is_read_unless_they_name_a_prompt():
    method = load_method(tiny("scored", "rl.verifications_per_solution=3"))
    assert method.own["verifier"] is SCORED and load_method(tiny("tango")).own["verifier"] is JUDGE
    calls = {role: [(call.prompt, call.prompts, call.samples) for call in rehearsal.calls.values()][1]
             for role, rehearsal in method.rehearsals.items()}
    assert calls == {"generator": (SCORED, 8, 3), "verifier": (SCORED, 8, 2)}
    assert method.rehearsals["verifier"].learner == (8, 1, False, True)
    assert method.further_prompts("verifier") == ()


def test_trust_counts_judgements_that_are_read():
    method = load_method(tiny("scored_exact", "rl.trust=(0.4,0.55)", "rl.judge=failed", "rl.alpha_schedule=none"))
    assert "generator/trust" in method.rehearsals["generator"].metrics
    t = read_turn(P, [True, False, False], [(True, True), (True, True), (False, True)])
    t.rl.trust = (0.4, 0.55)
    memory = trust.remembering(judge_exactly)(t).memory
    # Two steps of a right solution, none rejected; two wrong ones, of which one is accepted.
    assert trust.Evidence(*memory.evidence)[4:9] == (2, 0, 2, 1, 1)


@pytest.mark.parametrize("verifications, evidence", [
    (1, (2, 0, 1, 0, 1)),  # the likelier marks: a step of the wrong one is rejected
    (2, (4, 1, 2, 1, 2)),  # as drawn
])
def test_trust_counts_marks_in_both_turns_alike(verifications, evidence):
    t = read_turn(ONE_TEXT, [True, False], DRAWS, memory=Memory())
    t.rl.trust, t.rl.verifications_per_solution = (0.4, 0.55), verifications
    read = [dataclasses.replace(one, p_steps=p) for one, p in zip(t._work.left["verifier"],
                                                                  np.repeat(ONE_TEXT, 2, axis=0), strict=True)]
    t._work.left["verifier"] = read
    memory = trust.remembering(judge_drawn)(t).memory
    assert trust.Evidence(*memory.evidence)[4:9] == evidence


def test_trust_counts_drawn_marks_of_what_was_read_once_where_solving_draws():
    """Of 400 wrong solutions, whose likelier marks reject none, a share of 1 - 0.8 x 0.6 has a rejected step."""
    t = read_turn([(0.8, 0.6)] * 400, [False] * 400, [(True, True)] * 400)
    t.rl.trust, t.rl.verifications_per_solution = (0.4, 0.55), 2
    t._work.left["verifier"] = [dataclasses.replace(one, p_steps=(0.8, 0.6)) for one in t._work.left["verifier"]]
    evidence = trust.Evidence(*trust.remembering(judge_exactly)(t).memory.evidence)
    assert evidence.practised_wrong == 400 and evidence.practised_accepted == pytest.approx(400 * 0.48, abs=40)


def test_its_stage_one_is_of_another_kind():
    assert stage_one_kind(tiny("tango"), "scored") == stage_one_kind(tiny("tango"), "scored_exact") == "marks_alone"
    assert stage_one_kind(tiny("tango"), "scored", ("generator",)) == stage_one_kind(tiny("tango"), "tango") == ""
    assert stage_one_kind(tiny("tango", "verifier.adapter=generator"), "scored") == "marks_alone"
    assert stage_one_kind(tiny("tango", "verifier.sft.steps=0"), "scored") == ""


def judge_twice(t):
    lesson = judge_exactly(t)
    t.sample("verifier", lesson.responses, prompt=SECOND_JUDGEMENT)
    return lesson


@pytest.mark.parametrize("overrides, told", [
    (("rl.samples_per_prompt=1", "generator.loss.algorithm=reinforce_pp"),
     "rl.samples_per_prompt=1, and several verifications of a solution are compared: raise it"),
    (("verifier.stop_at_first_error=true",), "the verifier of arm=scored does not write, and with "
     "verifier.stop_at_first_error=True it would stop writing: set it to False"),
    # With trust, marks that are missing could not be read in the rehearsal.
    (("verifier.stop_at_first_error=true", "rl.trust=(0.4,0.55)"), "the verifier of arm=scored does not write, and "
     "with verifier.stop_at_first_error=True it would stop writing: set it to False"),
    (("task.stage_one=self", "verifier.sft.steps=2"), "task.stage_one=self teaches a verifier to write, and that of "
     "arm=scored does not: set verifier.sft.steps=0"),
    (("verifier.max_response=3000000",), "the verifier of arm=scored would score up to 24000000 tokens"),
])
def test_what_does_not_combine_is_refused_in_one_line(overrides, told):
    with pytest.raises(ValueError) as caught:
        load_method(tiny("scored", *overrides))
    assert told in str(caught.value) and "\n" not in str(caught.value).strip()


def test_its_stage_one_may_be_that_of_another_run():
    settings = ("task.stage_one=self", "verifier.sft.steps=2", "verifier.init_from=runs/scored")
    assert load_method(tiny("scored", *settings)).arm.is_scored


def test_draws_have_a_reward_of_ones_own_and_a_likelihood_has_none():
    with given({"verifier.rewards": lambda verification, solution: 0.5}) as named:
        own = f"verifier.rewards={named['verifier.rewards']}"
        metrics = load_method(tiny("scored", own), task_of()).rehearsals["verifier"].metrics
        assert "verifier/reward/own/lambda" in metrics
        with pytest.raises(ValueError, match="verifier.rewards is set, and the turn does not add it"):
            load_method(tiny("scored_exact", own), task_of())


def test_a_verifier_that_does_not_write_answers_no_other_prompt():
    mine = dataclasses.replace(ARMS["scored_exact"], turns={"verifier": judge_twice}, label="mine")
    with given({"arm": mine}) as named, pytest.raises(ValueError, match="has is_scored=True, so that its verifier does "
                                                      "not write, and the verifier's turn samples from it with the "
                                                      "prompt second_judgement"):
        load_method(tiny("tango", f"arm={named['arm']}"))


def test_a_verifier_that_writes_has_no_marks_read():
    def solve_and_read(t):
        return dataclasses.replace(solve_alone(t), metrics={"read": len(t.sample("verifier", t.sampled[0], 1, SCORED))})

    mine = dataclasses.replace(ARMS["tango"], turns=ARMS["tango"].turns | {"generator": solve_and_read}, label="mine")
    with given({"arm": mine}) as named, pytest.raises(ValueError, match="has is_scored=False, so that its verifier "
                                                      "writes, and the generator's turn reads its marks with the "
                                                      "prompt verifier, which has is_scored=True: name no prompt, or"):
        load_method(tiny("tango", f"arm={named['arm']}"))


@pytest.mark.parametrize("arm", ["tango", "self_verify", "no_labels", "second_try"])
def test_draws_from_one_text_are_trained_on_as_one(arm):
    written = dataclasses.replace(ARMS[arm], is_scored=True, label="mine")
    judge = written.turns["verifier"]
    once = dataclasses.replace(written, turns=written.turns | {"verifier": lambda t: on_one_text(t, judge(t))})
    with given({"arm": written}) as named, pytest.raises(ValueError) as caught:
        load_method(tiny("tango", f"arm={named['arm']}"))
    assert ("has is_scored=True, and the verifier's turn trains on 2 draws from each text, which is read once: return "
            "scored.on_one_text(t, lesson) from the turn") in str(caught.value)
    assert "\n" not in str(caught.value).strip()
    with given({"arm": once}) as named:
        trained = load_method(tiny("tango", f"arm={named['arm']}")).rehearsals["verifier"].learner
    assert trained.samples == 1 and trained.is_scored


def test_an_arm_with_a_fixed_verifier_can_have_one_that_does_not_write():
    fixed: Arm = dataclasses.replace(ARMS["fixed_verifier"], is_scored=True, label="mine")
    assert own_prompts(fixed)["verifier"] is SCORED
    with given({"arm": fixed}) as named:
        method = load_method(tiny("tango", f"arm={named['arm']}"))
    assert list(method.turns) == ["generator"] and method.most_read(tiny("tango")) == 8


def test_dynamic_sampling_chooses_draws_with_their_marks():
    """Two batches of a problem each; in the first all draws agree with the grade, so the second is taken."""
    p = [(0.9, 0.8), (0.7, 0.6), (0.9, 0.7), (0.3, 0.6)]
    t = read_turn(p[:2], [True, True], [(True, True)] * 4, dynamic=1)
    t._work.left["generator"] += [solution(False, steps=TWO)] * 2
    t._work.left["verifier"] += [verification("CORRECT", (True, True), tokens=5),
                                 verification("INCORRECT", (False, True), tokens=5)] * 2
    calls = iter((p[:2], p[2:]))
    respond = t._work.respond

    def next_batch(prompt, *args):
        if prompt.role == "verifier":
            t._work.p = next(calls)
        return respond(prompt, *args)

    t._work.respond = next_batch
    responses = judge_drawn(t).responses
    marks = [np.exp(logp_T[other_T >= 0]) for logp_T, other_T in zip(responses.rollout.logps, responses.rollout.others,
                                                                    strict=True)]
    np.testing.assert_allclose(marks, p[2:], rtol=1e-5)
    assert t.metrics["verifier/batches_sampled"] == 2
