"""Arms with second tries, second judgements and a teacher: whole runs, what they show of it, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tango_jax.loop.responses import CALL_TEXTS
from tango_jax.rl.informed import informed_prompts

from support.paths import CONFIGS
from support.tiny_train import StopAfter, repeatable_rows
from tango_jax.cli.command_line import load_config
from tango_jax.loop import measure, run, turn
from tango_jax.loop.imitation import sft_pairs
from tango_jax.method.arms import ARMS
from tango_jax.records import Judged, Problem, Solution, Verification
from tango_jax.rl.policy import make_policies
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console
from tango_jax.tasks.registry import make_task
from tango_jax.text.templates import GENERATOR_MATH, VERIFIER_MATH, second_try_prompt, with_earlier
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.rollout_dump import read_rollouts
from tango_jax.viewer import charts
from tango_jax.viewer.runs import find_runs

SILENT = Console(enabled=False)
RELATIVES = ("second_try", "taught_verifier", "meta_judged")


def config_of(arm: str, *overrides: str):
    settings = ("rollouts.every=1", "eval.every=6", "generator.mesh.fsdp=1", "verifier.mesh.fsdp=1")
    return load_config(str(CONFIGS / "tiny.py"), [f"arm={arm}", *settings, *overrides])


@pytest.fixture
def every_other(monkeypatch):
    """Models that know nothing reject nothing: every other solution is tried again whatever the verdict."""
    for module in (turn, measure):
        monkeypatch.setitem(module.ABOUT, "rejected", lambda judged, _: np.arange(len(judged.records))[::2])


@pytest.mark.parametrize("arm", RELATIVES)
def test_a_resumed_run_is_the_same_to_the_bit(arm, every_other, tmp_path):
    config = config_of(arm)
    policies = make_policies(config)
    run.run_or_resume(config, tmp_path / "whole", SILENT, policies)
    with pytest.raises(hosts.Preempted):
        run.run_or_resume(config, tmp_path / "stopped", SILENT, policies, preemption=StopAfter(8))
    run.run_or_resume(config, tmp_path / "stopped", SILENT, policies)
    rows = repeatable_rows(tmp_path / "whole/metrics.jsonl")
    assert repeatable_rows(tmp_path / "stopped/metrics.jsonl") == rows
    assert json.loads((tmp_path / "whole/summary.json").read_text())["compiles_after_warmup"] == 0
    trained = [row for row in rows if row["phase"] != "eval"]
    assert all(row.get(f"{role}/logprob_gap_max", 0) < 1e-4 for row in trained for role in ("generator", "verifier"))
    check_what_is_shown(arm, tmp_path / "whole", trained)


def test_the_teacher_stays_what_the_verifier_began_as(monkeypatch, tmp_path):
    seen, scores = [], turn.teacher_scores

    def noted(teacher, policy, reference_fn, learner, is_action_BT):
        if teacher:
            seen.append(jax.device_get(reference_fn()))
        return scores(teacher, policy, reference_fn, learner, is_action_BT)

    monkeypatch.setattr(turn, "teacher_scores", noted)
    run.run_or_resume(config_of("taught_verifier"), tmp_path, SILENT)
    assert len(seen) == 4
    jax.tree.map(np.testing.assert_array_equal, seen[0], seen[-1])
    updates = [row.get("verifier/update_ratio") for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert max(filter(None, updates), default=0) > 0, "while the verifier itself learns"


def check_what_is_shown(arm: str, workdir, rows: list[dict]) -> None:
    dumped = list(read_rollouts(workdir / "rollouts", with_evaluations=True))
    solved = [row for row in dumped if row["role"] == "generator"]
    if arm == "second_try":
        turns = [row for row in rows if row["phase"] == "generator"]
        assert [row["second_solution/share"] for row in turns] == [0.5] * 6
        assert all(row["second_solution/tokens_sampled"] > 0 for row in turns)
        # Rows of 4 problems with 2 samples; every other one has a second try with its own reward and advantage.
        assert ["second_solution" in row for row in solved] == [b % 2 == 0 for b in range(8)] * 6
        second = solved[0]["second_solution"]
        assert second["reward"]["terms"][-1]["name"] == "improvement" and second["advantage"]["total"]
        evaluated = [row for row in dumped if row["role"] == "evaluation"]
        assert any("second_solution" in row and row["second_solution"]["text"] is not None for row in evaluated)
        assert all("second_solution/eval_final_accuracy" in row for row in read_metrics(workdir / "metrics.jsonl")
                   if row["phase"] == "eval")  # fmt: skip
        [run_shown] = find_runs([workdir])
        shown = {item["title"]: [trace["name"] for trace in item["traces"]] for item in charts.training(run_shown)}
        assert "greedy, with second tries" in shown["Generator"]
        assert {"tried again", "mended", "broken"} <= set(shown["Second tries"])
    if arm == "taught_verifier":
        taught = [row["verifier/teacher_kl"] for row in rows if row["phase"] != "generator"]
        assert len(taught) == 4 and all(np.isfinite(taught)) and any(taught)
    if arm == "meta_judged":
        judged = [row for row in dumped if row["role"] == "verifier"]
        assert judged and all(row["second_judgement"]["verdict"] for row in judged)
        assert all(0 <= row["verifier/reward/quality"] <= 1 for row in rows if row["phase"] != "generator")


@pytest.fixture(scope="module")
def made():
    """Policies and task of an arm."""

    def make(arm: str):
        config = config_of(arm)
        policies = make_policies(config)
        return policies, make_task(config, {role: policy.tokenizer for role, policy in policies.items()})

    return make


def solved(task, index: int = 0) -> Solution:
    problem, text = task.pool_solution(index)
    steps = tuple(f"#{k} ends in {letter}" for k, letter in enumerate(problem.answer, 1))
    return Solution(problem, text, steps, (), 1.0, True, None)


def test_only_the_teacher_sees_the_answer(made):
    """The answer is in the informed prompt, and in no prompt of which anything is sampled, whatever the arm."""
    policies, task = made("taught_verifier")
    verifier, solution = policies["verifier"], solved(task)
    hidden = dataclasses.replace(solution, problem=dataclasses.replace(solution.problem, answer="qqzzqq"))
    said = Verification("#1 reads a, says a", (True,), "INCORRECT", 1.0, True, ("#1 reads a, says a",))
    informed = verifier.tokenizer.decode(informed_prompts(verifier, [hidden])[0][0])
    assert "qqzzqq" in informed
    parents = {"generator": hidden.problem, "verifier": hidden, "second_solution": Judged(hidden, said),
               "second_judgement": Judged(hidden, said)}  # fmt: skip
    assert parents.keys() == CALL_TEXTS.keys()
    for name, parent in parents.items():
        policy = policies["generator" if name in ("generator", "second_solution") else "verifier"]
        text = policy.tokenizer.decode(CALL_TEXTS[name].prompts(policy, [parent])[0][0])
        assert text and "qqzzqq" not in text, name


def test_further_prompts_hold_the_earlier_texts(made):
    policies, task = made("second_try")
    solution = solved(task)
    said = Verification("#1 reads a, says b", (False,), "INCORRECT", 1.0, True, ("#1 reads a, says b",))
    (second,), counts = CALL_TEXTS["second_solution"].prompts(policies["generator"], [Judged(solution, said)])
    text = policies["generator"].tokenizer.decode(second)
    assert text == f"{solution.problem.question}\n{solution.text}\n{said.text}\n"
    assert counts == {"second_solution/prompts_shortened": 0, "second_solution/shortened_rate": 0}
    (again,), _ = CALL_TEXTS["second_judgement"].prompts(policies["verifier"], [Judged(solution, said)])
    text = policies["verifier"].tokenizer.decode(again)
    assert text == f"{solution.problem.question}\n{solution.text}\n{said.text}\n1\n"


def test_a_template_in_words_has_them_in_words():
    problem = Problem("p", "What is 1 + {earlier}?", "SECRET")
    second = with_earlier(GENERATOR_MATH, "second_solution", problem, "TRY").question
    assert second.startswith("What is 1 + {earlier}?\n") and "TRY" in second and "SECRET" not in second
    informed = with_earlier(VERIFIER_MATH, "informed", problem)
    assert "SECRET" in informed.question and informed.answer == "SECRET"
    assert "SECRET" not in with_earlier(VERIFIER_MATH, "second_judgement", problem).question


def test_a_second_prompt_that_is_too_long_is_cut_and_never_fails(made):
    policies, task = made("second_try")
    generator, solution = policies["generator"], solved(task)
    earlier = "a" * 300
    for limit in (len(solution.problem.question), 40, 104):
        limit += 2
        ids, is_cut = second_try_prompt(generator.template, generator.tokenizer, solution.problem, earlier, limit)
        assert is_cut and len(ids) <= limit


@pytest.mark.parametrize("arm, role, text", [
    ("second_try", "generator", "second_solution"), ("taught_verifier", "verifier", "informed"),
    ("meta_judged", "verifier", "second_judgement")])  # fmt: skip
@pytest.mark.parametrize("task_name", ["last_letter", "state_tracking"])
def test_stage_one_has_examples_of_every_prompt(made, arm, role, text, task_name):
    """As many as of the role's own, by a teacher who is right where the answer is shown; the others are those that
    other arms learn from."""
    config = config_of(arm, f"task.name={task_name}", "task.sft_swaps=(1,2)", "task.rl_swaps=(1,2)",
                       "task.test_swaps=(1,2)")  # fmt: skip
    plain = make_task(config_of("tango", f"task.name={task_name}", "task.sft_swaps=(1,2)", "task.rl_swaps=(1,2)",
                                "task.test_swaps=(1,2)"), {})  # fmt: skip
    task = make_task(config, {})
    examples = [task.sft_example(role, "train", index) for index in range(60)]
    assert [example.text for example in examples] == ["", text] * 30
    assert examples[::2] == [plain.sft_example(role, "train", index) for index in range(30)]
    further = examples[1::2]
    gold = [plain.gold_steps(one.problem, blocks(one.solution)) for one in further]
    if text == "informed":
        marks = [tuple(part.startswith("CORRECT") for part in one.response.split("\\boxed{")[1:-1]) for one in further]
        assert marks == gold and len(set(marks)) > 2
    else:
        assert all(one.verification for one in further)
    if text == "second_judgement":  # remarks that misread are there, and are rejected
        assert {"INCORRECT" in one.response for one in further} == {True, False}
    if text == "second_solution":
        before = [all(labels) for labels in gold]
        after = [all(plain.gold_steps(one.problem, blocks(one.response))) for one in further]
        assert any(late and not early for early, late in zip(before, after, strict=True))


def blocks(text: str) -> tuple[str, ...]:
    return tuple(part.split("</step>")[0] for part in text.split("<step>")[1:])


def test_examples_of_every_prompt_fit_where_there_is_room(made):
    policies, task = made("second_try")
    assert len(sft_pairs(policies["generator"], task, "train", 0, 40)) == 40


def test_arms_with_further_prompts_say_so_in_their_stage_one():
    kinds = {name: arm.stage_one_kind for name, arm in ARMS.items() if arm.stage_one_kind}
    assert kinds == {"self_verify": "one_policy", "no_labels": "one_policy", "second_try": "one_policy,second_solution",
                     "taught_verifier": "informed", "meta_judged": "second_judgement"}  # fmt: skip
