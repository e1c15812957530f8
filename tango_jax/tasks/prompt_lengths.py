"""Length checks: which problems and examples fit the limits of both roles."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.records import Problem
from tango_jax.tasks.task import SftExample
from tango_jax.text.mark_rows import without_remarks
from tango_jax.text.prompts import INFORMED, SECOND_JUDGEMENT, Prompt, prompt_ids, solution_of, verification_of
from tango_jax.text.templates import MANY_STEPS, generator_prompt, load_template, verifier_prompt
from tango_jax.text.tokenizer import Tokenizer

_NO_LIMIT = 1 << 30
_EMPTY = Problem("", "", "")
# Spare tokens: a mistake carried through a solution may lengthen some of its numbers, another one in each epoch.
_SPARE = 64
# A byte is at most one token, and NFC makes at most three bytes of one.
_TOKENS_PER_BYTE = 3


class Over(NamedTuple):
    """Tokens by which a stage-1 example exceeds each limit; 0 or less: it fits."""

    prompt: int = 0  # the prompt with the problem alone, for either role
    response: int = 0  # the text to imitate, alone or in its row after the prompt
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
    config: ConfigDict, tokenizers: dict[str, Tokenizer], further: Sequence[Prompt] = (), has_remarks: bool = True
) -> Callable[[str, SftExample], Over]:
    """over_fn(role, example): tokens by which a stage-1 example exceeds each limit. Responses count for roles with a
    stage 1, also one of another run (`init_from`), which held out the same rows. `has_remarks`: see `make_task`."""
    num_tokens = make_num_tokens(config, tokenizers, further)
    templates = {role: load_template(role, config[role].template) for role in ROLES}

    def response_over(role: str, response: str, prompt: Sequence[int]) -> int:
        own = config[role]
        if not own.sft.steps:
            return 0
        spare = _SPARE if role == "verifier" and has_remarks and config.task.stage_one == "gsm8k" else 0
        tokens = len(tokenizers[role].encode_response(response)) + spare
        over_row = len(prompt) + tokens - own.sft.pack_length if own.sft.pack_length else 0
        return max(tokens - own.max_response, over_row)

    def over(role: str, example: SftExample) -> Over:
        problem, solution, num_steps, response = example[:4]
        of_problem = num_tokens(problem) - config.generator.max_prompt
        if role == "generator":
            prompt = generator_prompt(templates[role], tokenizers[role], problem)
            return Over(of_problem, response_over(role, response, prompt))
        prompt, _ = verifier_prompt(templates[role], tokenizers[role], problem, solution, num_steps, _NO_LIMIT)
        imitated = response if has_remarks else without_remarks(response)
        return Over(of_problem, response_over(role, imitated, prompt), len(prompt) - config.verifier.max_prompt)

    return over
