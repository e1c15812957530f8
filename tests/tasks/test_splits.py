"""What is measured on is set aside by question: no row of it, and no row with the same question, is trained on."""

import json

import numpy as np
import pytest

from support.math_cases import math_config, task_of
from support.paths import ROWS
from support.small_tokenizers import byte_level
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES
from tango_jax.data.problem_sets import question_key
from tango_jax.data.rows import read_rows
from tango_jax.data.teacher_rows import validation_questions
from tango_jax.grading import parse_solution
from tango_jax.records import Problem
from tango_jax.tasks.gsm8k_examples import make_gsm8k_examples
from tango_jax.tasks.registry import make_task
from tango_jax.tasks.splits import split_problems
from tango_jax.tasks.tagged_examples import read_tagged_rows
from tango_jax.text.hf_tokenizer import make_tokenizer
from tango_jax.text.templates import load_template, verifier_prompt

BLANKS = (" ", "  ", "\n", "\u00a0", "\t ")


@pytest.fixture(scope="module")
def tokenizer():
    backend = byte_level("qwen2")
    return make_tokenizer(backend, 700, bos_ids=(), stop_ids=(backend.token_to_id("<|im_end|>"),))


def spelled(number: int, copy: int) -> str:
    """A question, each time with other blanks between its words."""
    return BLANKS[copy % len(BLANKS)].join(["What", "is", str(number), "+ 1?"])


def problems(questions: int, copies: int) -> list[Problem]:
    pairs = [(number, copy) for copy in range(copies) for number in range(questions)]
    return [Problem(f"set/{k}", spelled(*pair), str(pair[0] + 1)) for k, pair in enumerate(pairs)]


def keys(problems) -> set[str]:
    return {question_key(problem.question) for problem in problems}


