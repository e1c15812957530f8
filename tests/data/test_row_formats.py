"""Every shape of row: the question, gold answer and size that come out, and what a misshapen row ends in."""
import pytest

from tango_jax.data.row_fields import BadRow, answer_text
from tango_jax.data.row_formats import ROW_FORMATS, detect_format, strip_wrapping, to_problem
from tango_jax.data.rows import Row
from tango_jax.records import Problem


def problem(row_format: str, **fields) -> Problem | None:
    return to_problem(Row("set.jsonl, line 3", "set/3", fields), row_format)


@pytest.mark.parametrize("fields, expected", [
    ({"question": "Q", "answer": "7"}, ("Q", "7", 0)),
    ({"problem": " Q ", "answer": 27.0, "level": 5}, ("Q", "27", 5)),
    ({"Problem": "Q", "Answer": 33}, ("Q", "33", 0)),
    ({"problem": "P", "question": "Q", "answer": [2.5], "level": "Level 3"}, ("Q", "2.5", 3)),
    ({"question": None, "problem": "P", "answer": "x", "level": None}, ("P", "x", 0)),
    ({"question": "Q", "answer": "so 2.\n#### 1,080"}, ("Q", "1080", 0)),
])
def test_mathematics(fields, expected):
    assert problem("math", **fields) == Problem("set/3", *expected)


@pytest.mark.parametrize("value, text", [
    (27.0, "27"), (-0.5, "-0.5"), (1e20, "100000000000000000000"), (True, "True"), (["$x$"], "$x$"), (" 033 ", "033"),
    ("#### -1,234.50", "-1234.50"), ("a ####  12 apples", "12 apples"), ("1,2", "1,2"), ("#### 1,2", "1,2"),
    ("so 2.\n#### 5\nThe end", "5"), ("#### 5 \r\nThe end", "5"), ("one #### 4\nno: #### 5\n\n", "5"),
])
def test_gold_answers(value, text):
    assert answer_text(value) == text


@pytest.mark.parametrize("value", [
    None, "", "  ", "5 ####", "#### \n5", [], [1, 2], {}, float("nan"), float("inf"), [[]],
])
def test_values_that_are_no_gold_answer(value):
    with pytest.raises(BadRow):
        answer_text(value)


def test_gsm8k_counts_lines():
    row = {"question": "Q", "answer": "1+1=<<1+1=2>>2.\n\nSo 2*2=<<2*2=4>>4.\n#### 4"}
    assert problem("gsm8k", **row) == Problem("set/3", "Q", "4", 2)


def test_verl_takes_the_user_turn_without_its_wrapping():
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q\n\nPresent the answer in LaTex format: \\boxed{Your answer}"}]  # noqa: E501
    assert problem("verl", prompt=messages, reward_model={"ground_truth": 3.0}) == Problem("set/3", "Q", "3")
    assert problem("verl", prompt="Q", reward_model='{"ground_truth": "3"}', ability="MATH").answer == "3"
    assert problem("verl", prompt=messages, reward_model={"ground_truth": "{}"}, ability="code") is None


@pytest.mark.parametrize("wrapped, question", [
    ('Q Let\'s think step by step and output the final answer after "####".', "Q"),
    ("Q Let's think step by step and output the final answer within \\boxed{}.", "Q"),
    ("Solve the following math problem step by step. The last line of your response should be of the form Answer: "
     "$Answer (without quotes) where $Answer is the answer to the problem.\n\nQ\n\nRemember to put your answer on its "
     'own line after "Answer:".', "Q"),
    ("Solve the following math problem step by step. Q", "Solve the following math problem step by step. Q"),
])
def test_wrappings(wrapped, question):
    assert strip_wrapping(wrapped) == question


