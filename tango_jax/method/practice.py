"""Which problems the verifier practises on (`rl.practice`).

It chooses those that the generator should get half right: where nearly all solutions are wrong, or right, one verdict
for all is the best answer. The published method takes all problems (`rl.practice=all`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from ml_collections import ConfigDict

from tango_jax.records import Problem, Solution

CANDIDATES = 4  # problems that are looked at for each that is taken
# Per turn, of the counts by size: about the last ten count. Sizes no longer drawn are forgotten, and tried again.
DECAY = 0.9


def candidates_of(rl: ConfigDict, role: str) -> int:
    """Problems looked at for each that a turn of this role takes, of whatever stream."""
    return CANDIDATES if rl.practice == "half_right" and role == "verifier" else 1


def half_right(problems: Sequence[Problem], count: int, passes: Mapping[str, Sequence[float]]) -> list[Problem]:
    """Keeps `count` problems whose expected share of right solutions is closest to a half, in their order.

    `passes`: {size, or else id: (right solutions, solutions)}. Unknown problems count as half right, and are tried.
    Candidates may go round a file; a second copy of a problem is kept only if different ones are too few.
    """
    first = {problem.id: place for place, problem in reversed(list(enumerate(problems)))}

    def rank(place: int) -> tuple[bool, float]:
        right, seen = passes.get(_key(problems[place]), (0.0, 0.0))
        return first[problems[place].id] != place, abs((right + 0.5) / (seen + 1.0) - 0.5)

    chosen = sorted(range(len(problems)), key=rank)[:count]  # stable: of equal ones the first
    return [problems[place] for place in sorted(chosen)]


def remembering(turn: Callable) -> Callable:
    @functools.wraps(turn)
    def turn_and_remember(t):
        lesson = turn(t)
        solutions = [one for responses in t.sampled if responses.role == "generator" for one in responses
                     if one.after is None]
        memory = lesson.memory or t.memory
        return dataclasses.replace(lesson, memory=memory.replace(passes=passes_after(memory.passes, solutions)))

    return turn_and_remember


def passes_after(
    passes: Mapping[str, Sequence[float]], solutions: Sequence[Solution]
) -> dict[str, tuple[float, float]]:
    new: dict[str, tuple[float, float]] = {}
    for solution in solutions:
        right, seen = new.get(_key(solution.problem), (0.0, 0.0))
        new[_key(solution.problem)] = (right + solution.is_right, seen + 1.0)
    sized = {_key(solution.problem) for solution in solutions if solution.problem.size}
    faded = {key: tuple(DECAY * number for number in counts) for key, counts in passes.items() if key.isdecimal()}
    for key in sized & faded.keys():
        new[key] = tuple(old + more for old, more in zip(faded[key], new[key], strict=True))
    return {**passes, **faded, **new}


def _key(problem: Problem) -> str:
    """Its size; problems from files have none: their id, whose newest count stands."""
    return str(problem.size) if problem.size else f"id {problem.id}"
