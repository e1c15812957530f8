"""Length checks: which problems and examples fit the limits of both roles."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.records import Problem
from tango_jax.tasks.task import SftExample
from tango_jax.text.prompts import INFORMED, SECOND_JUDGEMENT, Prompt, prompt_ids, solution_of, verification_of
from tango_jax.text.templates import MANY_STEPS, generator_prompt, load_template, verifier_prompt
from tango_jax.text.tokenizer import Tokenizer

_NO_LIMIT = 1 << 30
_EMPTY = Problem("", "", "")
# Spare tokens: a mistake carried through a solution may lengthen some of its numbers.
_SPARE = 64
# A byte is at most one token, and NFC makes at most three bytes of one.
_TOKENS_PER_BYTE = 3


class Over(NamedTuple):
    """Tokens by which a stage-1 example exceeds each limit; 0 or less: it fits."""

    prompt: int = 0  # the prompt with the problem alone, for either role
    response: int = 0  # the text to imitate
    solution: int = 0  # the verifier's prompt with the whole solution


def make_num_tokens(
    config: ConfigDict, tokenizers: dict[str, Tokenizer], further: Sequence[Prompt] = ()
) -> Callable[[Problem], int]:
    """num_tokens_fn(problem): tokens of the generator's prompt, or more by the verifier's excess with an empty
    solution."""
    limit, verifier_limit = config.generator.max_prompt, config.verifier.max_prompt
    generator_tokens, verifier_tokens = _make_counts(config, tokenizers, further).values()
    empty = verifier_tokens(_EMPTY)

    def num_tokens(problem: Problem) -> int:
        count = generator_tokens(problem)
        # Most problems are so short that nothing need be counted.
        if empty + _TOKENS_PER_BYTE * len(f"{problem.question}{problem.answer}".encode()) + _SPARE > verifier_limit:
            over = verifier_tokens(problem) - verifier_limit
            return max(count, limit + over) if over > 0 else count
        return count

    return num_tokens


def _make_counts(
    config: ConfigDict, tokenizers: dict[str, Tokenizer], further: Sequence[Prompt]
) -> dict[str, Callable[[Problem], int]]:
    """By role, tokens of the longest prompt; the verifier's without a solution. Users' prompts are not counted."""
    templates = {role: load_template(role, config[role].template) for role in ROLES}

    def generator_tokens(problem: Problem) -> int:
        return len(generator_prompt(templates["generator"], tokenizers["generator"], problem))

    def verifier_tokens(problem: Problem) -> int:
        template, tokenizer = templates["verifier"], tokenizers["verifier"]
        own, _ = verifier_prompt(template, tokenizer, problem, "", MANY_STEPS, _NO_LIMIT)
        about = {INFORMED: solution_of(problem, "", MANY_STEPS),
                 SECOND_JUDGEMENT: verification_of(problem, "", "", MANY_STEPS)}
        others = (prompt_ids(prompt, template, tokenizer, about[prompt], _NO_LIMIT)[0]
                  for prompt in further if prompt in about)
        return max(len(ids) for ids in (own, *others))

    return {"generator": generator_tokens, "verifier": verifier_tokens}


def check_lengths(
    config: ConfigDict, tokenizers: dict[str, Tokenizer], problems: Iterable[Problem], source: str,
    has_ids: bool = True, further: Sequence[Prompt] = (),
) -> None:
    """Raise ValueError if a prompt exceeds a role's limit. `source`: the setting that makes the problems; `has_ids`:
    the message may name a problem by its id."""
    num_tokens_fn, limit = make_num_tokens(config, tokenizers, further), config.generator.max_prompt
    over = [problem for problem in problems if num_tokens_fn(problem) > limit]
    if not over:
        return
    parts = []
    for role, count_fn in _make_counts(config, tokenizers, further).items():
        count, longest = max(((count_fn(problem), problem) for problem in over), key=lambda pair: pair[0])
        if count > config[role].max_prompt:
            without = " without the solution" if role == "verifier" else ""
            name = f" (problem {longest.id})" if has_ids else ""
            parts.append(f"the {role}'s longest prompt has at least {count} tokens{without}{name}, more than "
                         f"{role}.max_prompt={config[role].max_prompt}")
    raise ValueError(f"{source}: {'; '.join(parts)}: raise the limits or shorten the problems")


def make_over(
    config: ConfigDict, tokenizers: dict[str, Tokenizer], further: Sequence[Prompt] = ()
) -> Callable[[str, SftExample], Over]:
    """over_fn(role, example): tokens by which a stage-1 example exceeds each limit."""
    num_tokens = make_num_tokens(config, tokenizers, further)
    template = load_template("verifier", config.verifier.template)

    def over(role: str, example: SftExample) -> Over:
        spare = _SPARE if role == "verifier" else 0
        tokens, limit = len(tokenizers[role].encode_response(example.response)) + spare, config[role].max_response
        if config[role].sft.pack_length:
            limit = min(limit, config[role].sft.pack_length - config[role].max_prompt)
        too_much = Over(num_tokens(example.problem) - config.generator.max_prompt, tokens - limit)
        if role == "generator":
            return too_much
        problem, solution, num_steps = example[:3]
        prompt, _ = verifier_prompt(template, tokenizers[role], problem, solution, num_steps, _NO_LIMIT)
        return too_much._replace(solution=len(prompt) - config.verifier.max_prompt)

    return over
