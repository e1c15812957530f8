"""Mutated model outputs through the parsers, and their step spans through the mapping to sampled tokens."""

import itertools
import random
from types import SimpleNamespace

from tango_jax.grading import parse_solution, parse_verification
from tango_jax.method.texts import make_solution
from tango_jax.records import Problem
from tango_jax.text.tokenizer import Tokenizer
from torture.outcome import Outcome

SOLUTIONS = (
    "<think>\n<step>Let x be 5.</step>\n<step>Then 2x = 10.</step>\n</think>\n<answer>\\boxed{\\frac{1}{2}}</answer>",
    "<think><step>设 x=1，则 y≥2。</step><step>é🙂</step><step>so</step></think><answer>\\boxed{'}'}</answer>",
    "<think><step>a</step></think><answer>\\boxed{7}</answer><answer>\\boxed{8}</answer>",
)
VERIFICATIONS = (
    "<step_verification>\n<step>Right: 2·5 is 10. \\boxed{CORRECT}</step>\n<step>No. \\boxed{INCORRECT}</step>\n"
    "</step_verification>\n<final_verification>\\boxed{INCORRECT}</final_verification>",
    "<step_verification><step>\\box{correct}.</step></step_verification><final_verification>\n\\boxed{CORRECT}\n"
    "</final_verification>",
)
SPLICES = tuple(piece.encode("utf-8", "surrogatepass") for piece in (
    "<step>", "</step>", "<think>", "</think>", "<answer>", "</answer>", "<step_verification>", "</step_verification>",
    "<final_verification>", "</final_verification>", "\\boxed{", "\\box{", "}", "{", "\\", "'", '"', "CORRECT}", "</",
    "INCORRECT}", "<", ">", "\n", " ", ".", "\x00", "é", "🙂", "\ud83d", "\u2028", "İ", "ß", "<STEP>", "<step >", "5'",
)) + (b"\xf0\x9f", b"\xe8", b"\xff", b"\x80")
VERDICTS = ("CORRECT", "INCORRECT", "INVALID")
MAX_SHOWN = 200  # failures that are described
# All that the mapping needs of a task, and of a problem nothing.
TASK = SimpleNamespace(min_steps=3, gold_steps=None)
PROBLEM = Problem(id="0", question="", answer="7")


def mutated_outputs(count: int = 1_000_000, seed: int = 0) -> Outcome:
    """Mutate, cut into tokens, decode, parse and map `count` outputs, alternately of a generator and of a verifier.

    Every one goes through all of it. An output survives if nothing raises and all that `check` asks for holds.
    """
    rng = random.Random(seed)
    failures, num_failed = [], 0
    for index in range(count):
        raw = mutate(rng, rng.choice(SOLUTIONS if index % 2 == 0 else VERIFICATIONS).encode())
        try:
            broken = check(raw, cut(rng, raw), num_steps=index % 4)
        except Exception as error:  # whatever it is, it is what this looks for
            broken = f"{type(error).__name__}: {error}"
        if broken:
            num_failed += 1
            if len(failures) < MAX_SHOWN:
                failures.append(f"output {index} of seed {seed}: {broken}: {raw!r}")
    return Outcome(count, count - num_failed, failures)


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """One to six deletions, copies, splices, swaps, changed bytes and cuts."""
    for _ in range(rng.randrange(1, 7)):
        start = int(rng.random() * (len(raw) + 1))
        end = start + int(rng.random() * 24)
        kind = int(rng.random() * 8)
        if kind == 0:
            raw = raw[:start] + raw[end:]
        elif kind == 1:
            raw = raw[:end] + raw[start:]
        elif kind == 2:
            raw = raw[:start] + raw[start:end] * 3 + raw[end:]
        elif kind == 3:
            raw = raw[:start] + bytes([int(rng.random() * 256)]) + raw[start + 1 :]
        elif kind == 4 and rng.random() < 0.3:
            raw = raw[:start]
        else:
            raw = raw[:start] + rng.choice(SPLICES) + raw[start:]
    return raw


def cut(rng: random.Random, raw: bytes) -> tuple[bytes, ...]:
    """The bytes as tokens of none to nine bytes, which may end inside of a character."""
    edges = list(itertools.accumulate(rng.choices(range(10), k=len(raw) // 4 + 2), initial=0))
    return tuple(raw[start:end] for start, end in itertools.pairwise([*edges, max(len(raw), edges[-1])]))


def check(raw: bytes, pieces: tuple[bytes, ...], num_steps: int) -> str:
    """What does not hold of an output that was sampled as these tokens; empty if all does."""
    tokenizer = Tokenizer(encode_fn=list, token_bytes=pieces, bos_ids=(), stop_ids=())
    text, ends = tokenizer.decode_with_ends(range(len(pieces)))
    if text != raw.decode("utf-8", "replace"):
        return "the text depends on where tokens end"
    if len(ends) != len(pieces) or ends[-1] != len(text) or any(a > b for a, b in itertools.pairwise(ends)):
        return "token ends do not ascend to the length of the text"
    return check_solution(text, ends) or check_verification(text, num_steps)


def check_solution(text: str, ends: list[int]) -> str:
    parsed = parse_solution(text)
    last = 0
    for (start, end), step in zip(parsed.step_spans, parsed.steps, strict=True):
        if not last <= start < end <= len(text) or text[start:end] != f"<step>{step}</step>" or "</step>" in step:
            return f"step {start}:{end} is none, or before {last}"
        last = end
    if not 0.0 <= parsed.format_score <= 1.0:
        return f"format score {parsed.format_score}"
    block = "" if parsed.answer is None else text.split("<answer>", 1)[1].split("</answer>")[0]
    block = "" if parsed.answer is None else text.split("<answer>", 1)[1].split("</answer>")[0]
    if parsed.answer is not None and f"\\boxed{{{parsed.answer}}}" not in block:
        return f"the answer {parsed.answer!r} is not in the first answer block"
    solution = make_solution(TASK, PROBLEM, text, ends, is_correct=False)
    for token, (_, end) in zip(solution.step_ends, parsed.step_spans, strict=True):
        # The token completes the last character of the step, and the one before it did not.
        if not 0 <= token < len(ends) or not (ends[token - 1] if token else 0) < end <= ends[token]:
            return f"token {token} does not hold the end of the step at {end}"
    return ""


def check_verification(text: str, num_steps: int) -> str:
    parsed = parse_verification(text, num_steps, generator_format_score=1.0)
    if len(parsed.judgements) != len(parsed.blocks) or not set(parsed.judgements) <= {True, False, None}:
        return f"judgements {parsed.judgements} of {len(parsed.blocks)} blocks"
    if parsed.verdict not in VERDICTS or not 0.0 <= parsed.format_score <= 1.0:
        return f"verdict {parsed.verdict}, format score {parsed.format_score}"
    if parsed.aligned != (0 < num_steps == len(parsed.judgements) and None not in parsed.judgements):
        return f"aligned is {parsed.aligned} with {parsed.judgements} for {num_steps} steps"
    return ""

