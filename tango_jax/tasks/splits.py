"""Problems parted into those that are trained on and those that are measured on, and the order of the former.

Stage of the loop: before the first turn. Training reads `make_problem_order(...)(cursor)`, so that the data cursor is
one integer, the number of problems seen since the start: a checkpoint that holds it restores the order exactly.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grain
import numpy as np

from tango_jax.data.problem_sets import question_key
from tango_jax.records import Problem
from tango_jax.runtime.rng import MAX_SEED
from tango_jax.tasks.prompt_lengths import Over

_VALIDATION_STREAM = 1


class ProblemSplit(NamedTuple):
    """What remains for training and for validation."""

    train: tuple[Problem, ...]
    validation: tuple[Problem, ...]
    num_too_long: int
    longest_prompt: int  # tokens, of all prompts, those left out included
    num_shortened: int = 0  # stage-1 examples among them whose solution the verifier's prompt would have cut off

    def describe(self) -> str:
        """One line for the start of a run."""
        return (
            f"{len(self.train)} training and {len(self.validation)} validation problems; {self.num_too_long} left out "
            f"for their length, the longest prompt has {self.longest_prompt} tokens"
        )


def draw_questions(problems: Sequence[Problem], count: int, seed: int) -> frozenset[str]:
    """`question_key` of whole questions, drawn by `seed`: as many as hold at least `count` of the problems.

    A question that stands in several rows is set aside with all of them, or its answer would be known from the others.
    """
    sizes = Counter(question_key(problem.question) for problem in problems)
    questions, drawn, held = list(sizes), [], 0
    for place in np.random.default_rng((seed, _VALIDATION_STREAM)).permutation(len(questions)):
        if held >= count:
            break
        drawn.append(questions[place])
        held += sizes[questions[place]]
    return frozenset(drawn)


def split_problems(
    problems: Sequence[Problem],
    num_tokens_fn: Callable[[Problem], int],
    max_tokens: int,
    num_validation: int,
    batch_size: int,
    seed: int,
    validation: frozenset[str] | None = None,
) -> ProblemSplit:
    """Set validation problems aside and drop those of both parts whose prompt is over `max_tokens`.

    The validation problems are drawn by `seed` (`draw_questions`) before the filter, so that another limit or tokenizer
    never moves a problem from one part to the other; or they are those of the questions in `validation`.

    Raises:
        ValueError: fewer than `batch_size` training problems remain, or no validation problem although some are asked.
    """
    if validation is None:
        validation = draw_questions(problems, num_validation, seed)
    lengths = np.array([num_tokens_fn(problem) for problem in problems])
    is_validation = np.array([question_key(problem.question) in validation for problem in problems], bool)
    fits = lengths <= max_tokens
    train, validation = (
        tuple(problems[index] for index in np.flatnonzero(fits & chosen)) for chosen in (~is_validation, is_validation)
    )
    split = ProblemSplit(train, validation, int((~fits).sum()), int(lengths.max(initial=0)))
    if len(train) < batch_size or len(validation) < min(num_validation, 1):
        needed = _limit_for((lengths[~is_validation], batch_size), (lengths[is_validation], min(num_validation, 1)))
        by = "" if needed is None else f" by {needed - max_tokens} tokens"
        raise ValueError(
            f"too few problems: {split.describe()}; a batch takes {batch_size}, the limit is {max_tokens} tokens, and "
            f"{num_validation} are for validation: raise the limit{by} (max_prompt of the role whose prompt is too "
            f"long), lower the others or give more than {len(problems)}"
        )
    return split


def _limit_for(*parts: tuple[np.ndarray, int]) -> int | None:
    """The smallest limit that leaves `count` problems of the lengths in each part; None where there are not as many."""
    if any(len(lengths) < count for lengths, count in parts):
        return None
    return max(int(np.sort(lengths)[count - 1]) for lengths, count in parts if count)


def split_examples(
    problems: Sequence[Problem],
    over_fn: Callable[[Problem], Over],
    num_heldout: int,
    seed: int,
    heldout: Sequence[Problem] = (),
) -> ProblemSplit:
    """The same for stage-1 examples: `over_fn` says how far one is over each limit; over none, and it stays.

    Where there are `heldout` problems, with questions of their own, they are the ones set aside.

    Raises:
        ValueError: too few remain.
    """
    over = {problem.id: over_fn(problem) for problem in (*problems, *heldout)}
    fitting = sum(max(tokens) <= 0 for tokens in over.values())
    wanted = 1 if heldout else num_heldout
    if fitting <= wanted:
        raise ValueError(
            f"stage 1: {fitting} of {len(over)} examples are within the limits, the others up to "
            f"{max(map(max, over.values()), default=0)} tokens over one, and {wanted} are to be held out: raise "
            "max_prompt, max_response or sft.pack_length, lower task.validation, or give more"
        )
    validation = frozenset(question_key(problem.question) for problem in heldout) or None
    split = split_problems(
        [*problems, *heldout], lambda problem: max(over[problem.id]), 0, wanted, 1, seed, validation
    )
    return split._replace(num_shortened=sum(tokens.solution > 0 for tokens in over.values()))


def make_problem_order(problems: Sequence[Problem], seed: int) -> Callable[[int], Problem]:
    """problem_fn(cursor): problem number `cursor` since the start of training, in any order of calls.

    Each epoch, of len(problems) cursors, holds every problem once, shuffled anew by (seed, epoch).

    Raises:
        ValueError: no problems, or a seed that is not in 0 .. 2**32 - 1.
    """
    if not problems or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"{len(problems)} problems with seed={seed}; there must be one, and a seed in 0 .. {MAX_SEED}")
    # grain computes each place of its permutation directly: nothing is stored, at any number of problems or epochs.
    order = grain.MapDataset.range(len(problems)).seed(seed).shuffle().repeat()

    def problem_fn(cursor: int) -> Problem:
        assert cursor >= 0, cursor
        return problems[order[cursor]]

    return problem_fn
