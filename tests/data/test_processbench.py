"""ProcessBench rows: what a file gives, what a misshapen row ends in, and the steps as the verifier sees them."""

import json

import pytest

from support.paths import ROWS
from tango_jax.data.processbench import NO_ERROR, hub_source, load_processbench, solution_text
from tango_jax.data.rows import check_hub_id
from tango_jax.grading import parse_solution

FIXTURE = ROWS / "processbench.jsonl"
ROW = {"id": "a", "problem": "P", "steps": ["one", "two"], "final_answer_correct": False, "label": 1}


def load(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return load_processbench(path)


def test_the_fixture_loads():
    rows = load_processbench(FIXTURE)
    assert [row.label for row in rows] == [NO_ERROR, 1, 0, NO_ERROR, 0]
    assert [len(row.steps) for row in rows] == [3, 3, 2, 1, 3]
    assert rows[4].is_answer_correct and rows[2].steps[1] == "It goes 60 \\cdot 2 = 120 km.\nThat is far."


def test_rows_may_lack_what_is_not_needed(tmp_path):
    (row,) = load(tmp_path, {"problem": "P", "steps": '["one"]', "label": -1})
    assert (row.id, row.steps, row.is_answer_correct) == ("rows/1", ("one",), True)


@pytest.mark.parametrize("change, message", [
    ({"label": 2}, "'label' is 2; it must be an index of the 2 steps, or -1"),
    ({"label": -2}, "'label' is -2"),
    ({"label": True}, "'label' is True"),
    ({"label": "1"}, "'label' is '1'"),
    ({"label": None}, "'label' is null"),
    ({"steps": []}, "'steps' must be a non-empty list of strings, not []"),
    ({"steps": ["one", 2]}, "'steps' must be a non-empty list of strings"),
    ({"problem": " "}, "'problem' must be a non-empty string"),
])
def test_a_misshapen_row_names_line_and_keys(tmp_path, change, message):
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: ") as error:
        load(tmp_path, ROW, ROW | change)
    assert message in str(error.value) and "keys wanted: problem, steps (a list of strings), label" in str(error.value)


def test_each_step_stands_unchanged_in_a_block_of_its_own():
    steps = ("  1 + 1 = 2 ", "so $x < 3$\n\nand\tmore", "end")
    assert parse_solution(solution_text(steps)).steps == steps


def test_the_hub_ids_are_hub_ids():
    assert check_hub_id(hub_source("omnimath")) == ("Qwen/ProcessBench", None, "omnimath")
