"""Whether there is a prompt at all that a model may be given: sets and opened models in, an error or nothing out.

A single problem that is too long counts as answered wrong. Where every one is, a limit is mistaken and the table would
be zeros. Stage: before weights are read.
"""

from collections.abc import Iterable

from tango_jax.evaluation.sets import JudgeSet, SolveSet
from tango_jax.records import Problem
from tango_jax.sampling.checkpoint_sampler import Speaker
from tango_jax.text.templates import generator_prompt, verifier_prompt

_NO_LIMIT = 1 << 30


def check_room(sets: Iterable[SolveSet | JudgeSet], opened: dict[str, Speaker], are_solutions_judged: bool) -> None:
    """Raises ValueError where not one problem of a set is within the limit of a role that gets to see it."""
    solving = ("generator", "verifier") if are_solutions_judged else ("generator",)
    for one in sets:
        is_solved = isinstance(one, SolveSet)
        problems = [problem for _, problem in one.problems] if is_solved else [c.solution.problem for c in one.claims]
        for role in solving if is_solved else ("verifier",):
            speaker, shortest = opened[role], _NO_LIMIT
            for problem in problems:  # the first is likely to do
                shortest = min(shortest, _num_tokens(role, speaker, problem))
                if shortest <= speaker.max_prompt:
                    break
            else:
                flag = {"generator": "--max_prompt", "verifier": "--verifier_max_prompt"}[role]
                raise ValueError(f"{flag}={speaker.max_prompt} is too short for every problem of {one.name}: "
                                 f"the shortest makes a prompt of {shortest} tokens; raise it to that at least")


def _num_tokens(role: str, speaker: Speaker, problem: Problem) -> int:
    """Tokens of a problem's prompt; a verifier's, of the shortest solution there is."""
    if role == "generator":
        return len(generator_prompt(speaker.template, speaker.source.tokenizer, problem))
    return len(verifier_prompt(speaker.template, speaker.source.tokenizer, problem, "", 1, _NO_LIMIT)[0])
