"""The parsers on random and on huge texts: equal to plain patterns where those are fast enough, and never an error."""
import random
import re

import pytest

from tango_jax.grading import parse_solution, parse_verification

PIECES = [
    "<step>", "</step>", "<answer>", "</answer>", "<step_verification>", "</step_verification>",
    "<final_verification>", "</final_verification>", r"\boxed{", r"\box{", "CORRECT}", "INCORRECT}", "{", "}", "\\",
    "\n", " ", ".", "x", "é", "\ud83d", "\x00", "</", "<", ">",
]


def naive_last_boxed(text: str) -> str | None:
    """Independent, quadratic: the balanced box that starts last."""
    for match in reversed(list(re.finditer(r"\\boxed\{", text))):
        depth, index = 1, match.end()
        while index < len(text) and depth:
            if text[index] == "\\" and not text.startswith(r"\boxed{", index + 1):
                index += 2
                continue
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            index += 1
        if depth == 0:
            return text[match.end() : index - 1]
    return None


def test_noise_gives_what_plain_patterns_give():
    rng = random.Random(0)
    with_steps = with_box = with_verdict = 0
    for _ in range(3000):
        text = "".join(rng.choices(PIECES, k=rng.randrange(40)))
        solved = parse_solution(text)
        assert solved.step_spans == tuple(match.span() for match in re.finditer(r"<step>.*?</step>", text, re.DOTALL))
        block = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
        # An escaped brace before the box is the one thing the plain search reads differently.
        if block is None or "\\\\" not in block[1]:
            assert solved.answer == (block and naive_last_boxed(block[1]))
        assert 0.0 <= solved.format_score <= 1.0

        checked = parse_verification(text, num_steps=1)
        section = re.search(r"<step_verification>(.*?)</step_verification>", text, re.DOTALL)
        blocks = re.findall(r"<step>(.*?)</step>", section[1], re.DOTALL) if section else []
        assert checked.blocks == tuple(blocks)
        boxes = [re.search(r"\\box(?:ed)?\{(IN)?CORRECT\}\.?\s*\Z", inside) for inside in blocks]
        assert checked.judgements == tuple(box and box[1] is None for box in boxes)
        assert 0.0 <= checked.format_score <= 1.0
        with_steps += bool(solved.step_spans)
        with_box += solved.answer is not None
        with_verdict += bool(checked.blocks)
    assert min(with_steps, with_box, with_verdict) >= 10  # the noise reached what it compares


@pytest.mark.parametrize("piece", [
    "<step>", "</step>", "<answer>", "<step_verification>", "<final_verification>", r"\boxed{", "{", "}", "\\", " ",
    "<step>\n", "<final_verification> ", r"\boxed{CORRECT} ", r"\boxed{\boxed{}}", "<",
])
def test_a_megabyte_of_anything_is_one_pass(piece):
    # Quadratic patterns need hours for these: this test would never end.
    noise = piece * (1_000_000 // len(piece))
    for text in (noise, f"<answer>{noise}</answer>", f"<step_verification>{noise}</step_verification>"):
        assert parse_solution(text).format_score <= 1.0
        assert parse_verification(text, num_steps=3).verdict == "INVALID"


def test_ten_thousand_nested_boxes():
    text = "<answer>" + r"\boxed{" * 10_000 + "5" + "}" * 10_000 + "</answer>"
    assert parse_solution(text).answer == "5"
