"""What a run's settings name of its method, loaded: the arm's record, and the reward and credit functions of its turns.

A plan names functions of rl/credit.py. A function of the user's, FILE.py:name or handed over from Python, takes and
returns the same as those,

    reward(answers, rl) -> Rewards          answers: role -> Responses; rl: the settings rl.*
    credit(so_far) -> Credit                so_far: a TurnSoFar

and may call them. A reward function sees the responses up to those of the role that learns: in the generator's turns
the verifier is asked later. `credit.steps_credit(so_far, labels)` blends any labels of the steps with the outcome. A
loss term, `ROLE.loss.term`, is traced by jax:

    term(tokens) -> loss_BT                 tokens: a LossTokens (rl/losses.py); weighted and summed as the loss is

What they return is checked, and whatever they raise becomes a ValueError of one line. Of several processes, each calls
reward and credit functions with the same arguments, which must have the same results.
"""

import functools
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from tango_jax.arms import Arm
from tango_jax.config import ROLES
from tango_jax.records import Answers, Counters, Credit, Rewards
from tango_jax.rl import credit, family
from tango_jax.rl.algorithms import algorithm_of
from tango_jax.rl.credit import TurnSoFar
from tango_jax.rl.losses import LossTokens
from tango_jax.rl.own_reward import OwnReward, load_own_rewards, with_own_reward
from tango_jax.runtime.checks import Mistakes, one_of, require, shortened
from tango_jax.runtime.user_code import UserFunction, is_user_code, load_function
from tango_jax.tasks.own_arm import arm_of

# What plans name.
REWARDS = ChainMap(family.REWARDS, credit.REWARDS)
CREDITS = ChainMap(family.CREDITS, credit.CREDITS)


class Method(NamedTuple):
    """How a run learns: by the role that learns, the reward and the credit function of its turns. `load_method` makes
    it; loop/turn.py calls its functions."""

    arm: Arm
    rewards: dict[str, Callable[[Answers, ConfigDict], Rewards]]
    credits: dict[str, Callable[[TurnSoFar], Credit]]
    own_rewards: dict[str, OwnReward]  # by role, where the user has named a function for each response


def load_method(config: ConfigDict) -> Method:
    """Load all that the configuration names.

    Raises:
        ValueError: some of it cannot be loaded, or takes other parameters; all mistakes at once.
    """
    mistakes, rewards, credits, own_rewards, arm = Mistakes(), {}, {}, {}, None
    with mistakes.collected():
        arm = arm_of(config)
    with mistakes.collected():
        own_rewards = load_own_rewards(config)
    for role, plan in arm.turns.items() if arm else ():
        place = f"arm={config.arm}, turns[{role!r}]"
        with mistakes.collected():
            learners = plan.learners(role)
            checked_fn = functools.partial(_checked_reward, learners=learners)
            reward_fn = _named(f"{place}, reward", plan.reward, REWARDS, ("answers", "rl"), checked_fn)
            rewards[role] = with_own_reward(reward_fn, own_rewards.get(role), learners)
        with mistakes.collected():
            credits[role] = _named(f"{place}, credit", plan.credit, CREDITS, ("so_far",), _checked_credit)
    for role in ROLES:
        with mistakes.collected():
            key, name = f"{role}.loss.algorithm", config[role].loss.algorithm
            is_joined = arm is not None and role in arm.turns and len(arm.turns[role].learners(role)) > 1
            is_able = algorithm_of(name, key).normalise_fn is not None
            require(is_able or not is_joined, f"arm={config.arm} compares groups of different sizes, which "
                    f"{key}={name} does not: choose one that compares each group alone")
        with mistakes.collected():
            load_loss_term(role, config[role].loss)
    mistakes.raise_all()
    return Method(arm, rewards, credits, own_rewards)


