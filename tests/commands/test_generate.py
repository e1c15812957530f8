"""Stage 0: what a teacher writes, what is kept of it, and that an interruption changes nothing."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest

from support.math_cases import SHORT, math_config
from support.tiny_checkpoints import write_tiny_folder
from tango_jax.cli.validation import validate
from tango_jax.data import teacher_rows
from tango_jax.data.rows import read_rows
from tango_jax.data.teacher_rows import validation_questions
from tango_jax.generate import generate, main, plan_work, solve_all
from tango_jax.loop.imitation import pack_pairs, sft_pairs
from tango_jax.records import Problem
from tango_jax.rl.policy import make_policy
from tango_jax.runtime.console import Console
from tango_jax.runtime.keys import MAX_SAMPLES
from tango_jax.tasks.registry import make_task
from tango_jax.weights.workdir import start_source

SILENT = Console(enabled=False)
ANSWERS = [11, 16, 21, 26, 31, 36, 41, 46]  # of gsm8k_short.jsonl
pytestmark = pytest.mark.usefixtures("closed_pool")


@pytest.fixture(autouse=True, scope="module")
def _small_shards():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tango_jax.generate.SHARD_PROBLEMS", 3)
        patch.setattr(teacher_rows, "VALIDATION_SHARE", 0.25)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("hf") / "model")


def teacher_config(folder, **settings):
    """`settings`: keys of `generate`, and generator.top_p."""
    config = math_config(folder, stage_one="", train=str(SHORT), validation=1)
    config.generator.max_response, config.generator.template = 24, "last_letter"  # the question alone
    config.generator.top_p, config.generator.top_k = settings.pop("top_p", 0.5), 7
    config.generate.update(settings)
    validate(config)
    return config


@pytest.fixture(scope="module")
def policy(folder):
    config = teacher_config(folder)
    return make_policy("generator", config.generator, start_source(config, "generator"))


def tagged(answer, steps=3):
    return f"<think>{'<step>some work</step>' * steps}</think>\n<answer>\\boxed{{{answer}}}</answer>"


def scripted(policy, text_fn, calls=None):
    """The policy with a sampler that returns text_fn(problem number, sample); None: a right answer that is cut off."""

    def sample(weights, request):
        assert len(request.row_numbers) == len(request.prompts) * request.group_size
        if calls is not None:
            calls.append((len(request.prompts), request.temperature, request.top_p, request.top_k))
        pairs = [divmod(row, MAX_SAMPLES) for row in request.row_numbers]
        texts = [text_fn(*pair) for pair in pairs]
        ids = [policy.tokenizer.encode_response(text or tagged(ANSWERS[n])) for text, (n, _) in
               zip(texts, pairs, strict=True)]
        return SimpleNamespace(tokens=ids, is_truncated_B=np.array([text is None for text in texts]))

    sampler = SimpleNamespace(layout=lambda params: params, sample=sample)
    return dataclasses.replace(policy, sampler=sampler, load_params=lambda: {})


def files_of(workdir):
    return {path.relative_to(workdir).as_posix(): path.read_bytes() for path in sorted(workdir.rglob("*"))
            if path.is_file()}


def rows_of(workdir, name="train"):
    return pyarrow.parquet.read_table(workdir / f"{name}.parquet").to_pylist()


# ------------------------------------------------------------------------------------------------ what is written


def test_files_that_stage_0_has_not_made_are_not_replaced(folder, policy, tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"mine")
    with pytest.raises(ValueError, match="holds train.parquet, which stage 0 has not made and would replace: choo"):
        generate(teacher_config(folder), tmp_path, SILENT, policy)
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]
    assert (tmp_path / "train.parquet").read_bytes() == b"mine"


def test_a_teacher_has_no_adapter(folder, policy, tmp_path):
    config = teacher_config(folder)
    config.generator.adapter = "somewhere"
    with pytest.raises(ValueError, match=r"generator\.adapter=somewhere: stage 0 samples from generator\.checkpoint a"):
        generate(config, tmp_path, SILENT, policy)


def test_every_problem_is_in_one_of_the_two_files(folder, policy, tmp_path):
    calls = []
    teacher = scripted(policy, lambda number, sample: tagged(ANSWERS[number] + number % 2), calls)
    counts = generate(teacher_config(folder), tmp_path, SILENT, teacher)
    assert calls == [(3, 0.1, 0.5, 7), (3, 0.1, 0.5, 7), (2, 0.1, 0.5, 7)]
    assert counts == json.loads((tmp_path / "counts.json").read_text())
    assert counts == {
        "problems": 8, "over_long_prompts": 0, "solutions": 8, "correct": 4, "truncated": 0, "untagged": 0,
        "kept": 8, "train": 6, "validation": 2,
    }
    train, held = rows_of(tmp_path), rows_of(tmp_path, "validation")
    assert not {row["question"] for row in train} & {row["question"] for row in held}
    rows = sorted(train + held, key=lambda row: row["problem_id"])
    assert [row["problem_id"] for row in rows] == [f"gsm8k_short/{number}" for number in range(1, 9)]
    first = rows[0]
    assert list(first) == ["question", "answer", "solution", "is_correct", "format_score", "problem_id", "sample"]
    assert first["question"].startswith("Ann has 2 red") and (first["answer"], first["sample"]) == ("11", 0)
    assert (first["solution"], first["is_correct"], first["format_score"]) == (tagged(11), True, 1.0)
    assert [row["is_correct"] for row in rows] == [True, False] * 4


def test_what_stage_one_could_not_read_is_left_out(folder, policy, tmp_path):
    texts = {(0, 0): None, (1, 0): "The answer is 16.", (2, 0): tagged(21, steps=1), (3, 1): tagged(0)}
    teacher = scripted(policy, lambda *pair: texts.get(pair, tagged(ANSWERS[pair[0]])))
    counts = generate(teacher_config(folder, samples=2), tmp_path, SILENT, teacher)
    rows = rows_of(tmp_path) + rows_of(tmp_path, "validation")
    assert (counts["solutions"], counts["truncated"], counts["untagged"], counts["kept"]) == (16, 1, 1, 14)
    assert len(rows) == counts["train"] + counts["validation"] == 14
    found = {(int(row["problem_id"].split("/")[1]) - 1, row["sample"]) for row in rows}
    assert found == {(n, k) for n in range(8) for k in range(2)} - {(0, 0), (1, 0)}
    with pytest.raises(ValueError, match=r"other settings \(generate\.temperature: 0\.1 -> 0\.2\)"):
        generate(teacher_config(folder, samples=2, temperature=0.2), tmp_path, SILENT, policy)


def test_the_split_depends_on_the_seed_and_on_no_filter():
    problems = [Problem(str(n), f"question {n % 50}", "1") for n in range(100)]
    chosen = [validation_questions(problems, seed) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2] and [len(part) for part in chosen] == [12, 12, 12]


def test_stage_one_reads_both_files(folder, policy, tmp_path):
    generate(teacher_config(folder), tmp_path, SILENT, scripted(policy, lambda number, _: tagged(ANSWERS[number])))
    config = math_config(folder)
    config.rl.prompts_per_step, config.verifier.sft.steps = 1, 0
    for source in (tmp_path, tmp_path / "train.parquet"):
        config.task.stage_one, config.task.validation = str(source), 6  # no row of the file is set aside
        validate(config)
        task = make_task(config, {role: policy.tokenizer for role in ("generator", "verifier")})
        assert task.sft_roles == ("generator",)
        assert "6 solutions to imitate, 2 held out (validation.parquet); 0 left out" in task.notes[-1]
        for part, name, count in (("train", "train", 6), ("heldout", "validation", 2)):
            wanted = {(row["question"], row["solution"]) for row in rows_of(tmp_path, name)}
            examples = [task.sft_example("generator", part, i) for i in range(count)]
            assert {(example.problem.question, example.response) for example in examples} == wanted
        # Reinforcement learning, on the file that the teacher solved, leaves the held-out questions alone as well.
        assert {task.train_problem(i).question for i in range(20)} == {row["question"] for row in rows_of(tmp_path)}
    reader = make_policy("generator", config.generator, start_source(config, "generator"))
    assert np.isclose(pack_pairs(reader, sft_pairs(reader, task, "train", 0, 1), 1).weight_NZRT.sum(), 1.0)


def test_stage_one_sets_rows_aside_where_there_is_no_second_file(folder, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_rows, "VALIDATION_SHARE", 0.0)
    config = teacher_config(folder)
    generate(config, tmp_path, SILENT, scripted(policy, lambda number, _: tagged(ANSWERS[number])))
    assert rows_of(tmp_path, "validation") == []
    shutil.copy(tmp_path / "train.parquet", tmp_path / "other.parquet")
    for name in ("train", "other"):
        config = math_config(folder, stage_one=str(tmp_path / f"{name}.parquet"), validation=2)
        config.verifier.sft.steps = 0
        validate(config)
        task = make_task(config, {role: policy.tokenizer for role in ("generator", "verifier")})
        assert "6 solutions to imitate, 2 held out; 0 left out" in task.notes[-1]


def test_a_second_file_that_is_no_stage_one_text_is_named(folder, policy, tmp_path):
    generate(teacher_config(folder), tmp_path, SILENT, scripted(policy, lambda number, _: tagged(ANSWERS[number])))
    (tmp_path / "validation.parquet").write_text('{"question": "1 + 1?", "answer": "2"}')
    config = math_config(folder, stage_one=str(tmp_path), validation=1)
    config.verifier.sft.steps = 0
    with pytest.raises(ValueError, match=r"validation\.parquet, line 1: 'solution' is missing.* beside train\.parquet"):
        validate(config)


# --------------------------------------------------------------------------------------- a model, an interruption


@pytest.fixture(scope="module")
def whole(folder, policy, tmp_path_factory):
    """Two solutions of every problem by the tiny model, hot enough that they differ."""
    config, workdir = teacher_config(folder, samples=2, temperature=1.5, top_p=0.95), tmp_path_factory.mktemp("whole")
    solve_all(config, policy, plan_work(config, policy.template, policy.tokenizer), workdir, SILENT)
    return config, workdir


def test_an_interrupted_run_ends_with_the_same_bytes(whole, policy, tmp_path):
    config, workdir = whole
    work = plan_work(config, policy.template, policy.tokenizer)
    wanted = files_of(workdir / "parts")
    assert list(wanted) == [f"part-0000{shard}.jsonl" for shard in range(3)]
    (tmp_path / "parts").mkdir()
    damages = (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9]), lambda path: path.write_bytes(b""))
    for damage in damages:
        for name, content in wanted.items():
            (tmp_path / "parts" / name).write_bytes(content)
        damage(tmp_path / "parts/part-00002.jsonl")
        (tmp_path / "parts/part-00002.jsonl.partial").write_text("half a part")
        rows = solve_all(config, policy, work, tmp_path, SILENT)
        assert files_of(tmp_path / "parts") == wanted and len(rows) == 16
    assert len({row.solution for row in rows}) == 16


def test_a_row_depends_on_seed_problem_and_sample_alone(whole, folder, policy, tmp_path, monkeypatch):
    def rows(name, seed=0, **settings):
        config = teacher_config(folder, **({"samples": 2, "temperature": 1.5, "top_p": 0.95} | settings))
        config.seed = seed
        work = plan_work(config, policy.template, policy.tokenizer)
        return {(row.number, row.sample): row for row in solve_all(config, policy, work, tmp_path / name, SILENT)}

    config, workdir = whole
    wanted = rows("same")
    assert files_of(tmp_path / "same" / "parts") == files_of(workdir / "parts")
    with monkeypatch.context() as patch:
        patch.setattr("tango_jax.generate.SHARD_PROBLEMS", 8)
        assert rows("other shards") == wanted
    assert rows("one", samples=1) == {key: row for key, row in wanted.items() if key[1] == 0}
    drawn = rows("drawn", problems=5)
    assert len(drawn) == 10 and drawn.items() <= wanted.items()
    assert not {row.solution for row in rows("seed", seed=1).values()} & {row.solution for row in wanted.values()}


def test_the_finished_files_are_the_same_after_an_interruption(folder, policy, tmp_path):
    class Interrupted(Exception):
        pass

    def text(number, sample):
        if number >= 6 and not may_finish:
            raise Interrupted
        return tagged(ANSWERS[number])

    config, may_finish = teacher_config(folder), False
    with pytest.raises(Interrupted):
        generate(config, tmp_path / "stopped", SILENT, scripted(policy, text))
    assert not (tmp_path / "stopped/train.parquet").exists()
    may_finish, calls = True, []
    generate(config, tmp_path / "stopped", SILENT, scripted(policy, text, calls))
    generate(config, tmp_path / "whole", SILENT, scripted(policy, text))
    assert len(calls) == 1 and files_of(tmp_path / "stopped") == files_of(tmp_path / "whole")


def test_an_edited_grader_grades_stored_solutions_again(folder, policy, tmp_path, monkeypatch):
    class Interrupted(Exception):
        pass

    def text(number, sample):
        if number >= limit:
            raise Interrupted
        return tagged(ANSWERS[number])

    def attempt(name, accepted):
        (tmp_path / "own.py").write_text(f"def own(problem, answer): return answer {accepted}\n")
        return generate(config, tmp_path / name, SILENT, scripted(policy, text))["correct"]

    monkeypatch.chdir(tmp_path)
    config, limit = teacher_config(folder), 3
    config.task.grader = "own.py:own"
    with pytest.raises(Interrupted):
        attempt("edited", "== '11'")
    limit = 8
    assert attempt("edited", "> '2'") == attempt("whole", "> '2'") == 6
    assert files_of(tmp_path / "edited") == files_of(tmp_path / "whole")
    limit = 0  # nothing is sampled any more
    assert attempt("edited", "== '16'") == 1
    assert [row["answer"] for row in rows_of(tmp_path / "edited") + rows_of(tmp_path / "edited", "validation")
            if row["is_correct"]] == ["16"]


def test_over_long_prompts_are_counted(folder, policy, tmp_path):
    config = teacher_config(folder)
    lengths = sorted(len(policy.tokenizer.encode_prompt(row.fields["question"] + "\n")) for row in read_rows(SHORT))
    config.generator.max_prompt = limit = lengths[4]
    fitting = sum(length <= limit for length in lengths)
    counts = generate(config, tmp_path, SILENT, scripted(policy, lambda number, _: tagged(ANSWERS[number])))
    assert (counts["problems"], counts["over_long_prompts"]) == (fitting, 8 - fitting) and fitting < 8
    config.generator.max_prompt = 5
    with pytest.raises(ValueError, match=rf"none of the 8 .* within .*=5 tokens \(the shortest has {lengths[0]}\):"):
        generate(config, tmp_path / "none", SILENT, policy)
    assert not (tmp_path / "none").exists()


def test_nothing_to_train_on_is_an_error_that_keeps_the_parts(folder, policy, tmp_path):
    message = r"no solution is left for training \(problems 8, .*untagged 8.*\): look at "
    with pytest.raises(ValueError, match=message):
        generate(teacher_config(folder), tmp_path, SILENT, scripted(policy, lambda *pair: "seven"))
    assert len(list((tmp_path / "parts").iterdir())) == 3 and not (tmp_path / "train.parquet").exists()


def test_a_problem_file_that_has_changed_is_an_error(folder, policy, tmp_path):
    config, data = teacher_config(folder), tmp_path / "data.jsonl"
    shutil.copy(SHORT, data)
    config.task.train = str(data)
    teacher = scripted(policy, lambda number, _: tagged(ANSWERS[number]))
    generate(config, tmp_path / "run", SILENT, teacher)
    before = files_of(tmp_path / "run")
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:7], lines[7].replace("Hal", "Ida")]))
    with pytest.raises(ValueError, match=r"part-00002.* 'Hal has .* 'Ida has .*choose another --workdir"):
        generate(config, tmp_path / "run", SILENT, teacher)
    assert files_of(tmp_path / "run") == before


def test_another_teacher_or_prompt_in_the_same_place_is_an_error(tmp_path):
    """A workdir whose parts were half made must not go on with an edited template or with other weights."""
    folder, template = write_tiny_folder(tmp_path / "model"), tmp_path / "template.txt"
    template.write_text("{problem}\n")
    config = teacher_config(folder)
    config.generator.template = str(template)
    first = make_policy("generator", config.generator, start_source(config, "generator"))
    teacher = scripted(first, lambda number, _: tagged(ANSWERS[number]))
    generate(config, tmp_path / "run", SILENT, teacher)
    (tmp_path / "run/parts/part-00002.jsonl").unlink()
    before = files_of(tmp_path / "run/parts")

    template.write_text("Solve: {problem}\n")
    changed = make_policy("generator", config.generator, start_source(config, "generator"))
    with pytest.raises(ValueError, match="made before the template of generator.template changed"):
        generate(config, tmp_path / "run", SILENT, changed)
    template.write_text("{problem}\n")
    [weights] = folder.glob("*.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="the weights of generator.checkpoint changed, .*choose another --workdir"):
        generate(config, tmp_path / "run", SILENT, teacher)
    weights.write_bytes(content)
    saved = (tmp_path / "run/teacher.json").read_text()
    (tmp_path / "run/teacher.json").write_text(saved[:9])
    with pytest.raises(ValueError, match="teacher.json is damaged, so it is unknown which teacher wrote"):
        generate(config, tmp_path / "run", SILENT, teacher)
    (tmp_path / "run/teacher.json").write_text(saved)
    assert files_of(tmp_path / "run/parts") == before
    generate(config, tmp_path / "run", SILENT, teacher)
    assert len(files_of(tmp_path / "run/parts")) == 3


def test_the_command_line(folder, tmp_path, monkeypatch, capsys):
    """The tiny model writes nothing that is tagged: one line says so."""
    config = teacher_config(folder)
    monkeypatch.setattr("tango_jax.generate.parse_command_line", lambda *_: (config, tmp_path / "run"))
    monkeypatch.setattr("tango_jax.cli.session.configure", lambda config: None)
    with pytest.raises(SystemExit, match="^error: no solution is left for training .problems 8, over long prompts 0, "):
        main([])
    assert "8 problems to solve, 0 left out" in capsys.readouterr().out
    assert len(list((tmp_path / "run/parts").iterdir())) == 3

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("tango_jax.generate.solve_all", interrupt)
    with pytest.raises(SystemExit, match="^interrupted; the same command resumes from what is saved in .*run$"):
        main([])
    config.task.name = "last_letter"
    with pytest.raises(SystemExit, match="^error: task.name=last_letter makes its own stage-1 examples"):
        main([])
