"""Answers are graded while the verifier samples, where nothing needs the grades first."""

import threading
import types

import numpy as np
import pytest

from support.processes import HANG_S
from support.together import Together
from tango_jax.config import default_config
from tango_jax.grading import GradeReport
from tango_jax.loop.measure import evaluate_roles
from tango_jax.loop.turn import PolicyWork, RunContext
from tango_jax.method import tango, trust
from tango_jax.method.lesson import advantages_of, digest_of
from tango_jax.method.turn import Turn
from tango_jax.records import Memory, Problem, Rewards, Rollout
from tango_jax.rl.algorithms import algorithm_of
from tango_jax.rl.own_reward import OwnReward
from tango_jax.rl.schedule import Place
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.runtime.user_code import UserFunction
from tango_jax.tasks import own_grader
from tango_jax.tasks.task import Task
from tango_jax.text.character_tokenizer import printable_model
from tango_jax.text.templates import TEMPLATES
from tango_jax.text.tokenizer import load_sentencepiece

P, M = 3, 2
TOKENIZER = load_sentencepiece(printable_model())
ANSWERS = ("1", "2", "1", "x", "1", "1")  # of the solutions of a generator's turn; the gold answer is 1
GRADES = (True, False, True, False, True, True)
BLOCK = r"<step>\boxed{CORRECT}</step>"
VERIFICATION = (f"<step_verification>{BLOCK}{BLOCK}</step_verification>"
                r"<final_verification>\boxed{CORRECT}</final_verification>")


class FakeSampler:
    """Says what it is given, by row; notes when."""

    def __init__(self, name: str, texts: tuple[str, ...], happened: list[str], before_fn=lambda: None):
        self.name, self.texts, self.happened, self.before_fn = name, texts, happened, before_fn

    def layout(self, weights: object) -> object:
        return weights

    def sample(self, weights: object, request: object) -> Rollout:
        self.happened.append(f"{self.name} samples")
        self.before_fn()
        texts = [self.texts[row % len(self.texts)] for row in request.row_numbers]
        tokens = tuple(np.array(TOKENIZER.encode_response(text), np.int32) for text in texts)
        logps = tuple(np.linspace(-1, 0, len(ids), dtype=np.float32) for ids in tokens)
        total = sum(map(len, tokens))
        return Rollout(tokens, logps, np.zeros(len(tokens), bool), max(map(len, tokens)), total)


class Job:
    """A turn with policies that say what is written above. `happened`: what began or ended, in order."""

    def __init__(self, role: str = "generator", verifier_fn=lambda: None, grade_kind: str = "math",
                 own_rewards: tuple[OwnReward, ...] = (), **rl: object):
        self.happened: list[str] = []
        solutions = tuple(f"<think><step>a</step><step>b</step></think><answer>\\boxed{{{answer}}}</answer>"
                          for answer in ANSWERS)
        config = default_config()
        config.rl.prompts_per_step, config.rl.samples_per_prompt = P, M
        config.rl.update(rl)
        policies, texts = {}, {"generator": solutions, "verifier": (VERIFICATION,)}
        for name in ("generator", "verifier"):
            config[name].max_prompt, config[name].max_response = 20_000, 400
            sampler = FakeSampler(name, texts[name], self.happened, verifier_fn if name == "verifier" else lambda: None)
            policies[name] = types.SimpleNamespace(config=config[name], template=TEMPLATES[name, "math"], role=name,
                                                   model_config=types.SimpleNamespace(score_head=""),
                                                   tokenizer=TOKENIZER, sampler=sampler)
        task = Task("own", grade_kind, 1, lambda index: Problem(f"p{index}", "q", "1"),
                    lambda index: Problem(f"t{index}", "q", "1"))
        self.timer = PhaseTimer()
        self.context = RunContext(config, task, policies, {}, self.timer)
        self.states = dict.fromkeys(policies, types.SimpleNamespace(weights=None))
        self.t = Turn(config, task, Place(0, role, role, 0), Memory(), algorithm_of("grpo"),
                      PolicyWork(self.context, self.states), own_rewards)

    def grader(self, before_fn=lambda: None):
        """In place of own_grader.grade_solutions."""

        def grade(task: Task, problems: list[Problem], texts: list[str]) -> GradeReport:
            before_fn()
            self.happened.append("graded")
            correct = tuple(r"\boxed{1}" in text for text in texts)
            return GradeReport(correct, correct.count(False), 0, 0, ("",) * len(texts))

        return grade


def waits_for(event: threading.Event):
    def wait() -> None:
        assert event.wait(HANG_S), "the verifier did not sample"

    return wait


def result_of(job: Job, turn) -> tuple:
    """What the turn trains on, and its metrics."""
    lesson = turn(job.t)
    adv_BT = advantages_of(lesson, job.t.role, job.t.config)
    return digest_of(lesson, adv_BT), lesson.reward.metrics, lesson.metrics, job.t.metrics


TURNS = [("generator", tango.solve, GRADES), ("verifier", tango.judge, GRADES[:P])]


