"""Which problems the verifier practises on, as the generator gets better (`rl.practice`).

In: the next problems of the verifier's stream, and how often the generator was right on problems of each size; out:
those of which it should get half right, which teach a verifier most: where nearly all solutions are wrong, or right,
one verdict for all is the best answer. Stage: before the calls of a verifier's turn. This is an addition to the
published method, which takes all problems as they come (`rl.practice=all`).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from tango_jax.records import Counters, Problem, Solution

CANDIDATES = 4  # problems that are looked at for each that is taken
# Per turn, of the counts by size: about the last ten count. What is not asked any more is forgotten, and tried again.
DECAY = 0.9


def candidates_of(rl: ConfigDict, stream: str) -> int:
    """Problems that are looked at for each that a turn takes from a stream."""
    return CANDIDATES if rl.practice == "half_right" and stream == "verifier" else 1


def half_right(problems: Sequence[Problem], count: int, passes: Mapping[str, Sequence[float]]) -> list[Problem]:
    """The `count` problems whose expected share of right solutions is closest to a half, in their order.

    Args:
        passes: {size, or id of a problem without one: (right solutions, solutions)}. Half a solution of two is added to
            each, so that a problem of which nothing is known is expected to be right half the time, and is tried.
    """

    def distance(place: int) -> float:
        right, seen = passes.get(_key(problems[place]), (0.0, 0.0))
        return abs((right + 0.5) / (seen + 1.0) - 0.5)

    chosen = sorted(range(len(problems)), key=distance)[:count]  # stable: of equal ones the first
    return [problems[place] for place in sorted(chosen)]


def with_passes(counters: Counters, rl: ConfigDict, solutions: Sequence[Solution]) -> Counters:
    """The counters after a turn with these solutions."""
    if rl.practice != "half_right":
        return counters
    new: dict[str, tuple[float, float]] = {}
    for solution in solutions:
        right, seen = new.get(_key(solution.problem), (0.0, 0.0))
        new[_key(solution.problem)] = (right + solution.is_right, seen + 1.0)
    sized = {_key(solution.problem) for solution in solutions if solution.problem.size}
    faded = {key: tuple(DECAY * number for number in counts) for key, counts in counters.passes.items()
             if key.isdecimal()}  # fmt: skip
    for key in sized & faded.keys():
        new[key] = tuple(old + more for old, more in zip(faded[key], new[key], strict=True))
    return dataclasses.replace(counters, passes={**counters.passes, **faded, **new})


def _key(problem: Problem) -> str:
    """Its size; of problems from files, which have none, the id, whose newest count stands."""
    return str(problem.size) if problem.size else f"id {problem.id}"
