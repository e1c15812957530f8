"""Length checks: which problems and examples fit the limits of both roles.

Takes the config and the tokenizer of each role; returns functions that count tokens. Stage of the loop: once, at the
start of a run, before a problem set is split and shuffled.
"""

from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.records import Problem
from tango_jax.tasks.task import SftExample
from tango_jax.text.templates import MANY_STEPS, generator_prompt, load_template, verifier_prompt
from tango_jax.text.tokenizer import Tokenizer

_NO_LIMIT = 1 << 30
_EMPTY = Problem("", "", "")
# Spare tokens, because a mistake that is carried through a solution may lengthen some of its numbers.
_SPARE = 64
# A byte is at most one token, and Unicode's normalization NFC makes at most three bytes of one.
_TOKENS_PER_BYTE = 3


class Over(NamedTuple):
    """The number of tokens by which a stage-1 example is over each limit; 0 or less means within the limit."""

    prompt: int = 0  # the prompt with the problem alone, for either role
    response: int = 0  # the text to imitate
    solution: int = 0  # the verifier's prompt with the whole solution


def make_num_tokens(config: ConfigDict, tokenizers: dict[str, Tokenizer]) -> Callable[[Problem], int]:
    """Return num_tokens_fn(problem): tokens of the generator's prompt, to be compared with generator.max_prompt.

    If the verifier's prompt is too long even with an empty solution, the problem counts as too long by that excess.
    """
    templates = {role: load_template(role, config[role].template) for role in tokenizers}
    limit, verifier_limit = config.generator.max_prompt, config.verifier.max_prompt

    def verifier_tokens(problem: Problem) -> int:
        return len(
            verifier_prompt(templates["verifier"], tokenizers["verifier"], problem, "", MANY_STEPS, _NO_LIMIT)[0]
        )

    empty = verifier_tokens(_EMPTY)

    def num_tokens(problem: Problem) -> int:
        count = len(generator_prompt(templates["generator"], tokenizers["generator"], problem))
        # Most problems are so short that their tokens need not be counted.
        if empty + _TOKENS_PER_BYTE * len(problem.question.encode()) + _SPARE > verifier_limit:
            over = verifier_tokens(problem) - verifier_limit
            return max(count, limit + over) if over > 0 else count
        return count

    return num_tokens


def make_over(config: ConfigDict, tokenizers: dict[str, Tokenizer]) -> Callable[[str, SftExample], Over]:
    """Return over_fn(role, example): by how many tokens a stage-1 example of a role is over each limit."""
    num_tokens = make_num_tokens(config, tokenizers)
    template = load_template("verifier", config.verifier.template)

    def over(role: str, example: SftExample) -> Over:
        spare = _SPARE if role == "verifier" else 0
        tokens, limit = len(tokenizers[role].encode_response(example.response)) + spare, config[role].max_response
        if config[role].sft.pack_length:
            limit = min(limit, config[role].sft.pack_length - config[role].max_prompt)
        too_much = Over(num_tokens(example.problem) - config.generator.max_prompt, tokens - limit)
        if role == "generator":
            return too_much
        problem, solution, num_steps, _ = example
        prompt, _ = verifier_prompt(template, tokenizers[role], problem, solution, num_steps, _NO_LIMIT)
        return too_much._replace(solution=len(prompt) - config.verifier.max_prompt)

    return over
