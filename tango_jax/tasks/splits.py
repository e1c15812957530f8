"""Training and validation splits, and the order in which training reads problems."""

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
    train: tuple[Problem, ...]
    validation: tuple[Problem, ...]
    num_too_long: int
    most_over: int  # tokens by which a prompt exceeds its role's limit, at most; 0 or less: all fit
    unfit: tuple[Problem, ...] = ()  # validation problems among those that are too long
    num_shortened: int = 0  # of those that are too long: stage-1 solutions that the verifier's prompt would cut off

    def describe(self) -> str:
        over = f", up to {self.most_over} tokens over a limit" if self.num_too_long else ""
        return (f"{len(self.train)} training and {len(self.validation)} validation problems; {self.num_too_long} left "
                f"out because of their length{over}")


def draw_questions(problems: Sequence[Problem], count: int, seed: int) -> frozenset[str]:
    """The `question_key` of questions with at least `count` problems. All rows of a question go together, or training
    would see its answer."""
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
    """Split off validation problems, then drop those of both parts whose prompt is over `max_tokens`.

    Validation problems have a question in `validation`, by default from `draw_questions`. They are drawn before the
    filter: another limit or tokenizer never moves a problem. Raises ValueError: too few problems remain.
    """
    if validation is None:
        validation = draw_questions(problems, num_validation, seed)
    lengths = np.array([num_tokens_fn(problem) for problem in problems])
    is_validation = np.array([question_key(problem.question) in validation for problem in problems], bool)
    fits = lengths <= max_tokens
    train, validation = (
        tuple(problems[index] for index in np.flatnonzero(fits & chosen)) for chosen in (~is_validation, is_validation)
    )
    unfit = tuple(problems[index] for index in np.flatnonzero(~fits & is_validation))
    most_over = int(lengths.max(initial=max_tokens)) - max_tokens
    split = ProblemSplit(train, validation, int((~fits).sum()), most_over, unfit)
    if len(train) < batch_size or len(validation) < min(num_validation, 1):
        needed = _limit_for((lengths[~is_validation], batch_size), (lengths[is_validation], min(num_validation, 1)))
        by = "" if needed is None else f" by {needed - max_tokens} tokens"
        raise ValueError(
            f"too few problems: {split.describe()}; a batch needs {batch_size}, the limit is {max_tokens} tokens, and "
            f"{num_validation} are for validation: raise the limit{by} (max_prompt of the role whose prompt is too "
            f"long), lower the other numbers, or give more than {len(problems)} problems"
        )
    return split


def _limit_for(*parts: tuple[np.ndarray, int]) -> int | None:
    """The smallest limit that leaves `count` problems in each part (lengths, count); None if one has fewer."""
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
    """Split stage-1 examples likewise, keeping those over no limit (`over_fn`). `heldout`: problems with other
    questions; if empty, they are drawn from `problems`. Raises ValueError: too few examples remain."""
    over = {problem.id: over_fn(problem) for problem in (*problems, *heldout)}
    fitting = sum(max(tokens) <= 0 for tokens in over.values())
    wanted = 1 if heldout else num_heldout
    if fitting <= wanted:
        raise ValueError(
            f"stage 1: {fitting} of {len(over)} examples are within the limits, the others are up to "
            f"{max(map(max, over.values()), default=0)} tokens too long, and {wanted} must be held out: raise "
            "max_prompt, max_response or sft.pack_length, lower task.validation, or give more examples"
        )
    validation = frozenset(question_key(problem.question) for problem in heldout) or None
    split = split_problems(
        [*problems, *heldout], lambda problem: max(over[problem.id]), 0, wanted, 1, seed, validation
    )
    return split._replace(num_shortened=sum(tokens.solution > 0 for tokens in over.values()))


def make_problem_order(problems: Sequence[Problem], seed: int) -> Callable[[int], Problem]:
    """problem_fn(cursor): problem number `cursor` since the start, so a checkpoint stores one integer. Each epoch has
    every problem once, shuffled by (seed, epoch). Raises ValueError: no problems, or a seed outside 0 .. 2**32 - 1."""
    if not problems or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"{len(problems)} problems and seed={seed}; there must be at least one problem, and the seed "
                         f"must be in 0 .. {MAX_SEED}")
    # grain computes each element of its permutation directly: nothing is stored for any number of epochs.
    order = grain.MapDataset.range(len(problems)).seed(seed).shuffle().repeat()

    def problem_fn(cursor: int) -> Problem:
        assert cursor >= 0, cursor
        return problems[order[cursor]]

    return problem_fn
