"""Which problems and examples fit the limits of both roles, by their own tokenizers and templates.

Stage of the loop: once, at start, before a problem set is parted and shuffled.
"""

from collections.abc import Callable

from ml_collections import ConfigDict

from tango_jax.data.tokenizer import Tokenizer
from tango_jax.prompts.templates import generator_prompt, load_template, verifier_prompt
from tango_jax.records import Problem

_NO_LIMIT = 1 << 30
_MANY_STEPS = 99
_EMPTY = Problem("", "", "")
# A mistake that is carried through a solution may add a digit here and there.
_SPARE = 64


def make_num_tokens(config: ConfigDict, tokenizers: dict[str, Tokenizer]) -> Callable[[Problem], int]:
    """num_tokens_fn(problem): tokens of the generator's prompt, to be compared with generator.max_prompt.

    A problem that the verifier cannot read, even with an empty solution, counts as too long by what is over there.
    """
    templates = {role: load_template(role, config[role].template) for role in tokenizers}
    limit, verifier_limit = config.generator.max_prompt, config.verifier.max_prompt

    def verifier_tokens(problem: Problem) -> int:
        return len(
            verifier_prompt(templates["verifier"], tokenizers["verifier"], problem, "", _MANY_STEPS, _NO_LIMIT)[0]
        )

    empty = verifier_tokens(_EMPTY)

    def num_tokens(problem: Problem) -> int:
        count = len(generator_prompt(templates["generator"], tokenizers["generator"], problem))
        # A byte is at most one token: most problems need not be counted.
        if empty + len(problem.question.encode()) + _SPARE > verifier_limit:
            over = verifier_tokens(problem) - verifier_limit
            return max(count, limit + over) if over > 0 else count
        return count

    return num_tokens


def make_tokens_over(config: ConfigDict, tokenizers: dict[str, Tokenizer]) -> Callable[[Problem, str, str], int]:
    """tokens_over_fn(problem, solution, verification): how far a stage-1 example is over a limit; at most 0: it fits.

    An empty text is not checked: nobody imitates it.
    """
    num_tokens = make_num_tokens(config, tokenizers)

    def tokens_over(problem: Problem, solution: str, verification: str) -> int:
        over = [num_tokens(problem) - config.generator.max_prompt]
        for role, text, spare in (("generator", solution, 0), ("verifier", verification, _SPARE)):
            if text:
                tokens = len(tokenizers[role].encode_response(text)) + spare
                room = config[role].sft.pack_length - config[role].max_prompt if config[role].sft.pack_length else 0
                over.append(tokens - min(config[role].max_response, room or config[role].max_response))
        return max(over)

    return tokens_over