def write_rows(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("count, held", [(1, 4), (4, 4), (41, 44), (100, 100)])
def test_every_row_of_a_question_is_on_one_side(count, held):
    split = split_problems(problems(41, 4), lambda problem: 1, 1, count, 1, seed=0)
    assert len(split.validation) == held and len(split.train) == 164 - held
    assert not keys(split.train) & keys(split.validation) and len(keys(split.train)) == 41 - held // 4


def test_questions_that_stand_once_are_drawn_as_ever():
    """A run that goes on finds the problems that it began with."""
    given = problems(100, 1)
    split = split_problems(given, lambda problem: 1, 1, 20, 1, seed=3)
    drawn = np.sort(np.random.default_rng((3, 1)).permutation(100)[:20])
    assert list(split.validation) == [given[index] for index in drawn]


def test_a_file_with_one_question_cannot_be_parted():
    with pytest.raises(ValueError, match="too few problems: 0 training and 9 validation problems"):
        split_problems(problems(1, 9), lambda problem: 1, 1, 2, 1, seed=0)


def test_stage_zero_draws_by_question_too():
    given = problems(500, 2)
    chosen = validation_questions(given, 0)
    assert len(chosen) == 10 and sum(question_key(problem.question) in chosen for problem in given) == 20


def test_tagged_rows(tokenizer, tmp_path):
    """Four solutions of each question, as a teacher samples them."""
    rows = [{"question": problem.question, "solution": f"<think><step>{k}</step></think><answer>\\boxed{{1}}</answer>"}
            for k, problem in enumerate(problems(41, 4))]
    train = write_rows(tmp_path / "train.jsonl", [{"question": row["question"], "answer": "1"} for row in rows[:41]])
    config = math_config("a/b", train=train, stage_one=write_rows(tmp_path / "tagged.jsonl", rows), validation=41)
    config.rl.prompts_per_step, config.verifier.sft.steps, config.task.validation = 1, 0, 20
    validate(config)
    task = task_of(config, tokenizer)
    imitated = keys(task.sft_example("generator", "train", index).problem for index in range(144))
    heldout = keys(task.sft_example("generator", "heldout", index).problem for index in range(20))
    assert (len(imitated), len(heldout)) == (36, 5) and not imitated & heldout
    assert keys(task.train_problem(index) for index in range(36)) == imitated  # nor later, by reinforcement


def test_worked_answers(tokenizer, tmp_path):
    rows = [row.fields for row in read_rows(ROWS / "gsm8k_short.jsonl")]
    doubled = rows + [row | {"question": row["question"].replace(" ", "  ")} for row in rows]
    made = make_gsm8k_examples(read_rows(write_rows(tmp_path / "doubled.jsonl", doubled)), 3, seed=0)
    imitated = keys(made.sft_example("generator", "train", index).problem for index in range(made.num_train))
    assert (made.num_train, made.num_heldout) == (12, 4) and not imitated & made.heldout and len(made.heldout) == 2
    config = math_config("a/b", train=str(tmp_path / "doubled.jsonl"), validation=3)
    task = task_of(config, tokenizer)
    heldout = keys(task.sft_example("generator", "heldout", index).problem for index in range(4))
    assert len(heldout) == 2 and not heldout & keys(task.train_problem(index) for index in range(24))


@pytest.mark.parametrize("stage_one", ["gsm8k", "tagged"])
def test_what_the_generator_is_evaluated_on_is_not_imitated(tokenizer, tmp_path, stage_one):
    """Without a test set, evaluation takes validation problems of the training file, which stage 1 knows as well."""
    config = math_config("a/b", test="", stage_one=stage_one)
    if stage_one == "tagged":
        rows = [{"question": row.fields["question"], "solution": "<step>a</step><answer>\\boxed{1}</answer>"}
                for row in read_rows(ROWS / "gsm8k_short.jsonl")]
        config.task.stage_one, config.verifier.sft.steps = write_rows(tmp_path / "tagged.jsonl", rows), 0
    task = task_of(config, tokenizer)
    tested = keys(task.test_problem(index) for index in range(task.num_test))
    heldout, imitated = (keys(task.sft_example("generator", part, index).problem for index in range(8))
                         for part in ("heldout", "train"))
    trained = keys(task.train_problem(index) for index in range(8))
    assert (len(tested), len(heldout), len(imitated), len(trained)) == (2, 2, 4, 4)
    assert not tested & (heldout | imitated | trained) and not heldout & (imitated | trained)
    assert "2 left out because their questions are used for evaluation" in task.notes[-1]


def test_questions_of_the_test_set_are_not_trained_on(tokenizer, tmp_path):
    rows = [{"question": f"What is {k} + 1?", "answer": str(k + 1)} for k in range(20)]
    files = [write_rows(tmp_path / name, part) for name, part in (("train.jsonl", rows), ("test.jsonl", rows[:5]))]
    config = math_config("a/b", train=files[0], test=files[1], stage_one="")
    task = task_of(config, tokenizer)
    tested = {task.test_problem(index).question for index in range(task.num_test)}
    assert len(tested) == 5
    assert not tested & {task.train_problem(index).question for index in range(100)}
    assert any("5 problems are left out because " in note for note in task.notes)
    config.task.test = write_rows(tmp_path / "same.jsonl", rows)
    with pytest.raises(ValueError, match="none of the 20 problems of .* is left to train on: .*choose another task.te"):
        task_of(config, tokenizer)


# --------------------------------------------------------------------------- solutions that the verifier's prompt cuts


@pytest.mark.parametrize("stage_one", ["tagged", "gsm8k"])
def test_solutions_that_the_verifier_could_not_read_to_their_end_are_left_out(tokenizer, tmp_path, stage_one):
    rows = [{"question": f"Q{k}", "solution": f"<step>{'x' * length}</step><answer>\\boxed{{1}}</answer>",
             "verification": "<step_verification><step>\\boxed{CORRECT}</step></step_verification>"
                             "<final_verification>\\boxed{CORRECT}</final_verification>"}
            for k, length in enumerate((30, 70, 700, 40, 50, 701, 60, 20))]
    config = math_config("a/b", validation=3)
    if stage_one == "tagged":
        config.task.stage_one = write_rows(tmp_path / "tagged.jsonl", rows)
    for role in (config.generator, config.verifier):
        role.max_prompt, role.max_response, role.sft.pack_length = 1000, 1000, 0
    task, template = task_of(config, tokenizer), load_template("verifier", config.verifier.template)
    assert "0 left out because of their length" in task.notes[-1] and "cut off" not in task.notes[-1]

    def length(index):
        problem, solution, num_steps, _ = task.sft_example("verifier", "train", index)[:4]
        return len(verifier_prompt(template, tokenizer, problem, solution, num_steps, 1 << 30)[0])

    config.verifier.max_prompt = max(length(index) for index in range(8)) - 1
    again = task_of(config, tokenizer)
    assert "left out because of their length, " in again.notes[-1]
    assert "of them because the verifier's prompt would cut off the solution" in again.notes[-1]
    for index in range(8):
        problem, solution, num_steps, _ = again.sft_example("verifier", "train", index)[:4]
        assert num_steps == len(parse_solution(solution).steps)
        prompt, is_shortened = verifier_prompt(template, tokenizer, problem, solution, num_steps, 1 << 30)
        assert not is_shortened and (len(prompt) <= config.verifier.max_prompt or stage_one == "gsm8k")
    config.verifier.sft.steps = 0
    if stage_one == "tagged":  # nobody reads them
        assert "0 left out because of their length" in task_of(config, tokenizer).notes[-1]


@pytest.mark.parametrize("stage_one", ["tagged", "gsm8k"])
def test_texts_that_nobody_imitates_leave_no_example_out(tokenizer, stage_one):
    config = math_config("a/b", validation=1)
    if stage_one == "tagged":
        config.task.stage_one = str(ROWS / "tagged.jsonl")
    for role in (config.generator, config.verifier):
        role.max_prompt, role.max_response, role.sft.pack_length = 1000, 1000, 0

    def left_out(has_remarks: bool) -> bool:
        try:
            note = make_task(config, dict.fromkeys(ROLES, tokenizer), has_remarks=has_remarks).notes[-1]
        except ValueError as error:
            return "examples are within the limits" in str(error)
        return "0 left out because of their length" not in note

    task = make_task(config, dict.fromkeys(ROLES, tokenizer), has_remarks=False)
    examples = [task.sft_example("verifier", part, index) for part in ("train", "heldout") for index in range(20)]
    # Marks without remarks. INCORRECT has two characters more than CORRECT, and is there twice.
    more = 4 * (stage_one == "gsm8k")
    config.verifier.max_response = max(len(tokenizer.encode_response(one.response)) for one in examples) + more
    assert not left_out(has_remarks=False)
    assert left_out(has_remarks=True)
    config.verifier.sft.steps, config.verifier.max_response = 0, 1
    assert not left_out(has_remarks=True)
    config.verifier.sft.steps, config.generator.sft.steps = 2, 0
    config.verifier.max_response, config.generator.max_response = 1000, 1
    assert not left_out(has_remarks=True)


def test_texts_of_a_file_need_no_room_beyond_their_own_tokens(tokenizer):
    rows = read_tagged_rows(str(ROWS / "tagged.jsonl"), is_for_verifier=True)
    config = math_config("a/b", validation=1, stage_one=str(ROWS / "tagged.jsonl"))
    for role in (config.generator, config.verifier):
        role.max_prompt, role.max_response, role.sft.pack_length = 1000, 1000, 0
    longest = max(len(tokenizer.encode_response(row.verification)) for row in rows)
    for limit, count in ((longest, 0), (longest - 1, 1)):
        config.verifier.max_response = limit
        assert f"; {count} left out because of their length" in task_of(config, tokenizer).notes[-1]


def test_rows_of_stage_one_need_room_for_the_prompt_that_is_there(tokenizer):
    """Not for the longest that is allowed."""
    config = math_config("a/b")
    for role in (config.generator, config.verifier):
        role.max_prompt, role.max_response, role.sft.pack_length = 1000, 1000, 900
    assert "0 left out because of their length" in task_of(config, tokenizer).notes[-1]
    config.generator.sft.pack_length = 100
    with pytest.raises(ValueError, match="stage 1: 0 of 8 examples are within the limits"):
        task_of(config, tokenizer)
