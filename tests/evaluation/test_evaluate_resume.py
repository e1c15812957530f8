"""Evaluations that are interrupted, repeated with other settings, or asked for wrongly."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from support.evaluation_cases import (
    ROWS,
    evaluate,
    files_of,
    judge,
    settings_of,
    small_tokenizer,
    solver,
    tagged,
    verification,
)
from tango_jax.config import default_config
from tango_jax.evaluate import main
from tango_jax.evaluation.settings import check_settings, save_settings
from tango_jax.tracking.run_config import save_config

T, F = True, False
pytestmark = pytest.mark.usefixtures("closed_pool")


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def test_an_interrupted_evaluation_ends_with_the_same_bytes(tokenizer, tmp_path, monkeypatch):
    class Interrupted(Exception):
        pass

    budget = {"solved": 0, "judged": 0}

    def spend(stage):
        budget[stage] -= 1
        if budget[stage] < 0:
            raise Interrupted

    def solve(number, sample, prompt):
        spend("solved")
        return tagged(number + sample)

    def verify(number, sample, vote):
        spend("judged")
        return verification("CORRECT" if sample else "INCORRECT", T, F, number % 2 == 0)

    sets = f"gsm8k:{ROWS / 'gsm8k_short.jsonl'},processbench_math:{ROWS / 'processbench.jsonl'}"
    flags = ("--samples=2", "--shard=3", "--verifier=a/b")

    def attempt(name, solved, judged):
        budget.update(solved=solved, judged=judged)
        settings = settings_of(tmp_path / name, *flags, sets=sets)
        evaluate(monkeypatch, settings, solver(tokenizer, solve), judge(tokenizer, verify, samples=2))

    attempt("whole", 24, 29)
    wanted = files_of(tmp_path / "whole")
    assert {name for name in wanted if name.startswith("parts")} == {
        *(f"parts/gsm8k/{stage}-0000{shard}.jsonl" for stage in ("solved", "judged") for shard in range(3)),
        *(f"parts/processbench_math/judged-0000{shard}.jsonl" for shard in range(2)),
    }
    for solved, judged in ((9, 0), (8, 0), (15, 2), (0, 5), (0, 20)):  # three problems are nine solutions
        with pytest.raises(Interrupted):
            attempt("stopped", solved, judged)
        assert not (tmp_path / "stopped/tables.md").exists()
    attempt("stopped", 0, 100)
    assert files_of(tmp_path / "stopped") == wanted
    # Damage to a finished part: that part is done again, and nothing else.
    damages = (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9]), lambda path: path.write_bytes(b""))
    for damage in damages:
        damage(tmp_path / "stopped/parts/gsm8k/solved-00002.jsonl")
        damage(tmp_path / "stopped/parts/processbench_math/judged-00001.jsonl")
        (tmp_path / "stopped/parts/gsm8k/solved-00002.jsonl.partial").write_text("half a part")
        attempt("stopped", 6, 2)
        assert files_of(tmp_path / "stopped") == wanted
    # Solutions that are not those that were judged: the judgements are made anew.
    path = tmp_path / "stopped/parts/gsm8k/solved-00002.jsonl"
    path.write_text(path.read_text().replace("some work", "other work"))
    attempt("stopped", 0, 6)


def test_an_edited_grader_grades_stored_texts_again(tokenizer, tmp_path, monkeypatch):
    """Also after an end in the middle: no result holds grades of two graders, and nothing is sampled twice."""
    monkeypatch.chdir(tmp_path)

    class Interrupted(Exception):
        pass

    budget = {"left": 9}

    def solve(number, sample, prompt):
        budget["left"] -= 1
        if budget["left"] < 0:
            raise Interrupted
        return tagged(sample)

    def attempt(name, accepted, left):
        (tmp_path / "own.py").write_text(f"def own(problem, answer): return answer == '{accepted}'\n")
        budget["left"] = left
        flags = ("--samples=2", "--shard=3", "--grader=own.py:own")
        settings = settings_of(name, *flags, sets=f"gsm8k:{ROWS / 'gsm8k_short.jsonl'}")
        return evaluate(monkeypatch, settings, solver(tokenizer, solve))["gsm8k"]

    with pytest.raises(Interrupted):
        attempt("edited", 0, left=9)
    attempt("edited", 1, left=15)  # of 24 solutions, 9 are stored
    attempt("whole", 1, left=24)
    wanted = files_of(tmp_path / "whole")
    assert files_of(tmp_path / "edited") == wanted
    rows = [json.loads(line) for line in wanted["rows/gsm8k.jsonl"].splitlines()]
    assert [row["is_correct"] for row in rows] == [False, False, True] * 8
    assert [row["answer_class"] for row in rows] == [-1, 1, 0] * 8  # the greedy one has no vote
    attempt("edited", 0, left=0)
    attempt("other", 0, left=24)
    assert files_of(tmp_path / "edited") == files_of(tmp_path / "other") != wanted


def test_other_settings_or_problems_are_an_error_that_changes_nothing(tokenizer, tmp_path, monkeypatch):
    data, generator = tmp_path / "data.jsonl", solver(tokenizer, lambda number, sample, prompt: tagged(number))
    shutil.copy(ROWS / "gsm8k_short.jsonl", data)
    evaluate(monkeypatch, settings_of(tmp_path / "out", sets=f"gsm8k:{data}"), generator)
    before = files_of(tmp_path / "out")
    with pytest.raises(ValueError, match=r"out holds another evaluation \(samples: 0 -> 2; temperature: 1.0 -> 0.5\)"):
        flags = ("--samples=2", "--temperature=0.5")
        evaluate(monkeypatch, settings_of(tmp_path / "out", *flags, sets=f"gsm8k:{data}"), generator)
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:7], lines[7].replace("Hal", "Ida")]))
    with pytest.raises(ValueError, match=r"solved-00000.* 'Hal has .* 'Ida has .*choose another --out"):
        evaluate(monkeypatch, settings_of(tmp_path / "out", sets=f"gsm8k:{data}"), generator)
    assert files_of(tmp_path / "out") == before
    shutil.copy(ROWS / "gsm8k_short.jsonl", data)
    evaluate(monkeypatch, settings_of(tmp_path / "out", "--rows=2", sets=f"gsm8k:{data}"), generator)
    assert files_of(tmp_path / "out") == before


def test_a_run_that_goes_on_in_stage_one_is_another_model(tmp_path):
    def saved(role, step):
        (tmp_path / "run" / "sft" / role / "checkpoints" / str(step)).mkdir(parents=True)

    (tmp_path / "run").mkdir()
    save_config(default_config(), tmp_path / "run" / "config.json")
    saved("generator", 4)
    solving = settings_of(tmp_path / "solving", sets="gsm8k", checkpoint=tmp_path / "run")
    save_settings(solving)
    saved("verifier", 7)
    check_settings(solving)  # in which nothing is judged
    judging = settings_of(tmp_path / "judging", sets="processbench:rows", checkpoint=tmp_path / "run")
    save_settings(judging)
    saved("verifier", 10)
    with pytest.raises(ValueError, match=r"judging holds another evaluation \(verifier_step: 7 -> 10\)"):
        check_settings(judging)
    saved("generator", 8)
    with pytest.raises(ValueError, match=r"solving holds another evaluation \(checkpoint_step: 4 -> 8\)"):
        check_settings(solving)


def test_stored_settings_that_are_missing_or_no_object_are_named(tmp_path):
    settings = settings_of(tmp_path / "out", sets="gsm8k", checkpoint=tmp_path)
    save_settings(settings)
    (tmp_path / "out/settings.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"settings\.json holds a list, not an object: choose another --out$"):
        check_settings(settings)
    (tmp_path / "out/settings.json").unlink()
    (tmp_path / "out/parts").mkdir()
    with pytest.raises(ValueError, match=r"settings\.json is missing, and without it nobody can tell whether .*/parts"):
        check_settings(settings)


def test_an_edited_template_is_another_prompt(tmp_path):
    files = {role: tmp_path / f"{role}.txt" for role in ("generator", "verifier")}
    config = default_config()
    config.verifier.template = str(files["verifier"])
    (tmp_path / "run").mkdir()
    save_config(config, tmp_path / "run" / "config.json")
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    for file in files.values():
        file.write_text("{problem} {solution} {num_steps}")
    flags = (f"--template={files['generator']}", f"--verifier={tmp_path / 'run'}")
    settings = settings_of(tmp_path / "out", *flags, sets="gsm8k")
    save_settings(settings)
    check_settings(settings)
    for role, file in files.items():
        before = file.read_text()
        file.write_text(f"{before} Be brief.")
        with pytest.raises(ValueError, match=rf"another evaluation \({role}_template_digest: \w+ -> \w+\)"):
            check_settings(settings)
        file.write_text(before)
    check_settings(settings)


@pytest.mark.parametrize("flags, asked", [
    ([], (F, F)), (["--use_chat"], (T, T)), (["--use_chat", "--verifier=c/d"], (T, F)),
    (["--verifier_use_chat", "--verifier=c/d"], (F, T)),
    (["--use_chat", "--verifier_use_chat", "--verifier=c/d"], (T, T)),
])
def test_a_chat_template_is_asked_of_one_model(flags, asked, tmp_path):
    """An evaluation of one model, or of two without one, goes on from before each had a flag."""
    settings = settings_of(tmp_path, *flags, sets="gsm8k")
    assert tuple(settings.sampler(role).use_chat for role in ("generator", "verifier")) == asked
    save_settings(settings)
    path = tmp_path / "settings.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in stored.items() if name != "verifier_use_chat"}))
    if settings.verifier is None or asked == (F, F):
        check_settings(settings)
    else:
        with pytest.raises(ValueError, match="another evaluation .verifier_use_chat: None -> "):
            check_settings(settings)


def test_limits_that_no_prompt_is_within_are_an_error_before_anything_is_written(tokenizer, tmp_path, monkeypatch):
    sets, out = f"gsm8k:{ROWS / 'gsm8k_short.jsonl'}", tmp_path / "out"
    short = {"max_prompt": 3}
    generator, verifier = (make(tokenizer, lambda *place: tagged(1), **short) for make in (solver, judge))
    with pytest.raises(ValueError, match=r"--max_prompt=3 is too short for every problem of gsm8k: .* of \d+ tokens"):
        evaluate(monkeypatch, settings_of(out, sets=sets), generator)
    with pytest.raises(ValueError, match=r"--verifier_max_prompt=3 is too short for every problem of gsm8k"):
        generator = solver(tokenizer, lambda *place: tagged(1))
        evaluate(monkeypatch, settings_of(out, "--verifier=a/b", sets=sets), generator, verifier)
    with pytest.raises(ValueError, match=r"--verifier_max_prompt=3 is too short for every problem of processbench_m"):
        judged = f"processbench_math:{ROWS / 'processbench.jsonl'}"
        evaluate(monkeypatch, settings_of(out, "--verifier=a/b", sets=judged, checkpoint=None), None, verifier)
    assert not out.exists()


@pytest.mark.parametrize("flags, message", [
    (["--sets=gsm8k"], "no model is named: --checkpoint solves, --verifier judges"),
    (["--sets=,", "--checkpoint=a/b"], "--sets is empty"),
    (["--sets=gsm8k", "--checkpoint=none.gguf"], "none.gguf does not exist"),
    (["--sets=gsm8k", "--verifier=a/b"], "gsm8k has problems to solve: name a --checkpoint"),
    (["--sets=math5000", "--checkpoint=a/b"], "unknown set 'math5000'; use one of gsm8k,"),
    (["--sets=aime24,math", "--checkpoint=a/b"], "hub:Maxwell-Jia/AIME_2024/train: could not be fetched"),
    (["--sets=last_letter:rows.jsonl", "--checkpoint=a/b"], "last_letter makes its own problems and takes no rows"),
    (["--sets=state_tracking_steps:a", "--checkpoint=a/b"], "state_tracking_steps makes its own problems and takes no"),
    (["--sets=gsm8k:none.jsonl", "--checkpoint=a/b"], "data file none.jsonl does not exist"),
    (["--sets=processbench:tests", "--verifier=a/b"], "there is none of processbench_gsm8k.jsonl, "),
    ([f"--sets=processbench_math:{ROWS / 'aime.jsonl'}", "--verifier=a/b"], "line 1: 'steps' is missing; keys"),
    ([f"--sets=x:{ROWS / 'aime.jsonl'},x:{ROWS / 'aime.jsonl'}2", "--checkpoint=a/b"], "--sets names x twice"),
    (["--sets=gsm8k", "--checkpoint=a/b", "--samples=2000"], "--samples=2000 must lie between 0 and 1024"),
    (["--sets=gsm8k", "--checkpoint=a/b", "--skip_greedy"], "--skip_greedy leaves nothing to write"),
    (["--sets=gsm8k", "--checkpoint=a/b", "--votes=2"], "--votes=2 is of a verifier, and no solution is judged: name"),
    (["--sets=gsm8k", "--checkpoint=a/b", "--scored"], "--scored is of a verifier, and no solution is judged: name a"),
    (["--sets=gsm8k", "--checkpoint=a/b", "--temperature=0"], "--temperature=0.0 must lie between 1e-06 and"),
    (["--sets=gsm8k", "--checkpoint=a/b", "--top_p=0"], "--top_p=0.0 must be above 0.0 and at most 1.0"),
    (["--sets=gsm8k", "--checkpoint=a/b", "--rows=0"], "--rows=0 must be at least 1"),
    (["--sets=gsm8k", "--checkpoint=a/b", "--verifier_temperature=nan"], "--verifier_temperature=nan must lie between"),
    (["--sets=processbench", "--verifier=a/b", "--use_chat"], "--use_chat: no --checkpoint is given; --use_chat is of"),
    (["--sets=gsm8k", "--checkpoint=a/b", "--seed=-1"], "--seed=-1 must lie between 0 and 4294967295"),
    (["--sets=gsm8k", "--checkpoint=a/b", "--out="], "--out is empty: give a path"),
    (["--sets=gsm8k", "--checkpoint=a/b", f"--out={__file__}/x"], "is not a folder; name a folder"),
    (["--sets=gsm8k", "--checkpoint=a/b", f"--out={__file__}"], "is a file; name a folder"),
])
def test_mistakes_end_in_one_line(flags, message, tmp_path, monkeypatch):
    monkeypatch.setattr("tango_jax.cli.session.configure", lambda config: None)
    out = [] if any(flag.startswith("--out") for flag in flags) else [f"--out={tmp_path / 'out'}"]
    with pytest.raises(SystemExit) as error:
        main([*flags, *out])
    assert message in str(error.value) and str(error.value).startswith("error: ") and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_other_weights_in_the_same_place_are_another_model(tmp_path):
    folder = tmp_path / "exported"
    folder.mkdir()
    weights = np.arange(1_000_000, dtype=np.float32)
    (folder / "model.safetensors").write_bytes(weights.tobytes())
    solving = settings_of(tmp_path / "solving", sets="gsm8k", checkpoint=folder)
    save_settings(solving)
    os.utime(folder / "model.safetensors", (1, 1))  # copied
    check_settings(solving)
    (folder / "model.safetensors").write_bytes((1.001 * weights).tobytes())
    with pytest.raises(ValueError, match=r"solving holds another evaluation \(generator_weights_digest: "):
        check_settings(solving)
