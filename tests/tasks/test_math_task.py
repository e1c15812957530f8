"""The math task: what is trained on, tested on, imitated and left out; and whole runs of a tiny checkpoint on it."""

import dataclasses
import io
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from ml_collections import ConfigDict

from support.hf_loading import assert_equal_trees
from support.math_cases import math_config, task_of
from support.paths import ROWS
from support.policies import policies_of
from support.tiny_checkpoints import MODEL, write_tiny_folder, write_tiny_gguf
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES
from tango_jax.grading import parse_solution, parse_verification
from tango_jax.loop.measure import fixed_pool
from tango_jax.loop.run import run_or_resume
from tango_jax.loop.turn import run_turn
from tango_jax.runtime.checkpoint import read_state
from tango_jax.runtime.console import Console
from tango_jax.tasks.registry import make_task
from tango_jax.tasks.tagged_examples import read_tagged_rows
from tango_jax.text.prompts import INFORMED
from tango_jax.tracking.metrics import read_metrics
from tango_jax.weights.hf_layout import abstract_params
from tango_jax.weights.source import open_source
from tango_jax.weights.workdir import open_checkpoint

pytestmark = pytest.mark.usefixtures("closed_pool")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("hf") / "model", dataclasses.replace(MODEL, num_layers=1))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return open_source(str(folder)).tokenizer


# ---------------------------------------------------------------------------------------------------- the task


def test_what_is_measured_on_is_not_trained_on(tokenizer):
    config = math_config("a/b")
    validate(config)
    task = task_of(config, tokenizer)
    trained = {task.train_problem(index).id for index in range(10)}
    imitated = {task.sft_example(role, "train", index).problem.id for role in task.sft_roles for index in range(10)}
    heldout = {task.sft_example("generator", "heldout", index).problem.id for index in range(10)}
    pool = {task.pool_solution(index)[0].id.split("/pool/")[0] for index in range(10)}
    assert (len(trained), len(imitated), len(heldout)) == (6, 6, 2)
    assert pool == heldout and not (trained | imitated) & heldout
    # Each held-out example is judged once, whatever eval.pool is.
    assert [len(fixed_pool(task, size)) for size in (1, 2, 200)] == [1, 2, 2]
    assert "2 held out for loss and pool, which has 2 solutions; " in task.notes[-1]
    n = task.num_test
    assert 0 < n <= 7 and len({task.test_problem(index).id for index in range(n)}) == n
    assert (task.grade_kind, task.min_steps, task.sft_roles) == ("math", 3, ("generator", "verifier"))


def test_the_order_depends_on_the_seed_and_the_test_does_not(tokenizer):
    def ids(seed):
        config = math_config("a/b")
        config.seed = seed
        task = task_of(config, tokenizer)
        return [task.train_problem(index).id for index in range(20)], [task.test_problem(index) for index in range(2)]

    assert ids(0) == ids(0)
    assert ids(0)[0] != ids(1)[0] and ids(0)[1] == ids(1)[1]


@pytest.mark.parametrize("role", ["generator", "verifier"])
def test_problems_over_the_limits_are_left_out_and_counted(tokenizer, tmp_path, role):
    """Whichever role cannot read it; the test set is filtered in the same way."""
    rows = [json.loads(line) for line in (ROWS / "gsm8k.jsonl").read_text().splitlines()]
    train = tmp_path / "train.jsonl"  # other questions of the same lengths
    train.write_text("".join(json.dumps(row | {"question": row["question"][:-1] + "!"}) + "\n" for row in rows))
    config = math_config("a/b", train=str(train), stage_one="")
    config.generator.max_prompt = config.verifier.max_prompt = 1000
    assert "7 training and 0 validation problems; 0 left out" in task_of(config, tokenizer).notes[0]
    config[role].max_prompt = 200
    task = task_of(config, tokenizer)
    left = [int(re.search(r"(\d+) left out", note)[1]) for note in task.notes[:2]]
    assert left[0] == left[1] == 7 - task.num_test and 0 < left[0] < 5
    longest = max(len(tokenizer.encode_prompt(task.test_problem(index).question)) for index in range(task.num_test))
    assert longest < 200


def test_system_turns_that_no_prompt_has_are_told_once_per_file(tokenizer):
    eurus = str(ROWS / "eurus.jsonl")
    config = math_config("a/b", train=eurus, test=str(ROWS / "math500.jsonl"), stage_one="")
    said = [note for note in task_of(config, tokenizer).notes if "system turn" in note]
    assert said == [f"{eurus}: 1 of 2 problems have a system turn, which is left out of the prompt: put what a problem "
                    "needs into its user turn"]


def test_too_few_within_the_limits_end_the_run_before_it_begins(folder, tmp_path):
    config = math_config(folder)
    config.generator.max_prompt = 20
    with pytest.raises(ValueError, match="stage 1: 0 of 8 examples are within the limits"):
        run_or_resume(config, tmp_path / "run", Console(enabled=False))
    config.task.stage_one = ""
    with pytest.raises(ValueError, match="too few problems: 0 training and 0 validation problems; 8 left out because"):
        run_or_resume(config, tmp_path / "run", Console(enabled=False))
    assert not (tmp_path / "run").exists()


