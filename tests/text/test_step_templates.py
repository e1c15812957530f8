"""Templates of process reward models: what they read of a solution, and the verification that stands for it."""

import pytest

from support.reward_models import MARK
from support.small_tokenizers import byte_level
from tango_jax.grading import parse_verification
from tango_jax.records import Problem
from tango_jax.text.hf_tokenizer import make_tokenizer
from tango_jax.text.templates import (
    PRM_QWEN,
    PRM_TRL,
    PromptTooLong,
    has_steps,
    judged_by_scores,
    load_template,
    step_row,
    verifier_prompt,
)

PROBLEM = Problem("p", "What is 3 + 4?", "7")
SOLUTION = "<think><step>3 + 4 = 7</step> so <step>it is 7</step></think><answer>\\boxed{7}</answer>"


@pytest.fixture(scope="module")
def tokenizer():
    backend = byte_level("qwen2")
    backend.add_special_tokens([MARK])
    return make_tokenizer(backend, backend.get_vocab_size(), (), (backend.token_to_id("<|im_end|>"),))


@pytest.mark.parametrize("template", [PRM_TRL, PRM_QWEN])
def test_whole_steps_are_read_as_far_as_there_is_room(tokenizer, template):
    whole = step_row(template, tokenizer, PROBLEM, SOLUTION, 999)
    assert len(whole.ends) == 2 and whole.ends[-1] == len(whole.tokens) - 1 and not whole.is_cut
    assert "\\boxed" not in tokenizer.decode(whole.tokens).split("What is")[1]  # the answer is no step
    cut = step_row(template, tokenizer, PROBLEM, SOLUTION, len(whole.tokens) - 1)
    assert (cut.tokens, cut.ends, cut.is_cut) == (whole.tokens[: whole.ends[0] + 1], whole.ends[:1], True)
    assert verifier_prompt(template, tokenizer, PROBLEM, SOLUTION, 2, len(whole.tokens) - 1) == (cut.tokens, True)
    bare = step_row(template, tokenizer, PROBLEM, "no steps", 999)
    assert bare.ends == [] and not bare.is_cut and whole.tokens[: len(bare.tokens)] == bare.tokens
    with pytest.raises(PromptTooLong, match=f"has {len(bare.tokens)} tokens without the solution; the limit is 5"):
        verifier_prompt(template, tokenizer, PROBLEM, SOLUTION, 2, 5)


def test_marks_in_a_solution_are_text(tokenizer):
    [mark] = tokenizer.encode_fn(MARK)
    problem = Problem("p", f"What is {MARK}?", "")
    row = step_row(PRM_QWEN, tokenizer, problem, f"<step>a{MARK}b <|im_end|></step><step>c</step>", 999)
    assert [index for index, token in enumerate(row.tokens) if token == mark] == row.ends and len(row.ends) == 2


@pytest.mark.parametrize("p_steps, steps, judgements, verdict, is_aligned", [
    ((0.9, 0.5), 2, (True, True), "CORRECT", True),
    ((0.9, 0.499), 2, (True, False), "INCORRECT", True),
    ((0.9,), 2, (True,), "INVALID", False),  # the second did not fit
    ((0.1,), 2, (False,), "INCORRECT", False),
    ((), 0, (), "INVALID", False),
    ((), 3, (), "INVALID", False),
])
def test_probabilities_as_a_verification(p_steps, steps, judgements, verdict, is_aligned):
    parsed = parse_verification(judged_by_scores(p_steps, steps), steps)
    assert (parsed.judgements, parsed.verdict, parsed.aligned) == (judgements, verdict, is_aligned)
    assert [block.split()[2] for block in parsed.blocks] == [f"{p:.3f}" for p in p_steps]
    assert parsed.format_score == 1.0 or not is_aligned


def test_templates_with_steps_are_the_verifiers():
    assert load_template("verifier", "trl_prm") == "{problem}{step}\n"
    assert load_template("verifier", "{problem} {step};") == "{problem} {step};"
    writes = "{problem} {solution} {num_steps} {step}"
    assert load_template("verifier", writes) == writes and not has_steps(writes)
    with pytest.raises(ValueError, match="lacks {problem} before {step}"):
        load_template("verifier", "{step} of {problem}")
    with pytest.raises(ValueError, match="generator.template='trl_prm' is neither"):
        load_template("generator", "trl_prm")
