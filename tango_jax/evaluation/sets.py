"""Names of sets in; problems to solve, or solutions to judge, out.

A name may bring its rows: `math500:rows.jsonl` or `math500:hub:owner/name/split`.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.config import default_config
from tango_jax.data.problem_sets import BENCHMARKS, load_problems
from tango_jax.data.processbench import SUBSETS, hub_source, load_processbench, solution_text
from tango_jax.data.rows import SUFFIXES
from tango_jax.data.teacher_rows import MAX_PROBLEMS
from tango_jax.evaluation.published import MATHEMATICS, OUT_OF_DOMAIN, PROCESSBENCH
from tango_jax.loop.measure import fixed_pool
from tango_jax.records import Problem, Solution
from tango_jax.sampling.checkpoint_sampler import MIN_STEPS
from tango_jax.tasks.own_grader import OwnGrader, grader_of
from tango_jax.tasks.registry import SYNTHETIC, make_task
from tango_jax.tasks.task import Task
from tango_jax.weights.source import kind_of
from tango_jax.weights.workdir import prompting_of, read_config

GROUPS = {"math": MATHEMATICS, "out_of_domain": OUT_OF_DOMAIN, "processbench": PROCESSBENCH}
# Sets of solutions with step labels, and the synthetic task of each.
SYNTHETIC_STEPS = {f"{name}_steps": name for name in SYNTHETIC}
SYNTHETIC_PROBLEMS = 200  # as many as training looks at
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_DRAW_STREAM = 4


class SolveSet(NamedTuple):
    """Problems for a generator. Has the fields of a task that `responses.make_solution` reads."""

    name: str
    source: str
    problems: tuple[tuple[int, Problem], ...]  # with their numbers in the source, ascending
    grade_kind: str
    min_steps: int
    gold_steps: Callable[[Problem, tuple[str, ...]], tuple[bool, ...] | None] | None
    is_whole: bool
    is_correct: OwnGrader | None = None  # None: answers are compared
    num_other: int = 0  # rows of the source that are of another kind, or repeats

    @property
    def items(self) -> tuple[tuple[int, Problem], ...]:
        return self.problems


class Claim(NamedTuple):
    number: int  # of its problem
    sample: int  # of that problem's solutions
    solution: Solution
    first_wrong: int | None = None  # index of the first wrong step, -1 for none; None: not known
    may_be_judged: bool = True  # False: there is nothing to read


class JudgeSet(NamedTuple):
    name: str
    source: str
    claims: tuple[Claim, ...]
    is_whole: bool
    is_correct: OwnGrader | None = None  # what graded the claims; None: their rows, or a comparison

    @property
    def items(self) -> tuple[Claim, ...]:
        return self.claims


EvalSet = SolveSet | JudgeSet


def grader_name(eval_set: EvalSet) -> str:
    """The user's function that grades a set; empty if there is none."""
    return eval_set.is_correct.name if eval_set.is_correct else ""


def open_sets(
    names: Iterable[str], checkpoint: str | None, judge: str, problems: int, seed: int,
    is_correct: OwnGrader | None = None,
) -> list[EvalSet]:
    """Every named set, in order; a name in GROUPS stands for several.

    Args:
        checkpoint, judge: the models that solve and judge. A run's workdir brings the settings of its task.
        problems: number of problems in each set, drawn by `seed`; 0: all.
        is_correct: a user's grader; None: answers are compared, or graded as in the run on the run's task.

    Raises ValueError for an unknown name, unreadable rows, or a set without the checkpoint that it needs.
    """
    opened: dict[str, EvalSet] = {}
    for name, source in _resolve(names):
        if name in opened:
            raise ValueError(f"--sets names {name} twice: take one of them out")
        if name in PROCESSBENCH:
            opened[name] = _processbench(name, source, problems, seed)
        elif name in SYNTHETIC_STEPS:
            opened[name] = _synthetic_steps(name, judge, problems, is_correct)
        elif checkpoint is None:
            raise ValueError(f"--sets: {name} has problems to solve: name a --checkpoint that solves them")
        elif name in SYNTHETIC:
            opened[name] = _synthetic(name, checkpoint, problems, is_correct)
        else:
            own = prompting_of(checkpoint, "generator")
            read = _benchmark(name, source, problems, seed, own.min_steps if own else MIN_STEPS)
            opened[name] = read._replace(is_correct=is_correct)
    return list(opened.values())


def _resolve(names: Iterable[str]) -> list[tuple[str, str]]:
    resolved = []
    for text in names:
        name, _, source = text.partition(":")
        if not _NAME.fullmatch(name):
            raise ValueError(f"--sets: {text!r} must look like NAME or NAME:SOURCE, such as mine:problems.jsonl")
        if name in (*SYNTHETIC, *SYNTHETIC_STEPS) and source:
            raise ValueError(f"--sets: {name} makes its own problems and takes no rows ({source}): leave them out")
        if name in GROUPS:
            resolved += [(member, _member_source(name, member, source)) for member in GROUPS[name]]
        elif name in PROCESSBENCH:
            resolved.append((name, source or hub_source(name.removeprefix("processbench_"))))
        elif source or name in (*BENCHMARKS, *SYNTHETIC, *SYNTHETIC_STEPS):
            resolved.append((name, source or name))
        else:
            known = (*BENCHMARKS, *SYNTHETIC, *SYNTHETIC_STEPS, *PROCESSBENCH, *GROUPS)
            raise ValueError(f"--sets: unknown set {name!r}; use one of {', '.join(known)}, or {name}:SOURCE for your "
                             "own rows")
    return resolved


