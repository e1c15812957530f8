"""User tasks: `task.name` names a function (config) -> `Task`. Its mistakes end in one line with setting, file and
line."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.grading.answer import KINDS
from tango_jax.records import Problem
from tango_jax.runtime.checks import shortened
from tango_jax.runtime.user_code import UserFunction, load_function
from tango_jax.tasks.own_grader import is_grade
from tango_jax.tasks.prompt_lengths import check_lengths
from tango_jax.tasks.task import SftExample, Task
from tango_jax.text.prompts import Prompt
from tango_jax.text.tokenizer import Tokenizer

LOOKED_AT = 64  # problems that are checked when the task is made; a run checks the lengths of all that it takes


def load_user_task(config: ConfigDict) -> UserFunction:
    """Raises ValueError if `task.name` cannot be loaded or does not take one argument."""
    return load_function("task.name", config.task.name, ("config",))


def make_user_task(config: ConfigDict, tokenizers: dict[str, Tokenizer], further: Sequence[Prompt] = ()) -> Task:
    """`further`: the verifier's further prompts. Raises ValueError: a user's function failed or returned something else
    than tasks/task.py says, or prompts are too long."""
    make_fn = load_user_task(config)
    task = make_fn.call(config)
    if not isinstance(task, Task):
        make_fn.refuse(f"it must return a tango_jax.tasks.task.Task, not {shortened(task)}")
    if task.grade_kind not in KINDS:
        make_fn.refuse(f"grade_kind={shortened(task.grade_kind)} is not one of {', '.join(KINDS)}")
    for name, count in {"num_test": task.num_test, "num_pool": task.num_pool}.items():
        if count is not None and (type(count) is not int or count < 1):
            make_fn.refuse(f"{name}={shortened(count)} must be a whole number of at least 1, or None for no limit")
    if task.sft_example and not task.sft_roles:
        task = task._replace(sft_roles=ROLES)
    functions = {name: value for name, value in task._asdict().items() if callable(value)}
    task = task._replace(**{name: _checked(make_fn, name, function) for name, function in functions.items()})
    num_test = LOOKED_AT if task.num_test is None else min(task.num_test, LOOKED_AT)
    problems = [task.train_problem(index) for index in range(LOOKED_AT)]
    if problems[0] != task.train_problem(0):
        dataclasses.replace(make_fn, function=functions["train_problem"]).refuse(
            "train_problem(0) returned two different problems; the index alone must determine a problem, or no run "
            "could be resumed: seed random numbers with it"
        )
    problems += [task.test_problem(index) for index in range(num_test)]
    for role in task.sft_roles if task.sft_example else ():
        if config[role].sft.steps and not config[role].init_from:
            task.sft_example(role, "train", 0)
            task.sft_example(role, "heldout", 0)
    if tokenizers:
        check_lengths(config, tokenizers, problems, f"task.name={config.task.name}", further=further)
    return task


def _checked(make_fn: UserFunction, name: str, function: Callable) -> Callable:
    own_fn = dataclasses.replace(make_fn, function=function)

    def call(*args: Any) -> Any:
        shown = f"{name}({', '.join(map(shortened, args))})"
        result = own_fn.call(*args, about=f"in {shown}")
        if mistake := _mistake(name, result, args):
            own_fn.refuse(f"{shown} returned {shortened(result)}; {mistake}")
        return result

    return call


def _mistake(name: str, result: Any, args: tuple) -> str:
    if name == "pool_solution":
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], str)
        return _problem_mistake(result[0]) if is_pair else "it must return a Problem and the text of a solution"
    if name == "gold_steps":
        is_right = result is None or (isinstance(result, tuple) and len(result) == len(args[1])
                                      and all(isinstance(label, bool) for label in result))
        return "" if is_right else f"it must return None, or a tuple of {len(args[1])} bools: one for each step"
    if name == "step_kinds":
        is_right = (isinstance(result, tuple) and len(result) == len(args[1])
                    and all(isinstance(kind, str) for kind in result))
        return "" if is_right else f"it must return a tuple of {len(args[1])} texts: one for each step"
    if name == "is_correct":
        return "" if is_grade(result) else "it must return True or False"
    if name in ("sft_example", "further_example"):
        if not isinstance(result, SftExample) or not isinstance(result.response, str):
            return ("it must return a tango_jax.tasks.task.SftExample: problem, solution (text for the verifier to "
                    "judge, or empty), num_steps (in that solution) and response (text to imitate)")
        return _problem_mistake(result.problem)
    return _problem_mistake(result)


def _problem_mistake(problem: Any) -> str:
    if not isinstance(problem, Problem):
        return "it must return a tango_jax.records.Problem"
    texts = {name: getattr(problem, name) for name in ("id", "question", "answer")}
    empty = [name for name, text in texts.items() if not isinstance(text, str) or not text.strip()]
    return f"{' and '.join(empty)} must be text, and not empty" if empty else ""