@pytest.mark.parametrize("role, turn, right", TURNS)
def test_the_verifier_samples_while_the_grader_works(monkeypatch, role, turn, right):
    samples = threading.Event()
    job = Job(role, verifier_fn=samples.set)
    monkeypatch.setattr(own_grader, "grade_solutions", job.grader(waits_for(samples)))
    found = result_of(job, turn)
    assert job.happened == ["generator samples", "verifier samples", "graded"]
    solutions = job.t.sampled[0]
    assert tuple(one.is_correct for one in solutions) == right
    assert solutions.metrics["grader/errors"] == right.count(False)
    assert set(job.timer.pop()) > {"time/grade_s", "time/grade_beside_s"}
    monkeypatch.undo()
    at_once = Job(role, grade_kind="string")  # compared in this process
    assert result_of(at_once, turn) == found
    assert "time/grade_beside_s" not in at_once.timer.pop()


@pytest.mark.parametrize("turn, settings", [
    (trust.solve, {"trust": (0.1, 0.5)}), (trust.solve, {"judge": "silent"}), (tango.solve, {"dynamic_sampling": 1}),
])
def test_what_needs_the_grades_waits_for_them(monkeypatch, turn, settings):
    samples = threading.Event()
    job = Job(verifier_fn=samples.set, **settings)
    # So slow that a verifier which does not wait samples meanwhile.
    monkeypatch.setattr(own_grader, "grade_solutions", job.grader(lambda: samples.wait(0.3)))
    turn(job.t)
    batches = 1 + settings.get("dynamic_sampling", 0)
    assert job.happened == ["generator samples", "graded"] * batches + ["verifier samples"]


def test_an_evaluation_grades_beside_the_verifier_too(monkeypatch):
    samples = threading.Event()
    job = Job(verifier_fn=samples.set)
    job.t.config.eval.problems = len(ANSWERS)
    monkeypatch.setattr(own_grader, "grade_solutions", job.grader(waits_for(samples)))
    found = evaluate_roles(job.context, job.states, [])
    assert job.happened == ["generator samples", "verifier samples", "graded"]
    assert found.metrics["generator/accuracy"] == 4 / 6 and found.metrics["grader/eval_errors"] == 2


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_an_error_of_the_grader_ends_the_turn(monkeypatch, error):
    def fail() -> None:
        raise error("the math grader cannot start: no library")

    job = Job()
    monkeypatch.setattr(own_grader, "grade_solutions", job.grader(fail))
    with pytest.raises(ValueError, match="^the math grader cannot start: no library. Once that is mended"):
        tango.solve(job.t)
    assert job.happened == ["generator samples", "verifier samples"]


def test_grades_that_no_turn_reads_are_waited_for(monkeypatch):
    job = Job()
    monkeypatch.setattr(own_grader, "grade_solutions", job.grader())
    solutions = job.t.sample("generator", job.t.problems(), M)
    job.t.wait_for_grades()
    assert job.happened == ["generator samples", "graded"] and solutions.metrics["grader/timeouts"] == 0


@pytest.mark.parametrize("settings", [{}, {"dynamic_sampling": 1}])
@pytest.mark.parametrize("slow", [0, 1])
def test_processes_exchange_in_one_order_whichever_grades_slowly(monkeypatch, settings, slow):
    """A thread that grades has no part in it: `Together` lets it exchange nothing."""
    samples, jobs = threading.Event(), [Job(verifier_fn=lambda: samples.set(), **settings) for _ in range(2)]

    def grade(task: Task, problems: list[Problem], texts: list[str]) -> GradeReport:
        is_slow = (problems[0].id == "p0") == (slow == 0)  # the first process has the first problem
        if is_slow and not settings:
            waits_for(samples)()
        return jobs[0].grader()(task, problems, texts)

    monkeypatch.setattr(own_grader, "grade_solutions", grade)
    together = Together(monkeypatch, 2)
    first, second = together.run(lambda index: result_of(jobs[index], tango.solve))
    assert first == second and together.exchanged[0] == together.exchanged[1]
    monkeypatch.undo()
    alone = Job(**settings)
    monkeypatch.setattr(own_grader, "grade_solutions", alone.grader())
    assert result_of(alone, tango.solve) == first
    for job in jobs:
        for found, expected in zip([*job.t.sampled, *job.t.everything()], [*alone.t.sampled, *alone.t.everything()],
                                   strict=True):
            assert found.records == expected.records and found.metrics == expected.metrics


def test_a_reward_that_reads_grades_in_one_process_does_not_change_the_order(monkeypatch):
    """Each process rewards its own part. The grades are exchanged before."""
    own_reward = OwnReward("generator", UserFunction("generator.rewards", "own.py:f", lambda solution: (
        2.0 * solution.is_correct if solution.problem.id == "p0" else 0.0)))
    jobs = [Job(own_rewards=(own_reward,)) for _ in range(2)]
    monkeypatch.setattr(own_grader, "grade_solutions", jobs[0].grader())

    def work(index: int) -> list[float]:
        t = jobs[index].t
        solutions = t.sample("generator", t.problems(), M)
        return t.with_own_reward(solutions, Rewards(np.zeros(P * M, np.float32), {})).reward_B.tolist()

    assert Together(monkeypatch, 2).run(work) == [[2, 0, 0, 0, 0, 0]] * 2
