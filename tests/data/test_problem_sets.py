"""Problem sets: every fixture loads and its gold answers grade as correct; order, epochs, hosts, filter and split."""
import json
import re

import pytest

from support.paths import ROWS
from tango_jax.data.problem_sets import BENCHMARKS, load_problems
from tango_jax.data.row_formats import ROW_FORMATS
from tango_jax.data.rows import read_rows
from tango_jax.grading import grade_many
from tango_jax.records import Problem
from tango_jax.tasks.splits import make_problem_order, split_problems

SETS = {  # file: (grade kind, gold answers of its first rows, rows skipped)
    "gsm8k.jsonl": ("math", ["72", "5", "70000", "10", "1080", "41", "35"], 0),
    "math500.jsonl": ("math", [r"\left( 3, \frac{\pi}{2} \right)", r"\text{Evelyn}", r"\$32,\!348"], 0),
    "aime.jsonl": ("math", ["001", "020"], 0),
    "aime_capitals.jsonl": ("math", ["210"], 0),
    "amc23.jsonl": ("math", ["27", "2.5"], 0),
    "olympiadbench.jsonl": ("math", ["-2, 2", "5", "(-1,1)"], 0),
    "eurus.jsonl": ("math", [r"\frac{7}{2}", "12"], 1),
    "bgqa.jsonl": ("choice", ["True", "False", "Uncertain"], 0),
    "cruxeval.jsonl": ("python", ["[(4, 1), (4, 1), (4, 1), (4, 1), (2, 3), (2, 3)]", "{1: None, 2: None}"], 0),
    "strategyqa.json": ("choice", ["True", "False"], 0),
    "tablebench.jsonl": ("text", ["1,500", "Ada"], 2),
}


def response(answer: str) -> str:
    return rf"<think><step>We compute.</step></think><answer>\boxed{{{answer}}}</answer>"


def problems(count: int) -> list[Problem]:
    return [Problem(f"set/{number}", "x" * number, str(number)) for number in range(1, count + 1)]


pytestmark = pytest.mark.usefixtures("closed_pool")


@pytest.mark.parametrize("file", SETS)
def test_every_set_loads_and_its_gold_answers_are_correct(file):
    kind, answers, num_skipped = SETS[file]
    loaded = load_problems(ROWS / file)
    assert (loaded.grade_kind, len(read_rows(ROWS / file)) - len(loaded.problems)) == (kind, num_skipped)
    golds = [problem.answer for problem in loaded.problems]
    assert golds[: len(answers)] == answers
    assert len({problem.id for problem in loaded.problems}) == len(golds)
    # As they are, and in a form that only a reader of the kind calls equal.
    rewritten = {"math": r"\displaystyle {} ", "choice": r"\text{{{}}}.", "python": r"\texttt{{{}}}", "text": "${}$"}
    forms = [*golds, *(rewritten[kind].format(gold) for gold in golds)]
    report = grade_many([response(form) for form in forms], golds * 2, kind)
    assert report.correct == (True,) * len(forms)
    assert (report.errors, report.timeouts, report.overlong) == (0, 0, 0)


