"""User rewards. `generator.reward` or `verifier.reward` names a function, as FILE.py:name or package.module:name:

    generator.reward    name(solution) -> float
    verifier.reward     name(verification, solution) -> float

The arguments are a `records.Solution` and a `records.Verification`. The number is added to the role's usual reward;
rl.outcome_weight=0 and rl.format_weight=0 switch the generator's off. The function is called once per response, and
tried on made-up ones before a run begins (method/rehearsal.py).
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class OwnReward:
    role: str
    function: UserFunction

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


def load_own_rewards(config: ConfigDict) -> dict[str, OwnReward]:
    """By role. Raises ValueError if one cannot be loaded."""
    rewards, mistakes = {}, Mistakes()
    for role, parameters in PARAMETERS.items():
        if not config[role].reward:
            continue
        with mistakes.collected():
            function = load_function(f"{role}.reward", config[role].reward, parameters)
            rewards[role] = OwnReward(role, function)
    mistakes.raise_all()
    return rewards


def _as_number(value: Any) -> float | None:
    """A Python, NumPy or JAX number or bool as a float; None for anything else."""
    try:
        array = np.asarray(value)
    except Exception:  # of an object that offers itself as an array
        return None
    return float(array) if array.shape == () and array.dtype.kind in "biuf" else None
