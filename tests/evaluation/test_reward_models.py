"""Process reward models in `tango_jax.judge` and `tango_jax.evaluate`: their first errors, their votes, mistakes."""

import csv
import dataclasses
import json

import numpy as np
import pytest

from support.paths import ROWS
from support.reward_models import write_qwen_folder, write_trl_folder
from support.tiny_checkpoints import write_tiny_folder
from tango_jax import judge
from tango_jax.data.processbench import solution_text
from tango_jax.evaluate import main
from tango_jax.evaluation.judging import open_verifier, read_solutions
from tango_jax.judge import judge as judge_rows
from tango_jax.records import Problem
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings
from tango_jax.text.prompts import solution_of
from tango_jax.text.templates import step_row

ROWS_FILE = ROWS / "processbench.jsonl"
GIVEN = [json.loads(line) for line in ROWS_FILE.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_trl_folder(tmp_path_factory.mktemp("prm") / "model", seed=6))


@pytest.fixture(scope="module")
def judged(folder):
    return judge_rows(GIVEN, folder)


def test_a_row_has_a_probability_for_each_step_and_no_text(judged):
    for row, given in zip(judged, GIVEN, strict=True):
        assert {name: row[name] for name in given} == given
        [found] = row["verifications"]
        assert len(found["p_steps"]) == len(given["steps"]) and all(0 < p < 1 for p in found["p_steps"])
        assert found["judgements"] == [p >= 0.5 for p in found["p_steps"]] and found["is_aligned"]
        assert found["p_verdict"] == min(found["p_steps"]) and found["text"] == "" and not found["is_truncated"]
        assert found["verdict"] == ("CORRECT" if all(found["judgements"]) else "INCORRECT")
        assert row["mean"]["p_steps"] == found["p_steps"] and row["mean"]["p_verdict"] == found["p_verdict"]
    assert {one for row in judged for one in row["verifications"][0]["judgements"]} == {True, False}


def test_batches_samples_and_scores_change_nothing(folder, judged):
    probabilities = [row["mean"]["p_steps"] for row in judged]
    for options in (dict(rows=1), dict(rows=2, samples=4), dict(scored=True, max_new=3), dict(template="trl_prm")):
        other = judge_rows(GIVEN[::-1], folder, **options)[::-1]
        assert [len(row["verifications"]) for row in other] == [1] * len(GIVEN)
        for one, two in zip(probabilities, other, strict=True):
            np.testing.assert_allclose(one, two["mean"]["p_steps"], atol=2e-6)


def test_other_solutions_change_a_step_and_those_after_it(folder):
    steps = GIVEN[0]["steps"]
    rows = [{**GIVEN[0], "steps": one} for one in (steps, [steps[0], "So it is 9.", steps[2]])]
    (first, second) = (row["mean"]["p_steps"] for row in judge_rows(rows, folder))
    assert first[0] == second[0] and abs(first[1] - second[1]) > 1e-4 and abs(first[2] - second[2]) > 1e-4


def test_a_solution_that_is_cut_has_no_probability_without_a_verdict(folder, judged):
    """Only its first step fits."""
    whole, found = open_verifier(folder, CheckpointSamplerSettings()).with_weights(), set()
    for row, given in zip(judged, GIVEN, strict=True):
        solution = solution_of(Problem("", given["problem"], ""), solution_text(given["steps"]), len(given["steps"]))
        ends = step_row(whole.template, whole.tokenizer, solution.problem, solution.text, whole.max_prompt).ends
        [read] = read_solutions(dataclasses.replace(whole, max_prompt=ends[0] + 1), [[]], [solution])
        p_first = row["mean"]["p_steps"][0]
        is_open = len(ends) > 1 and p_first >= 0.5
        assert read.num_tokens == ends[0] + 1
        assert read.p_verdict is None if is_open else read.p_verdict == pytest.approx(p_first, abs=2e-6)
        found.add((len(ends) > 1, p_first >= 0.5))
    assert found >= {(True, True), (True, False)}


