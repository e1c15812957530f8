"""Whether a set has any prompt that fits its model: sets and opened checkpoints in; an error, or nothing, out.

Takes sets and opened models; raises an error or returns nothing. Stage of the loop: before weights are read. A single
problem that is too long counts as wrong. If all of them are too long, a limit is mistaken and the table would be zeros.
"""

from collections.abc import Iterable

from tango_jax.evaluation.sets import EvalSet, SolveSet
from tango_jax.records import Problem
from tango_jax.sampling.checkpoint_sampler import CheckpointSampler
from tango_jax.text.templates import generator_prompt, verifier_prompt

_NO_LIMIT = 1 << 30


def check_prompt_lengths(
    sets: Iterable[EvalSet], samplers: dict[str, CheckpointSampler], are_solutions_judged: bool
) -> None:
    """Raises ValueError where not one problem of a set is within the limit of a role that gets to see it."""
    solving = ("generator", "verifier") if are_solutions_judged else ("generator",)
    for eval_set in sets:
        if isinstance(eval_set, SolveSet):
            roles, problems = solving, [problem for _, problem in eval_set.problems]
        else:
            roles, problems = ("verifier",), [claim.solution.problem for claim in eval_set.claims]
        for role in roles:
            sampler, shortest = samplers[role], _NO_LIMIT
            for problem in problems:  # the first is likely to do
                shortest = min(shortest, _num_tokens(role, sampler, problem))
                if shortest <= sampler.max_prompt:
                    break
            else:
                flag = {"generator": "--max_prompt", "verifier": "--verifier_max_prompt"}[role]
                raise ValueError(f"{flag}={sampler.max_prompt} is too short for every problem of {eval_set.name}: "
                                 f"the shortest makes a prompt of {shortest} tokens; raise it to that at least")


def _num_tokens(role: str, sampler: CheckpointSampler, problem: Problem) -> int:
    """Tokens of a problem's prompt; a verifier's, of the shortest solution there is."""
    if role == "generator":
        return len(generator_prompt(sampler.template, sampler.tokenizer, problem))
    return len(verifier_prompt(sampler.template, sampler.tokenizer, problem, "", 1, _NO_LIMIT)[0])
