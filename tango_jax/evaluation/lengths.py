"""Check that each set has at least one prompt within the limits of the models.

Takes sets and opened models; raises an error or returns nothing. Stage of the loop: before weights are read. A single
problem that is too long counts as wrong. If all of them are too long, a limit is mistaken and the table would be zeros.
"""

from collections.abc import Iterable

from tango_jax.evaluation.sets import JudgeSet, SolveSet
from tango_jax.records import Problem
from tango_jax.sampling.checkpoint_sampler import Speaker
from tango_jax.text.templates import generator_prompt, verifier_prompt

_NO_LIMIT = 1 << 30


def check_room(sets: Iterable[SolveSet | JudgeSet], opened: dict[str, Speaker], are_solutions_judged: bool) -> None:
    """Raise ValueError if no problem of a set is within the limit of a role that receives it."""
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
    """Return the number of tokens in a problem's prompt; for a verifier, with the shortest possible solution."""
    if role == "generator":
        return len(generator_prompt(speaker.template, speaker.source.tokenizer, problem))
    return len(verifier_prompt(speaker.template, speaker.source.tokenizer, problem, "", 1, _NO_LIMIT)[0])
