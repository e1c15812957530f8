"""Arms with second tries, second judgements and a teacher: whole runs, what they show of it, and what is refused."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest

from support.paths import CONFIGS
from support.policies import policies_of
from support.tiny_train import StopAfter, repeatable_rows
from tango_jax.cli.command_line import load_config
from tango_jax.loop import run, turn
from tango_jax.loop.imitation import sft_pairs
from tango_jax.loop.turn import PolicyWork
from tango_jax.method.arms import ARMS
from tango_jax.method.load import load_method
from tango_jax.method.texts import build_prompts
from tango_jax.records import Problem, Solution, Verification
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import peek_meta
from tango_jax.runtime.console import Console
from tango_jax.tasks.registry import make_task
from tango_jax.text.prompts import INFORMED, JUDGE, PROMPTS, SCORED, SECOND_JUDGEMENT, SECOND_TRY, SOLVE, prompt_ids
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.rollout_dump import read_rollouts
from tango_jax.viewer import charts
from tango_jax.viewer.runs import find_runs

SILENT = Console(enabled=False)
RELATIVES = ("second_try", "taught_verifier", "meta_judged")


def config_of(arm: str, *overrides: str):
    settings = ["rollouts.every=1", "rl.generator_steps=3", "eval.every=3", "generator.mesh.fsdp=1",
                "verifier.mesh.fsdp=1"]
    if arm != "second_try":  # which has several shapes of what is sampled: each is compiled by itself
        settings += ["generator.cache_buckets=()", "generator.row_buckets=(8,)", "verifier.row_buckets=(8,)",
                     "generator.max_response=48"]  # as the verifier: what is compiled for it is in the cache
    return load_config(str(CONFIGS / "tiny.py"), [f"arm={arm}", *settings, *overrides])


@pytest.fixture
def every_other(monkeypatch):
    """Models that know nothing reject nothing: here every other solution is rejected whatever they say."""
    read = turn.read_responses

    def read_responses(prompt, *args):
        records = read(prompt, *args)
        if prompt is JUDGE:
            records = [dataclasses.replace(one, verdict="CORRECT" if row % 2 else "INCORRECT")
                       for row, one in enumerate(records)]
        return records

    monkeypatch.setattr(turn, "read_responses", read_responses)


@pytest.fixture(scope="module")
def compiled():
    """(arm) -> policies, which no other arm uses: what one run compiles, another run of the same arm does not."""
    return functools.cache(lambda arm: policies_of(config_of(arm)))


@pytest.mark.long
@pytest.mark.parametrize("arm", [arm if arm == "second_try" else pytest.param(arm, marks=pytest.mark.release)
                                 for arm in RELATIVES])
def test_a_resumed_run_is_the_same_to_the_bit(arm, every_other, compiled, tmp_path):
    """Stopped between two turns; one of them in stage 1 as well."""
    config, policies = config_of(arm), compiled(arm)
    run.run_or_resume(config, tmp_path / "whole", SILENT, policies)
    if arm == "second_try":
        moments = (8, 13)
    else:
        moments = (8,)  # all of them in stage 2
        shutil.copytree(tmp_path / "whole/sft", tmp_path / "stopped/sft")
        shutil.copy(tmp_path / "whole/config.json", tmp_path / "stopped")
    for moment in moments:
        with pytest.raises(hosts.Preempted):
            run.run_or_resume(config, tmp_path / "stopped", SILENT, policies, preemption=StopAfter(moment))
    assert 2 < peek_meta(tmp_path / "stopped/checkpoints").step < 6
    run.run_or_resume(config, tmp_path / "stopped", SILENT, policies)
    rows = repeatable_rows(tmp_path / "whole/metrics.jsonl")
    assert repeatable_rows(tmp_path / "stopped/metrics.jsonl") == rows
    assert json.loads((tmp_path / "whole/summary.json").read_text())["compiles_after_warmup"] == 0
    trained = [row for row in rows if row["phase"] != "eval"]
    assert all(row.get(f"{role}/logprob_gap_max", 0) < 1e-4 for row in trained for role in ("generator", "verifier"))
    check_what_is_shown(arm, tmp_path / "whole", trained)


@pytest.mark.long
def test_the_teacher_stays_what_the_verifier_began_as(monkeypatch, compiled, tmp_path):
    seen, scores = [], PolicyWork.reference_logps

    def noted(work, responses, prompt):
        assert prompt is INFORMED and responses.role == "verifier"
        seen.append(jax.device_get(work.context.references["verifier"]()))
        return scores(work, responses, prompt)

    monkeypatch.setattr(PolicyWork, "reference_logps", noted)
    run.run_or_resume(config_of("taught_verifier"), tmp_path, SILENT, compiled("taught_verifier"))
    assert len(seen) == 3
    jax.tree.map(np.testing.assert_array_equal, seen[0], seen[-1])
    updates = [row.get("verifier/update_ratio") for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert max(filter(None, updates), default=0) > 0, "while the verifier itself learns"


def check_what_is_shown(arm: str, workdir, rows: list[dict]) -> None:
    dumped = list(read_rollouts(workdir / "rollouts", with_evaluations=True))
    solved = [row for row in dumped if row["role"] == "generator"]
    if arm == "second_try":
        turns = [row for row in rows if row["phase"] == "generator"]
        assert [row["second_try/share"] for row in turns] == [0.5] * 3
        assert all(row["second_try/tokens_sampled"] > 0 for row in turns)
        # Rows of 4 problems with 2 samples; every other one has a second try with its own reward and advantage.
        assert ["second_try" in row for row in solved] == [b % 2 == 0 for b in range(8)] * 3
        second = solved[0]["second_try"]
        assert second["reward"]["terms"][-1]["name"] == "improvement" and second["advantage"]["total"]
        evaluated = [row for row in dumped if row["role"] == "evaluation"]
        assert any("second_try" in row and row["second_try"]["text"] is not None for row in evaluated)
        assert all("second_try/eval_final_accuracy" in row for row in read_metrics(workdir / "metrics.jsonl")
                   if row["phase"] == "eval")
        [run_shown] = find_runs([workdir])
        shown = {item["title"]: [trace["name"] for trace in item["traces"]] for item in charts.training(run_shown)}
        assert "greedy, with second tries" in shown["Generator"]
        assert {"tried again", "mended", "broken"} <= set(shown["Second tries"])
    if arm == "taught_verifier":
        taught = [row["verifier/teacher_kl"] for row in rows if row["phase"] != "generator"]
        assert len(taught) == 3 and all(np.isfinite(taught)) and any(taught)
    if arm == "meta_judged":
        judged = [row for row in dumped if row["role"] == "verifier"]
        assert judged and all(row["second_judgement"]["verdict"] for row in judged)
        assert all(0 <= row["verifier/reward/quality"] <= 1 for row in rows if row["phase"] != "generator")


@pytest.fixture(scope="module")
def made():
    """Policies and task of an arm."""

    def make(arm: str):
        config = config_of(arm)
        policies = policies_of(config)
        return policies, task_of(config, {role: policy.tokenizer for role, policy in policies.items()})

    return make


def task_of(config, tokenizers=None):
    """The task of a run, whose stage 1 has examples of every prompt of its method."""
    method = load_method(config)
    further = {role: method.further_prompts(role) for role in ("generator", "verifier")}
    return make_task(config, tokenizers or {}, further)


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
    said = dataclasses.replace(said, of=hidden)
    assert "qqzzqq" in text_of(verifier, INFORMED, hidden)
    parents = {SOLVE: hidden.problem, JUDGE: hidden, SECOND_TRY: said, SECOND_JUDGEMENT: said}
    assert set(parents) == {*PROMPTS.values()} - {INFORMED}
    parents[SCORED] = hidden
    for prompt, parent in parents.items():
        text = text_of(policies[prompt.role], prompt, parent)
        assert text and "qqzzqq" not in text, prompt.name
    sampled = {call.prompt for arm in ARMS for rehearsal in load_method(config_of(arm)).rehearsals.values()
               for call in rehearsal.calls.values()}
    assert sampled == set(parents)


def text_of(policy, prompt, parent) -> str:
    [ids], _ = build_prompts(policy, prompt, [parent])
    return policy.tokenizer.decode(ids)


def test_further_prompts_hold_the_earlier_texts(made):
    policies, task = made("second_try")
    solution = solved(task)
    said = Verification("#1 reads a, says b", (False,), "INCORRECT", 1.0, True, ("#1 reads a, says b",), of=solution)
    text = text_of(policies["generator"], SECOND_TRY, said)
    assert text == f"{solution.problem.question}\n{solution.text}\n{said.text}\n"
    assert build_prompts(policies["generator"], SECOND_TRY, [said])[1] == [False]  # not cut
    text = text_of(policies["verifier"], SECOND_JUDGEMENT, said)
    assert text == f"{solution.problem.question}\n{solution.text}\n{said.text}\n1\n"


def test_a_template_in_words_has_them_in_words():
    problem = Problem("p", "What is 1 + {text}?", "SECRET")
    said = Verification("SAID", (True,), "INCORRECT", 1.0, True, ("SAID",),
                        of=Solution(problem, "TRY", ("TRY",), (), 1.0, True, None))
    second = SECOND_TRY.fields(said, False)
    question = second.question(second.text)
    assert question.startswith("What is 1 + {text}?\n") and "TRY\nSAID" in question and "SECRET" not in question
    informed = INFORMED.fields(said.of, False)
    assert "SECRET" in informed.question and informed.text == "TRY"
    assert "SECRET" not in str(SECOND_JUDGEMENT.fields(said, False))


def test_a_second_prompt_that_is_too_long_is_cut_and_never_fails(made):
    policies, task = made("second_try")
    generator, solution = policies["generator"], solved(task)
    said = Verification("a" * 300, (), "INVALID", 1.0, True, (), of=solution)
    for limit in (len(solution.problem.question), 40, 104):
        limit += 2
        ids, is_cut = prompt_ids(SECOND_TRY, generator.template, generator.tokenizer, said, limit)
        assert is_cut and len(ids) <= limit


@pytest.mark.parametrize("arm, role, text", [
    ("second_try", "generator", "second_try"), ("taught_verifier", "verifier", "informed"),
    ("meta_judged", "verifier", "second_judgement")])
@pytest.mark.parametrize("task_name", ["last_letter", "state_tracking"])
def test_stage_one_has_examples_of_every_prompt(made, arm, role, text, task_name):
    """As many as of the role's own, by a teacher who is right where the answer is shown; the others are those that
    other arms learn from."""
    config = config_of(arm, f"task.name={task_name}", "task.sft_swaps=(1,2)", "task.rl_swaps=(1,2)",
                       "task.test_swaps=(1,2)")
    plain = make_task(config_of("tango", f"task.name={task_name}", "task.sft_swaps=(1,2)", "task.rl_swaps=(1,2)",
                                "task.test_swaps=(1,2)"), {})
    task = task_of(config)
    examples = [task.sft_example(role, "train", index) for index in range(60)]
    assert [example.prompt for example in examples] == ["", text] * 30
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
    if text == "second_try":
        before = [all(labels) for labels in gold]
        after = [all(plain.gold_steps(one.problem, blocks(one.response))) for one in further]
        assert any(late and not early for early, late in zip(before, after, strict=True))


def blocks(text: str) -> tuple[str, ...]:
    return tuple(part.split("</step>")[0] for part in text.split("<step>")[1:])


def test_examples_of_every_prompt_fit_where_there_is_room(made):
    policies, task = made("second_try")
    assert len(sft_pairs(policies["generator"], task, "train", 0, 40)) == 40


def test_arms_with_further_prompts_say_so_in_their_stage_one():
    kinds = {name: kind for name in ARMS if (kind := load_method(config_of(name)).stage_one_kind())}
    assert kinds == {"self_verify": "one_policy", "no_labels": "one_policy", "second_try": "one_policy,second_try",
                     "taught_verifier": "informed", "meta_judged": "second_judgement", "scored": "marks_alone",
                     "scored_exact": "marks_alone"}