def test_validation_problems_where_there_is_no_test_set(tokenizer):
    task = task_of(math_config("a/b", test="", stage_one=""), tokenizer)
    trained = {task.train_problem(index).id for index in range(10)}
    tested = {task.test_problem(index).id for index in range(task.num_test)}
    assert (len(trained), len(tested)) == (6, 2) and not trained & tested
    assert task.pool_solution is None and task.sft_roles == ()
    with pytest.raises(ValueError, match="nothing to imitate"):
        task.sft_example("generator", "train", 0)


def test_a_file_of_tagged_solutions(tokenizer):
    config = math_config("a/b", stage_one=str(ROWS / "tagged.jsonl"), validation=1)
    task = task_of(config, tokenizer)
    assert task.sft_roles == ("generator", "verifier") and task.pool_solution is None
    example = task.sft_example("generator", "train", 0)
    assert parse_solution(example.response).answer and example.solution == ""
    problem, solution, num_steps, verification = task.sft_example("verifier", "heldout", 0)[:4]
    assert parse_solution(solution).steps and parse_verification(verification, num_steps).aligned
    config.verifier.sft.steps = 0
    assert task_of(config, tokenizer).sft_roles == ("generator",)


def test_problems_to_be_tested_on_are_not_imitated(tokenizer, tmp_path):
    tagged = [json.loads(line) for line in (ROWS / "tagged.jsonl").read_text().splitlines()]
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps({"question": tagged[0]["question"], "answer": "1"}))
    config = math_config("a/b", stage_one=str(ROWS / "tagged.jsonl"), validation=1, test=str(test))
    task = task_of(config, tokenizer)
    imitated = {task.sft_example("generator", "train", index).problem.question for index in range(10)}
    assert imitated and tagged[0]["question"] not in imitated
    assert "1 left out because their questions are used for evaluation" in task.notes[-1]


