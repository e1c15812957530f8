"""What a turn and an evaluation say of themselves: tokens and seconds of both roles, what was cut or not graded."""

import io
import logging
import types

import numpy as np

from tango_jax.config import default_config
from tango_jax.grading import GradeReport
from tango_jax.loop import measure
from tango_jax.loop import turn as turns
from tango_jax.records import Problem, Responses, Rollout, Solution, Verification
from tango_jax.runtime.console import Console
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.tracking.loggers import RunLog
from tango_jax.tracking.turn_metrics import sampled_per_second


def solution(text="<step>a</step>") -> Solution:
    return Solution(Problem("p", "q", "1"), text, ("a",), (0,), 1.0, True, None)


def test_speed_is_tokens_of_both_roles_over_the_time_of_both():
    tokens = {"generator/tokens_sampled": 300, "verifier/tokens_sampled": 100, "generator/tokens": 7}
    seconds = {"time/sample_s": 3.0, "time/verify_s": 2.0, "time/update_s": 9.0}
    assert sampled_per_second(tokens, seconds) == 80.0
    # A verifier that does not write samples nothing in its time.
    assert sampled_per_second({"generator/tokens_sampled": 300, "verifier/tokens_scored": 50}, seconds) == 100.0
    assert sampled_per_second({"verifier/tokens_scored": 50}, {"time/verify_s": 2.0}) == 0.0
    assert sampled_per_second({"generator/tokens_sampled": 300}, {"time/sample_s": 3.0}) == 100.0  # arm grpo


def test_the_verifications_of_a_generator_turn_are_measured(monkeypatch):
    """Two of four solutions are cut for the prompt, and one of four answers ends at the limit."""
    rollout = Rollout((np.arange(4),) * 3 + (np.arange(8),), (), np.array([False] * 3 + [True]), 8, 32)
    said = Verification("", (), "INVALID", 0.0, False, ())
    monkeypatch.setattr(turns, "build_prompts", lambda policy, prompt, solutions: ([[1]] * 4, [True, False] * 2))
    monkeypatch.setattr(turns, "read_responses", lambda *args: [said] * 4)

    def sample(context, policy, params, request):
        request.ended_fn(3)
        return rollout

    monkeypatch.setattr(turns, "_sample", sample)
    states = {"verifier": types.SimpleNamespace(weights=None)}
    sampling = types.SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0)
    policy = types.SimpleNamespace(role="verifier", tokenizer=None, config=sampling,
                                   model_config=types.SimpleNamespace(score_head=""))
    shown = []
    context = turns.RunContext(default_config(), None, {"verifier": policy}, {}, PhaseTimer(), show_fn=shown.append)
    metrics = turns.respond(context, states, "verifier", [solution()] * 4, 1, None).metrics
    assert metrics == {
        "verifier/length_mean": 5.0, "verifier/length_max": 8, "verifier/truncation_rate": 0.25,
        "verifier/tokens_sampled": 20, "verifier/decode_waste": 1 - 20 / 32, "verifier/prompts_shortened": 2,
        "verifier/shortened_rate": 0.5,
    }
    assert shown == ["0 of 4 verifications sampled", "3 of 4 verifications sampled", "reading what the verifier wrote"]


FAILED = {"grader/errors": 2, "grader/timeouts": 1, "grader/overlong": 0}
CUT = {"verifier/truncation_rate": 0.0, "verifier/shortened_rate": 0.0}


def test_an_evaluation_says_what_the_grader_could_not_judge(monkeypatch, tmp_path):
    rollout = Rollout((np.arange(4),), (), np.array([False]), 4, 4)
    verification = Verification("", (True,), "CORRECT", 1.0, True, ("",))
    parts = {"generator": (solution(), FAILED), "verifier": (verification, CUT)}

    def respond(context, states, role, parents, group_size, key_data, is_greedy):
        return Responses(role, parents, [[1]], group_size, rollout, [parts[role][0]], parts[role][1])

    monkeypatch.setattr(measure, "respond", respond)
    task = types.SimpleNamespace(num_test=1, test_problem=lambda index: None)
    context = types.SimpleNamespace(config=default_config(), task=task, method=None)
    metrics = measure.evaluate_roles(context, {}, []).metrics
    assert {name: metrics[name] for name in metrics if name.startswith("grader/")} == {
        "grader/eval_errors": 2, "grader/eval_timeouts": 1, "grader/eval_overlong": 0,
    }
    stream = io.StringIO()
    with RunLog(tmp_path, default_config(), Console(stream=stream), 0) as log:
        log.write(7, "eval", metrics)
        log.write(8, "eval", metrics | dict.fromkeys(metrics, 0))
    assert stream.getvalue().count("could not judge") == 1
    assert "answers of the evaluation after turn 7; they count as wrong: 2 errors, 1 timeouts" in (
        stream.getvalue().replace("\n", " "))


def test_a_fixed_pool_says_what_the_grader_could_not_judge(monkeypatch, caplog):
    report = GradeReport(correct=(True, False), errors=0, timeouts=1, overlong=0)
    monkeypatch.setattr(measure, "grade_solutions", lambda graded, problems, texts: report)
    task = types.SimpleNamespace(
        pool_solution=lambda index: (Problem("p", "q", "1"), solution().text), grade_kind="math", min_steps=1,
        gold_steps=None, num_pool=None,
    )
    with caplog.at_level(logging.WARNING):
        pool = measure.fixed_pool(task, 2)
    assert [item.is_correct for item in pool] == [True, False]
    assert "1 of the 2 solutions of the fixed pool count as wrong" in caplog.text
