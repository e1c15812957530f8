"""Stage 1 of a verifier that stops at its first INCORRECT: the same examples, cut there, in every task."""

import json

import pytest

from support.evaluation_cases import small_tokenizer
from support.math_cases import math_config
from support.paths import ROWS
from tango_jax.config import ROLES, default_config
from tango_jax.grading import parse_verification, until_first_error
from tango_jax.tasks.registry import make_task
from tango_jax.text.prompts import SECOND_TRY

NAMES = ("last_letter", "state_tracking", "gsm8k", "file")


def tasks(name: str, further: dict | None = None):
    """The task of a verifier that judges all steps, and of one that stops."""
    if name in ("gsm8k", "file"):
        source = "gsm8k" if name == "gsm8k" else str(ROWS / "tagged.jsonl")
        config = math_config("a/b", stage_one=source, validation=1)
    else:
        config = default_config()
        config.task.name, config.task.double_steps = name, 0.3
    made, tokenizers = [], dict.fromkeys(ROLES, small_tokenizer()) if name in ("gsm8k", "file") else {}
    for stops in (False, True):
        config.verifier.stop_at_first_error = stops
        made.append(make_task(config, tokenizers, further))
    return made


@pytest.mark.parametrize("name", NAMES)
def test_examples_end_at_the_first_error(name):
    whole, stopped = tasks(name)
    cut = 0
    for index in range(40):
        assert stopped.sft_example("generator", "train", index) == whole.sft_example("generator", "train", index)
        before, after = (task.sft_example("verifier", "train", index) for task in (whole, stopped))
        assert after == before._replace(response=until_first_error(before.response))
        parsed = parse_verification(after.response, before.num_steps, stops=True)
        each = parse_verification(before.response, before.num_steps)
        assert parsed.aligned and parsed.format_score == 1.0 and parsed.verdict == each.verdict
        first = each.judgements.index(False) if False in each.judgements else before.num_steps
        assert parsed.judgements[: first + 1] == each.judgements[: first + 1]
        assert set(parsed.judgements[first + 1 :]) <= {None}
        cut += after.response != before.response
    assert cut or name == "file"


def test_a_second_try_sees_the_verification_up_to_there():
    whole, stopped = tasks("state_tracking", {"generator": (SECOND_TRY,)})
    examples = [[task.sft_example("generator", "train", index) for index in range(1, 40, 2)]
                for task in (whole, stopped)]
    assert examples[1] == [one._replace(verification=until_first_error(one.verification)) for one in examples[0]]
    assert examples[1] != examples[0] and all(one.prompt == "second_try" for one in examples[0])


def test_a_file_may_hold_verifications_that_stop(tmp_path):
    row = json.loads((ROWS / "tagged.jsonl").read_text().splitlines()[0])
    row["solution"] = "<think><step>a</step><step>b</step></think><answer>\\boxed{1}</answer>"
    row["verification"] = ("<step_verification><step>\\boxed{INCORRECT}</step></step_verification>"
                           "<final_verification>\\boxed{INCORRECT}</final_verification>")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"question": f"{k} + 1?"}) + "\n" for k in range(3)))
    config, tokenizers = math_config("a/b", stage_one=str(path), validation=1), dict.fromkeys(ROLES, small_tokenizer())
    with pytest.raises(ValueError, match=r"the verification does not judge each of the 2 steps"):
        make_task(config, tokenizers)
    config.verifier.stop_at_first_error = True
    assert make_task(config, tokenizers).sft_example("verifier", "train", 0).response == row["verification"]