def _member_source(group: str, member: str, folder: str) -> str:
    if not folder:
        return hub_source(member.removeprefix("processbench_")) if group == "processbench" else member
    stems = (member, member.removeprefix("processbench_")) if group == "processbench" else (member,)
    paths = [Path(folder).expanduser() / f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES]
    found = [path for path in paths if path.is_file()]
    if not found:
        raise ValueError(f"--sets: {group}:{folder} must be a folder with the files of its sets; there is none of "
                         f"{', '.join(path.name for path in paths)}")
    return str(found[0])


def drawn(count: int, wanted: int, seed: int) -> np.ndarray:
    """`wanted` of `count` problem numbers, ascending; all if `wanted` is 0 or too large."""
    if not 0 < wanted < count:
        return np.arange(count)
    # Drawn, since some files are sorted by subject.
    return np.sort(np.random.default_rng((seed, _DRAW_STREAM)).permutation(count)[:wanted])


def _benchmark(name: str, source: str, problems: int, seed: int, min_steps: int) -> SolveSet:
    row_format = BENCHMARKS[name].row_format if name in BENCHMARKS else None
    loaded = load_problems(source, row_format)
    if len(loaded.problems) > MAX_PROBLEMS:
        raise ValueError(f"--sets: {source} has {len(loaded.problems)} problems; at most {MAX_PROBLEMS} can be "
                         "evaluated: split the file")
    numbers = drawn(len(loaded.problems), problems, seed)
    chosen = tuple((int(number), loaded.problems[number]) for number in numbers)
    is_whole = len(chosen) == len(loaded.problems)
    return SolveSet(name, source, chosen, loaded.grade_kind, min_steps, None, is_whole, num_other=loaded.num_other)


def _processbench(name: str, source: str, problems: int, seed: int) -> JudgeSet:
    assert name.removeprefix("processbench_") in SUBSETS, name
    rows = load_processbench(source)
    claims = []
    for number in drawn(len(rows), problems, seed):
        row = rows[number]
        solution = Solution(
            problem=Problem(row.id, row.problem, ""), text=solution_text(row.steps), steps=row.steps, step_ends=(),
            format_score=1.0, is_correct=row.is_answer_correct, gold_steps=None,
        )
        claims.append(Claim(int(number), 0, solution, row.label))
    return JudgeSet(name, source, tuple(claims), len(claims) == len(rows))


def _own_task(name: str, checkpoint: str) -> ConfigDict | None:
    """The task's settings in the workdir of a run of this task."""
    if kind_of(checkpoint) != "workdir":
        return None
    own = read_config(Path(checkpoint).expanduser()).task
    return own if own.name == name else None


def _source(name: str, checkpoint: str) -> str:
    return f"synthetic, {'default sizes' if _own_task(name, checkpoint) is None else f'sizes of the run {checkpoint}'}"


def _synthetic_task(name: str, checkpoint: str, is_correct: OwnGrader | None) -> Task:
    config = default_config()
    config.task.name = name
    config.task = _own_task(name, checkpoint) or config.task
    if is_correct is None:
        try:
            is_correct = grader_of(config.task)
        except ValueError as error:
            raise ValueError(f"{error}; this is the grader of {checkpoint}: --grader=FILE.py:NAME can take its "
                             "place") from error
    config.task.grader = ""
    return make_task(config, {})._replace(is_correct=is_correct)


def _synthetic(name: str, checkpoint: str, problems: int, is_correct: OwnGrader | None) -> SolveSet:
    task = _synthetic_task(name, checkpoint, is_correct)
    chosen = tuple((index, task.test_problem(index)) for index in range(problems or SYNTHETIC_PROBLEMS))
    return SolveSet(
        name, _source(name, checkpoint), chosen, task.grade_kind, task.min_steps, task.gold_steps, True, task.is_correct
    )


def _synthetic_steps(name: str, checkpoint: str, problems: int, is_correct: OwnGrader | None) -> JudgeSet:
    """The fixed pool of training: solutions with gold step labels, half of them drawn with errors."""
    task = _synthetic_task(SYNTHETIC_STEPS[name], checkpoint, is_correct)
    pool = fixed_pool(task, problems or SYNTHETIC_PROBLEMS)
    claims = tuple(Claim(number, 0, solution) for number, solution in enumerate(pool))
    return JudgeSet(name, _source(SYNTHETIC_STEPS[name], checkpoint), claims, True, task.is_correct)