def test_rows_of_another_kind_are_counted(tokenizer, tmp_path):
    rows = [{"prompt": f"What is {k} + 1?", "reward_model": {"ground_truth": str(k + 1)},
             "ability": "math" if k < 9 else "science"} for k in range(12)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = task_of(math_config("a/b", train=str(tmp_path / "train.jsonl"), test="", stage_one=""), tokenizer)
    assert "3 further rows are of another kind" in task.notes[1]


def test_keys_of_tagged_solutions_that_differ_only_in_case_are_refused(tmp_path):
    row = {"question": "1 + 1?", "solution": "<step>2</step><answer>\\boxed{2}</answer>"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    assert [one.problem.question for one in read_tagged_rows(str(path), False)] == ["1 + 1?"]
    path.write_text(json.dumps(row | {"Question": "2 + 2?"}))
    with pytest.raises(ValueError, match=r"line 1: the keys 'question' and 'Question' differ only in case: remove or"):
        read_tagged_rows(str(path), False)


def test_the_fingerprint_is_of_questions_and_answers(tokenizer, tmp_path):
    def fingerprint(*answers: str) -> str:
        rows = [{"question": f"What is {k} + 1?", "answer": answer} for k, answer in enumerate(answers)]
        (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        config = math_config("a/b", train=str(tmp_path / "train.jsonl"), test="", stage_one="")
        return task_of(config, tokenizer).fingerprint

    answers = [str(k) for k in range(12)]
    first = fingerprint(*answers)
    assert first and first == fingerprint(*answers)
    assert len({first, fingerprint(*answers, "13"), fingerprint(*answers[:-1], "99")}) == 3


def test_problems_that_a_further_prompt_has_no_room_for_set_a_task_apart(tokenizer, tmp_path):
    rows = [{"question": "one " * count + "?", "answer": str(count)} for count in range(1, 90)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = math_config("a/b", train=str(tmp_path / "train.jsonl"), test="", stage_one="")
    tokenizers, further = {role: tokenizer for role in ROLES}, {"verifier": [INFORMED]}
    # Templates are longer, so that lengths decide, as they do with long problems.
    config.verifier.max_prompt = 160
    plain, other = make_task(config, tokenizers), make_task(config, tokenizers, further)
    assert plain.fingerprint != other.fingerprint and "their runs are no pairs" in str(other.notes)
    config.verifier.max_prompt = 1000
    plain, other = make_task(config, tokenizers), make_task(config, tokenizers, further)
    assert plain.fingerprint == other.fingerprint and "no pairs" not in str(other.notes)


def test_held_out_rows_that_only_some_verifiers_have_room_for_set_a_task_apart(tokenizer, tmp_path):
    """A verifier that does not write imitates shorter texts: it holds out rows, and has solutions in its pool, that one
    that writes leaves out."""
    rows = []
    for count in range(4, 34):
        steps = "\n".join(f"{k} + 1 = <<{k}+1={k + 1}>>{k + 1}" for k in range(1, count))
        rows.append({"question": f"Count to {count}.", "answer": f"{steps}\n#### {count}"})
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = math_config("a/b", train=str(tmp_path / "train.jsonl"), validation=12)
    config.generator.max_response = config.verifier.max_prompt = 10_000
    config.generator.sft.pack_length = config.verifier.sft.pack_length = 0
    tokenizers, pools = {role: tokenizer for role in ROLES}, []
    for longest, is_same in ((10_000, True), (700, False)):
        config.verifier.max_response = longest
        writes, reads = (make_task(config, tokenizers, has_remarks=one) for one in (True, False))
        pools += [writes.num_pool, reads.num_pool]
        assert (writes.fingerprint == reads.fingerprint) == is_same
    assert pools[0] == pools[1] == pools[3] > pools[2]


def test_sets_that_are_graded_differently_are_refused(tokenizer):
    with pytest.raises(ValueError, match="is graded as math, task.test=.* as python"):
        task_of(math_config("a/b", test=str(ROWS / "cruxeval.jsonl")), tokenizer)
    with pytest.raises(ValueError, match="stage_one=gsm8k needs worked answers .* have the format math"):
        task_of(math_config("a/b", train=str(ROWS / "math500.jsonl"), test=""), tokenizer)


# ------------------------------------------------------------------------------------------------------ whole runs


class Run(NamedTuple):
    config: ConfigDict
    workdir: Path
    policies: dict  # what is compiled, for runs with the same settings


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory) -> Run:
    """From a Hugging Face folder: stage 1, a warm-up turn, a turn of each role."""
    config, workdir = math_config(folder), tmp_path_factory.mktemp("math") / "run"
    policies = policies_of(config)
    run_or_resume(config, workdir, Console(enabled=False), policies)
    return Run(config, workdir, policies)


@pytest.mark.long
def test_a_folder_is_trained_on_gsm8k(run):
    summary = json.loads((run.workdir / "summary.json").read_text())
    assert summary["compiles_after_warmup"] == 0 and summary["logprob_gap_max"] < 1e-4
    assert None not in summary["verifier"].values()
    rows = read_metrics(run.workdir / "metrics.jsonl")
    assert [row["phase"] for row in rows] == ["eval", "warmup", "eval", "generator", "eval", "verifier", "eval"]
    assert None not in [value for row in rows for value in row.values()]
    kl = [row[f"{role}/kl"] for role in ("generator", "verifier") for row in rows if f"{role}/kl" in row]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.long
def test_interrupted_it_ends_the_same(run, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    shutil.copytree(run.workdir / "sft", workdir / "sft")
    shutil.copy(run.workdir / "config.json", workdir)

    class Interrupted(Exception):
        pass

    def stop(context, states, counters, turn):
        if turn.role == "generator":
            raise Interrupted
        return run_turn(context, states, counters, turn)

    with monkeypatch.context() as patch:
        patch.setattr("tango_jax.loop.run.run_turn", stop)
        with pytest.raises(Interrupted):
            run_or_resume(run.config, workdir, Console(enabled=False), run.policies)
    assert [row["phase"] for row in read_metrics(workdir / "metrics.jsonl")] == ["eval", "warmup", "eval"]
    run_or_resume(run.config, workdir, Console(enabled=False), run.policies)
    for role in ("generator", "verifier"):
        params = [open_checkpoint(str(path), role).load_params() for path in (workdir, run.workdir)]
        assert_equal_trees(*params)


@pytest.mark.long
@pytest.mark.release
def test_without_stage_one_it_starts_from_the_weights_of_a_gguf(gguf, run, tmp_path, monkeypatch):
    """The generator is read from a GGUF file, prompted in chat form; the verifier from an earlier run, prompted raw.
    The console knows what the run is at."""
    log, shown = io.StringIO(), []
    monkeypatch.setattr("tango_jax.runtime.console.Stage.show", lambda stage, part: shown.append(part))
    config = math_config(gguf, stage_one="")
    config.verifier.checkpoint, config.generator.use_chat = str(run.workdir), True
    config.arm, config.rl.warmup_steps = "fixed_generator", 0
    run_or_resume(config, tmp_path, Console(stream=log))
    assert f"reading the weights of the generator from {gguf}\n" in log.getvalue()
    parts = {re.sub(r"[0-9]+", "N", part) for part in shown}
    assert parts == {"N of N solutions sampled", "reading what the generator wrote", "N of N verifications sampled",
                     "reading what the verifier wrote", "update of the verifier", "saving a checkpoint"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["verifier"].values()) == {None} and summary["compiles_after_warmup"] == 0
    source = open_source(str(gguf))
    saved = read_state(tmp_path / "checkpoints", abstract_params(source.model_config), ("generator", "params")).state
    assert_equal_trees(saved, source.load_params())
