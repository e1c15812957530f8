"""What the roles are asked beside solving and judging: texts are put in literally, too long ones lose their end, and
the gold answer is in the teacher's prompt alone."""

import pytest

from support.letters import LETTERS
from tango_jax.records import Problem
from tango_jax.text.prompts import (
    INFORMED,
    JUDGE,
    PROMPTS,
    SECOND_JUDGEMENT,
    SECOND_TRY,
    SOLVE,
    Fields,
    Prompt,
    prompt_ids,
    solution_of,
    verification_of,
)
from tango_jax.text.templates import TEMPLATES, PromptTooLong

PROBLEM = Problem("p/1", "What is 1 + {text}?", "SECRET")
SOLUTION = solution_of(PROBLEM, "TRY {problem}", num_steps=2)
SAID = verification_of(PROBLEM, SOLUTION.text, "SAID {solution}", num_steps=2)
PARENTS = {SOLVE: PROBLEM, JUDGE: SOLUTION, SECOND_TRY: SAID, SECOND_JUDGEMENT: SAID, INFORMED: SOLUTION}


def asked(prompt: Prompt, kind: str, parent=None, limit: int = 10_000) -> tuple[str, bool]:
    """The text of a prompt in a template of this kind, and whether its end was cut off."""
    ids, is_cut = prompt_ids(prompt, TEMPLATES[prompt.role, kind], LETTERS, parent or PARENTS[prompt], limit)
    assert len(ids) <= limit
    return LETTERS.read(ids), is_cut


@pytest.mark.parametrize("prompt, text", [
    (SOLVE, "What is 1 + {text}?\n"), (JUDGE, "What is 1 + {text}?\nTRY {problem}\n2\n"),
    (SECOND_TRY, "What is 1 + {text}?\nTRY {problem}\nSAID {solution}\n"),
    (SECOND_JUDGEMENT, "What is 1 + {text}?\nTRY {problem}\nSAID {solution}\n2\n"),
    (INFORMED, "What is 1 + {text}?\nSECRET\nTRY {problem}\n2\n")], ids=lambda one: getattr(one, "name", ""))
def test_plain_templates_hold_the_texts_and_nothing_else(prompt, text):
    assert asked(prompt, "plain") == (text, False)


@pytest.mark.parametrize("kind", ["plain", "math"])
def test_only_the_teacher_sees_the_answer(kind):
    """It is in no prompt of which anything is sampled."""
    assert PARENTS.keys() == set(PROMPTS.values())
    assert {prompt.name for prompt in PARENTS if "SECRET" in asked(prompt, kind)[0]} == {"informed"}


def test_a_template_in_words_has_them_in_words():
    second = asked(SECOND_TRY, "math")[0]
    assert "\nProblem:\nWhat is 1 + {text}?\n\nAn earlier solution, and what a verifier said of it:\n" in second
    assert "of it:\nTRY {problem}\nSAID {solution}\n\nSolve the problem once more, without the mistakes" in second
    again = asked(SECOND_JUDGEMENT, "math")[0]
    assert "Judge the remarks of the verification in order, each as a step, and then whether its verdict" in again
    assert "\nSolution in 2 steps:\nTRY {problem}\nSAID {solution}\n" in again
    assert "What is 1 + {text}?\n\nThe right answer, by which to judge, is SECRET.\n" in asked(INFORMED, "math")[0]


def test_a_text_that_is_too_long_loses_its_end():
    whole = asked(SECOND_TRY, "plain")[0]
    bare = len(LETTERS.encode_prompt("What is 1 + {text}?\n\n"))
    text = "TRY {problem}\nSAID {solution}"
    for kept in range(len(text) + 1):
        cut = (f"What is 1 + {{text}}?\n{text[:kept]}\n", kept < len(text))
        assert asked(SECOND_TRY, "plain", limit=bare + kept) == cut
    assert cut[0] == whole


@pytest.mark.parametrize("kind", ["plain", "math"])
def test_without_room_for_its_wording_a_second_try_is_asked_like_the_first(kind):
    alone = asked(SOLVE, kind)[0]
    limit = len(LETTERS.encode_prompt(alone))
    assert asked(SECOND_TRY, kind, limit=limit) == (alone, True)
    for prompt, parent in ((SECOND_TRY, SAID), (SOLVE, PROBLEM)):
        with pytest.raises(PromptTooLong, match=rf"^the generator's prompt for problem p/1 has {limit} tokens; the "
                                                rf"limit is {limit - 1}: raise generator\.max_prompt or filter the "
                                                "problem$"):
            asked(prompt, kind, parent, limit - 1)


def test_a_prompt_of_a_user_is_any_fields_of_any_parent():
    """Two solutions of a problem, which the verifier compares."""
    def fields(pair, is_plain: bool) -> Fields:
        return Fields(pair[0].problem.question + " Which?", "\n".join(one.text for one in pair), 2)

    compare, pair = Prompt("compare", "verifier", fields), (SOLUTION, solution_of(PROBLEM, "OTHER"))
    assert asked(compare, "plain", pair) == ("What is 1 + {text}? Which?\nTRY {problem}\nOTHER\n2\n", False)
    bare = len(LETTERS.encode_prompt("What is 1 + {text}? Which?\n\n2\n"))
    assert asked(compare, "plain", pair, bare + 3) == ("What is 1 + {text}? Which?\nTRY\n2\n", True)
    with pytest.raises(PromptTooLong, match=r"^the verifier's prompt for problem p/1 has .* without the solution; "):
        asked(compare, "plain", pair, bare - 1)