def _named(
    key: str, value: str | Callable, table: Mapping[str, Callable], parameters: tuple[str, ...],
    checked_fn: Callable[[UserFunction], Callable],
) -> Callable:
    """The function of the table, or that of the user, with its errors and results checked."""
    if isinstance(value, str) and not is_user_code(value):
        one_of(key, value, table)
        return table[value]
    function = load_function(key, value, parameters) if isinstance(value, str) else (
        UserFunction(key, getattr(value, "__name__", repr(value)), value))  # fmt: skip
    return checked_fn(function)


def _checked_reward(
    function: UserFunction, learners: Sequence[str]
) -> Callable[[Answers, ConfigDict], Rewards]:
    def reward_fn(answers: Answers, rl: ConfigDict) -> Rewards:
        result = function.call(answers, rl)
        if not isinstance(result, Rewards):
            function.refuse(f"it returned {shortened(result)}; it must return Rewards (tango_jax.records)")
        count = sum(len(answers[name].records) for name in learners if name in answers)
        if not _is_finite(result.reward_B) or np.shape(result.reward_B) != (count,):
            function.refuse(f"reward_B is {_described(result.reward_B)}; it must have a finite number for each "
                            f"response of the role that learns, {count}")
        _check_parts(function, result, (count,))
        return result._replace(reward_B=np.asarray(result.reward_B, np.float32))

    return reward_fn


def _checked_credit(function: UserFunction) -> Callable[[TurnSoFar], Credit]:
    def credit_fn(so_far: TurnSoFar) -> Credit:
        result = function.call(so_far)
        if not (isinstance(result, Credit) and isinstance(result.counters, Counters)):
            function.refuse(f"it returned {shortened(result)}; it must return a Credit (tango_jax.records)")
        adv_BT, shape = result.adv_BT, so_far.is_action_BT.shape
        if np.shape(adv_BT) != shape or not _is_finite(adv_BT):
            function.refuse(f"adv_BT is {_described(adv_BT)}; it must have a finite number for each token, "
                            f"{list(shape)}")
        _check_parts(function, result, shape)
        return result._replace(adv_BT=np.asarray(adv_BT, np.float32))

    return credit_fn


def _check_parts(function: UserFunction, result: Rewards | Credit, shape: tuple[int, ...]) -> None:
    """Check the metrics of what a user's function returned, and the terms that the report shows."""
    for name, value in result.metrics.items():
        if np.ndim(value) or np.asarray(value).dtype.kind not in "fiub":
            function.refuse(f"its metric {name} is {shortened(value)}; it must be a number")
    for term in result.terms or ():
        if np.shape(term.value) != shape:
            function.refuse(f"its term {shortened(term.name)} is of shape {list(np.shape(term.value))}; it must have a "
                            f"number for each entry of {list(shape)}")


def _is_finite(array: Any) -> bool:
    array = np.asarray(array)
    return array.dtype.kind in "fiub" and bool(np.isfinite(array).all())


def _described(array: Any) -> str:
    return f"of shape {list(np.shape(array))}" + ("" if _is_finite(array) else " and not finite")


def load_loss_term(role: str, loss: ConfigDict) -> Callable[[LossTokens], jax.Array] | None:
    """The term that a role adds to its loss, tried on the shapes of a small batch; None: there is none.

    Raises:
        ValueError: it cannot be loaded, raises an error when it is traced, or returns another shape.
    """
    if not loss.term:
        return None
    function = load_function(f"{role}.loss.term", loss.term, ("tokens",))

    def term_fn(tokens: LossTokens) -> jax.Array:
        loss_BT = function.call(tokens)
        if jnp.shape(loss_BT) != tokens.logp_BT.shape or not jnp.issubdtype(jnp.result_type(loss_BT), jnp.floating):
            function.refuse(f"it returned {shortened(loss_BT)}; it must return a float for each token, "
                            f"{list(tokens.logp_BT.shape)}")
        return loss_BT

    float_BT, bool_BT = (jax.ShapeDtypeStruct((2, 5), dtype) for dtype in (jnp.float32, jnp.bool_))
    jax.eval_shape(term_fn, LossTokens(*[float_BT] * 6, bool_BT))
    return term_fn
