"""User rewards. `generator.rewards` and `verifier.rewards` name functions, as FILE.py:name or package.module:name:

    generator.rewards    name(solution) -> float
    verifier.rewards     name(verification, solution) -> float

The arguments are a `records.Solution` and a `records.Verification`. What TRL and verl call completion, prompt and
ground truth is solution.text, solution.problem.question and solution.problem.answer. Each number, times its weight
(`reward_weights`), is added to the role's usual reward; rl.outcome_weight=0 and rl.format_weight=0 switch the
generator's off. A function is loaded when the run starts, tried on made-up responses (method/rehearsal.py), and called
once per response. Its mean in a turn is the metric ROLE/reward/own/NAME.
"""

import dataclasses
import itertools
from collections import Counter
from pathlib import PurePath
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from tango_jax.records import Problem, Responses, Solution, Verification, problem_of
from tango_jax.runtime import hosts, user_code
from tango_jax.runtime.checks import Mistakes, cut, shortened
from tango_jax.runtime.user_code import UserFunction, load_function

PARAMETERS = {"generator": ("solution",), "verifier": ("verification", "solution")}
# Far from where float32 overflows in the statistics of a batch.
MAX_REWARD = 1e6
SHOWN_CHARACTERS = 60  # of a response, in an error
OWN = "reward/own/"  # of a metric's name, before the function's


@dataclasses.dataclass(frozen=True)
class OwnReward:
    role: str
    function: UserFunction
    weight: float = 1.0

    def of(self, response: Solution | Verification, parent: Problem | Solution) -> float:
        """Raises ValueError after an error, a time limit, or a value that is not one finite number."""
        args = (response,) if self.role == "generator" else (response, parent)
        shown = cut(repr(response.text), SHOWN_CHARACTERS)
        about = f"for the response {shown} to problem {cut(repr(problem_of(parent).id))}"
        value = self.function.call(*args, about=about, limit_s=user_code.CALL_LIMIT_S)
        number = _as_number(value)
        if number is None or not abs(number) <= MAX_REWARD:
            self.function.refuse(f"it returned {shortened(value)}; it must return one number between "
                                 f"-{MAX_REWARD:.0e} and {MAX_REWARD:.0e}", about)
        return number

    def of_all(self, responses: Responses) -> np.ndarray:
        """float32 [B]. All processes must call this, and all raise as `of`."""
        pairs, values, mistake = list(zip(responses.records, responses.owners, strict=True)), [], ""
        try:
            values = [self.of(response, parent) for response, parent in hosts.own_part(pairs)]
        except ValueError as error:
            mistake = str(error)
        hosts.raise_mistake(mistake)
        return np.array(hosts.join_parts(values), np.float32)

    @property
    def shown(self) -> str:
        return f"own reward ({PurePath(self.function.name).name})"

    @property
    def metric(self) -> str:
        return f"{self.role}/{OWN}{name_of(self.function.name)}"


def name_of(text: str) -> str:
    """Of a function, in FILE.py:name."""
    return text.rpartition(":")[2]


def load_own_rewards(config: ConfigDict) -> dict[str, tuple[OwnReward, ...]]:
    """By role, if it has any. Raises ValueError: one cannot be loaded, two have the same name, or weights are missing.
    """
    rewards, mistakes = {}, Mistakes()
    for role, parameters in PARAMETERS.items():
        functions, weights = tuple(config[role].rewards), tuple(config[role].reward_weights)
        mistakes.require(
            len(weights) in (0, len(functions)), f"{role}.reward_weights={weights} is of length {len(weights)}, and "
            f"{role}.rewards={functions} of length {len(functions)}: give one weight for each function, or leave the "
            "weights empty for 1 each",
        )
        for name, count in Counter(map(name_of, functions)).items():
            mistakes.require(count == 1, f"{role}.rewards={functions} has {count} functions named {name!r}, and the "
                             "name is that of the function's curve: rename one")
        for text, weight in itertools.zip_longest(functions, weights[: len(functions)], fillvalue=1.0):
            with mistakes.collected():
                function = load_function(f"{role}.rewards", text, parameters)
                rewards[role] = (*rewards.get(role, ()), OwnReward(role, function, weight))
    mistakes.raise_all()
    return rewards


def _as_number(value: Any) -> float | None:
    """A Python, NumPy or JAX number or bool as a float; None for anything else."""
    try:
        array = np.asarray(value)
    except Exception:  # of an object that offers itself as an array
        return None
    return float(array) if array.shape == () and array.dtype.kind in "biuf" else None