def test_system_turns_are_counted_unless_they_are_empty(tmp_path):
    assert load_problems(ROWS / "eurus.jsonl").num_system == 1
    rows = [{"prompt": [{"role": "system", "content": text}, {"role": "user", "content": "Q"}],
             "reward_model": {"ground_truth": "1"}} for text in ("", " ", None, "S")]
    (tmp_path / "verl.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_problems(tmp_path / "verl.jsonl").num_system == 1


def test_benchmarks_name_known_formats():
    assert {benchmark.row_format for benchmark in BENCHMARKS.values()} <= set(ROW_FORMATS)
    assert all(benchmark.source.startswith("hub:") for benchmark in BENCHMARKS.values())


def test_a_benchmark_is_fetched_by_its_name():
    with pytest.raises(ValueError, match="hub:HuggingFaceH4/MATH-500/test: could not be fetched"):
        load_problems("math500")


def test_wrong_calls_say_what_to_change(tmp_path):
    with pytest.raises(ValueError, match="aime.jsonl, line 1: '(prompt|reward_model)' is missing"):
        load_problems(ROWS / "aime.jsonl", "verl")
    (tmp_path / "code.jsonl").write_text('{"prompt": "Q", "reward_model": {"ground_truth": "1"}, "ability": "code"}')
    with pytest.raises(ValueError, match="none of its 1 rows is a problem in the format verl"):
        load_problems(tmp_path / "code.jsonl")


# ---------------------------------------------------------------------------------------------------------- order


def test_every_epoch_is_another_permutation_at_any_cursor():
    given = problems(23)
    order = make_problem_order(given, seed=5)
    epochs = [[order(cursor) for cursor in range(start, start + 23)] for start in (0, 23, 46)]
    assert all(sorted(epoch, key=lambda problem: len(problem.question)) == given for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    resumed = make_problem_order(given, seed=5)
    assert [resumed(cursor) for cursor in range(30, 46)] == epochs[1][7:]  # nothing before it was asked for
    assert [make_problem_order(given, seed=6)(cursor) for cursor in range(23)] != epochs[0]
    assert order(10**12) in given


def test_the_order_never_changes():
    """A checkpoint holds the cursor alone: another release of grain must give the same problems."""
    order = make_problem_order(problems(10), seed=0)
    expected = [2, 3, 5, 6, 10, 8, 9, 7, 1, 4, 10, 7, 2, 9, 3, 1, 4, 6, 5, 8]
    assert [int(order(cursor).answer) for cursor in range(20)] == expected


def test_an_order_needs_problems_and_a_seed():
    with pytest.raises(ValueError, match="0 problems and seed=0"):
        make_problem_order([], 0)
    with pytest.raises(ValueError, match="seed=-1; there must be at least one problem, and the seed must be in 0"):
        make_problem_order(problems(1), -1)


# ---------------------------------------------------------------------------------------------------------- split


def split(**settings):
    settings = {"max_tokens": 90, "num_validation": 20, "batch_size": 8, "seed": 1} | settings
    return split_problems(problems(100), lambda problem: len(problem.question), **settings)


def test_long_prompts_are_left_out_and_counted():
    done = split()
    assert (done.num_too_long, done.most_over) == (10, 10)
    assert len(done.train) + len(done.validation) == 90
    assert max(len(problem.question) for problem in done.train + done.validation) == 90
    assert not set(done.train) & set(done.validation)
    assert done.describe() == (
        f"{len(done.train)} training and {len(done.validation)} validation problems; 10 left out because of their "
        "length, up to 10 tokens over a limit"
    )


def test_another_limit_moves_no_problem_between_the_parts():
    wide, narrow = split(max_tokens=100), split(max_tokens=50)
    assert len(wide.validation) == 20
    assert set(narrow.train) < set(wide.train) and set(narrow.validation) < set(wide.validation)
    assert split(max_tokens=100) == wide
    assert set(split(max_tokens=100, seed=2).validation) != set(wide.validation)


@pytest.mark.parametrize("settings", [{"max_tokens": 7}, {"batch_size": 81, "max_tokens": 100}, {"max_tokens": 0}])
def test_less_than_a_batch_is_refused(settings):
    with pytest.raises(ValueError, match="too few problems: .* raise the limit.*, lower the other numbers, or give"):
        split(**settings)


def test_the_limit_that_would_do_is_said():
    with pytest.raises(ValueError, match=r"raise the limit by \d+ tokens \(max_prompt") as error:
        split(max_tokens=2)
    raised = 2 + int(re.search(r"by (\d+) tokens", str(error.value))[1])
    assert len(split(max_tokens=raised).train) >= 8
    with pytest.raises(ValueError, match="too few"):
        split(max_tokens=raised - 1)
    with pytest.raises(ValueError, match=r"raise the limit \(max_prompt"):  # none would do
        split(batch_size=81)


def test_validation_may_be_off():
    assert split(num_validation=0, max_tokens=100).train == tuple(problems(100))