def test_olympiadbench_asks_for_all_answers_in_the_unit():
    row = dict(context="C.", question="Q", final_answer=["$1$,$\\$2$"], is_multiple_answer=True, unit="km")
    assert problem("olympiadbench", **row) == Problem(
        "set/3",
        "C.\nQ\nThere is more than one answer: give all of them, separated by commas.\n"
        "The answer is in the unit km; give the value alone.",
        "1, \\$2",
    )
    plain = dict(context=None, question="Q", final_answer=["7"], is_multiple_answer=False, unit=None)
    assert problem("olympiadbench", **plain) == Problem("set/3", "Q", "7")
    assert problem("olympiadbench", problem="Q", answer="$7$") == Problem("set/3", "Q", "7")


@pytest.mark.parametrize("label, answer", [("proved", "True"), ("disproved", "False"), ("unknown", "Uncertain")])
def test_bgqa(label, answer):
    made = problem("bgqa", example="The bear ...", label=label)
    assert made.answer == answer and made.question.startswith("The bear ...\nAnswer True if")


def test_cruxeval_may_have_no_arguments():
    made = problem("cruxeval", code="def f():\n    return {}", input="", output="{}")
    assert made.question.endswith("def f():\n    return {}\n\nWhat does f() return? Answer with a Python literal.")
    assert made.answer == "{}"


def test_strategyqa_gives_the_facts():
    made = problem("strategyqa", question="Is it?", facts=["It is.", "So."], answer=True)
    assert made.question == "Facts:\nIt is.\nSo.\n\nQuestion: Is it? Answer True for yes or False for no."
    assert (made.answer, made.size) == ("True", 2)


def test_tablebench_shows_the_table():
    table = {"columns": ["a", "b"], "data": [[1, "x|y"], [None, "z\nw"]]}
    row = dict(qtype="FactChecking", question="Which?", answer=3)
    made = problem("tablebench", table=table, **row)
    assert made.question.startswith("| a | b |\n| --- | --- |\n| 1 | x\\|y |\n|  | z w |\n\nWhich? Answer")
    assert (made.answer, made.size) == ("3", 2)
    assert problem("tablebench", table='{"columns": ["a", "b"], "data": [[1, "x|y"], [null, "z\\nw"]]}', **row) == made
    assert problem("tablebench", table=table, **{**row, "qtype": "DataAnalysis"}) is None


@pytest.mark.parametrize("row_format, fields, message", [
    ("math", {"text": "Q", "gold": 1}, "'question' is missing; keys found: text, gold; keys wanted of a row in the format math: question or problem, and answer"),  # noqa: E501
    ("math", {"question": "Q"}, "'answer' is missing; keys found: question"),
    ("math", {"question": "Q", "answer": None}, "'answer' is null"),
    ("math", {"question": 5, "answer": 5}, "'question' must be a non-empty string, not 5"),
    ("math", {"question": "Q", "answer": [1, 2]}, "the answer is a list of 2"),
    ("math", {"question": "a \ud83d?", "answer": 1}, "'question' contains '\\ud83d', half of a surrogate pair, at "),
    ("math", {"question": "Q", "answer": "\ude42"}, "'answer' contains '\\ude42', half of a surrogate pair"),
    ("verl", {"prompt": "Q\udfff", "reward_model": {"ground_truth": 1}}, "'question' contains '\\udfff', half"),
    ("gsm8k", {"question": "Q", "answer": "5"}, "'answer' has no #### before the number"),
    ("gsm8k", {"question": "Q", "answer": "####\n5"}, "no answer follows #### on its line: write the answer there"),
    ("math", {"Question": "P", "question": "Q", "answer": 1}, "the keys 'Question' and 'question' differ only in case"),
    ("math", {"question": "Q", "answer": 1, "Options": "A", "options": ""}, "the keys 'Options' and 'options' differ"),
    ("gsm8k", {"question": "Q", "answer": "#### 5", "Answer": "#### 6"}, "the keys 'answer' and 'Answer' differ only"),
    ("verl", {"prompt": [], "reward_model": {"ground_truth": 1}}, "'prompt' must be a list of chat messages"),
    ("verl", {"prompt": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "Q"}],  # noqa: E501
              "reward_model": {"ground_truth": 1}}, "'prompt' has the turns user, assistant, user; a problem has one user turn: put the conversation into it"),  # noqa: E501
    ("verl", {"prompt": [{"role": "user", "content": "Q"}, {"role": "user", "content": "Q"}], "reward_model": {"ground_truth": 1}}, "'prompt' has the turns user, user;"),  # noqa: E501
    ("verl", {"prompt": "Q", "reward_model": {}}, "'reward_model' must be an object with 'ground_truth'"),
    ("verl", {"prompt": "Q", "reward_model": "{"}, "'reward_model' must be an object"),
    ("olympiadbench", {"question": "Q", "final_answer": []}, "the answer is a list of 0"),
    ("bgqa", {"example": "E", "label": "yes"}, "'label' is 'yes'; it must be one of proved, disproved, unknown"),
    ("strategyqa", {"question": "Q", "facts": "F", "answer": True}, "'facts' must be a list of sentences"),
    ("strategyqa", {"question": "Q", "facts": [], "answer": "yes"}, "'answer' must be true or false, not 'yes'"),
    ("tablebench", {"qtype": "FactChecking", "table": "a,b"}, "'table' must hold the lists 'columns' and 'data'"),
    ("tablebench", {"qtype": "FactChecking", "table": {"columns": [], "data": [1]}}, "must be a list of lists"),
])
def test_a_misshapen_row_names_line_and_keys(row_format, fields, message):
    with pytest.raises(ValueError, match="^set.jsonl, line 3: ") as error:
        problem(row_format, **fields)
    assert message in str(error.value) and ROW_FORMATS[row_format].wanted in str(error.value)