@pytest.mark.parametrize("write", [write_trl_folder, write_qwen_folder])
def test_the_first_error_is_the_first_step_below_one_half(write, tmp_path, capsys):
    prm, out = str(write(tmp_path / "prm")), tmp_path / "out"
    assert main([f"--verifier={prm}", f"--sets=processbench_math:{ROWS_FILE}", f"--out={out}", "--shard=2"]) is None
    hits = {True: [], False: []}  # by whether the solution has no error
    rows = [json.loads(line) for line in (out / "rows/processbench_math.jsonl").read_text().splitlines()]
    for row, given, alone in zip(rows, GIVEN, judge_rows(GIVEN, prm), strict=True):
        p_steps, [found] = alone["mean"]["p_steps"], row["verifications"]
        first = next((index for index, p in enumerate(p_steps) if p < 0.5), -1)
        assert found["judgements"] == [p >= 0.5 for p in p_steps] and found["num_tokens"] == 0
        hits[given["label"] == -1].append(first == given["label"])
    erroneous, correct = (np.mean(hits[kind]) for kind in (False, True))
    f1 = 2 * erroneous * correct / (erroneous + correct) if erroneous + correct else 0.0
    table = (out / "tables.csv").read_text()
    [line] = [line.split(",") for line in table.splitlines() if ",f1," in line]
    assert any(abs(float(cell) - f1) < 1e-6 for cell in line if cell.replace(".", "", 1).isdigit())


def test_a_reward_model_ranks_what_another_model_solves(folder, tmp_path):
    """Which is asked in its chat template: the reward model has all turns in its own."""
    solver = write_tiny_folder(tmp_path / "solver")
    flags = [f"--checkpoint={solver}", f"--verifier={folder}", f"--sets=gsm8k:{ROWS / 'gsm8k.jsonl'}", "--samples=2",
             "--template=last_letter", "--use_chat", "--max_new=8", "--max_prompt=250", "--rows=2", "--problems=3"]
    main([*flags, f"--out={tmp_path / 'out'}"])
    rows = [json.loads(line) for line in (tmp_path / "out/rows/gsm8k.jsonl").read_text().splitlines()]
    assert len(rows) == 9 and all(row["verifications"][0]["verdict"] == "INVALID" for row in rows)  # no step blocks
    with open(tmp_path / "out/tables.csv") as file:
        costs = {(row["metric"], row["k"]): (row["tokens"], row["flops"]) for row in csv.DictReader(file)}
    # Without steps nothing is read. It writes nothing, so that no rule goes by what is written.
    assert costs["vote_by_scored", "2"] == costs["vote_by_verdict", "2"] == costs["majority", "2"] != ("", "")
    assert ("vote_by_probability", "2") not in costs and (tmp_path / "out/cost.png").exists()


def test_mistakes_end_in_one_line(folder, tmp_path, capsys):
    file = f"--file={ROWS_FILE}"
    for command, arguments, message in [
        (judge.main, [file, f"--out={tmp_path}/a.jsonl", "--max_prompt=40"], "line 1: with its 3 steps the prompt has"),
        (judge.main, [file, f"--out={tmp_path}/a.jsonl", "--max_prompt=2000"], "are more than the 1024 positions of"),
        (judge.main, [file, f"--out={tmp_path}/a.jsonl", "--template=plain"], "the template plain is for a model that"),
        (main, [f"--sets=processbench_math:{ROWS_FILE}", f"--out={tmp_path}/b", "--votes=2"],
         "writes nothing and judges the same each time: leave --votes out"),
        (main, [f"--sets=gsm8k:{ROWS / 'gsm8k.jsonl'}", f"--checkpoint={folder}", f"--out={tmp_path}/c"],
         f"{folder} is a process reward model, which judges steps and writes no text"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            command([f"--verifier={folder}", *arguments])
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