def test_formats_are_told_by_their_keys():
    assert detect_format({"problem": 1, "answer": "7"}) == "math"
    assert detect_format({"question": 1, "answer": "so\n#### 7"}) == "gsm8k"
    assert detect_format({"question": 1, "facts": [], "answer": True}) == "strategyqa"
    assert detect_format({"prompt": [], "reward_model": {}, "ability": "math"}) == "verl"
    cruxeval = {"code": "def f(): ...", "input": "", "output": "1", "id": 1}
    assert detect_format(cruxeval) == "cruxeval"
    for key in ("question", "Problem"):
        assert detect_format({**cruxeval, key: "What does it print?", "answer": "1"}) == "math"


@pytest.mark.parametrize("row_format, row, place", [
    ("math", {"question": "q?", "answer": "B"}, "question"),
    ("gsm8k", {"question": "q?", "answer": "#### 4"}, "question"),
    ("verl", {"prompt": "q?", "reward_model": {"ground_truth": "4"}}, "prompt"),
    ("olympiadbench", {"question": "q?", "final_answer": ["4"]}, "question"),
])
def test_what_a_prompt_would_lack_is_named(row_format, row, place):
    read_fn = ROW_FORMATS[row_format].read
    for name in ("options", "choices", "context", "body", "passage", "paragraph", "facts", "table", "input"):
        with pytest.raises(BadRow, match=f"'{name}' would be left out of the prompt: put it into '{place}'"):
            read_fn({**row, name.title(): ["1"]})
    for name in ("image", "images", "image_1", "Picture", "figure"):
        with pytest.raises(BadRow, match=f"'{name.lower()}' would be left out of the prompt, which is text alone"):
            read_fn({**row, name: {"bytes": b"\x89PNG"}})
    for nothing in (None, "", " ", [], {}, [None], {"bytes": None, "path": None}, float("nan")):
        assert read_fn({**row, "Body": nothing, "image_1": nothing, "context": nothing})[0] == "q?"
    assert read_fn({**row, "solution": "s", "url": "u", "image_url_count": 2})[0] == "q?"


def test_golds_that_would_be_read_as_another_number():
    row = {"question": "q?", "final_answer": ["$100$,$200$"], "is_multiple_answer": True}
    assert ROW_FORMATS["olympiadbench"].read(row)[1] == "100, 200"
    assert answer_text(0.00005) == "0.00005" and answer_text(1e22) == "10000000000000000000000"
