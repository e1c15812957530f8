"""Checks of what a turn returned, and the advantage of every token."""

import zlib
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from tango_jax.records import Lesson, Memory, Responses, Rewards
from tango_jax.rl.packing import action_mask
from tango_jax.runtime.checks import shortened


def advantages_of(lesson: Lesson, role: str, config: ConfigDict) -> np.ndarray:
    """The sum of weight x advantage over the lesson's terms, float32 [B, T]. Raises ValueError: it is no lesson, or
    does not fit the responses."""
    if not isinstance(lesson, Lesson):
        raise ValueError(f"it returned {shortened(lesson)}; it must return a Lesson (tango_jax.records)")
    responses = lesson.responses
    if not isinstance(responses, Responses) or responses.role != role or not len(responses):
        raise ValueError(f"the lesson's responses are {_shown(responses)}; they must be at least one response of the "
                         f"{role}")
    shape = action_mask(config[role], responses.rollout).shape
    _check_reward(lesson.reward, shape[0])
    if not lesson.terms:
        raise ValueError("the lesson has no terms: name at least one, {name: (weight, advantage of each token)}")
    adv_BT = np.zeros(shape, np.float64)
    for name, (weight, value_BT) in lesson.terms.items():
        if not _is_finite(value_BT, shape):
            raise ValueError(f"the lesson's term {name!r} is {_shown(value_BT)}; it must have a finite number for each "
                             f"token, {list(shape)}")
        weight_B1 = np.asarray(weight, np.float64)
        if not (_is_finite(weight_B1, ()) or _is_finite(weight_B1, shape[:1])):
            raise ValueError(f"the weight of the lesson's term {name!r} is {_shown(weight)}; it must be one finite "
                             f"number, or one for each of {shape[0]} rows")
        adv_BT += weight_B1.reshape(-1, 1) * np.asarray(value_BT, np.float64)
    for steps in lesson.step_rewards:
        if {np.shape(steps.reward_BT), np.shape(steps.is_end_BT)} != {shape} or len(steps.of_steps) != shape[0]:
            raise ValueError(f"the lesson's step rewards are of {len(steps.of_steps)} responses; they must be of the "
                             f"{shape[0]} that are trained on")
    for name, value in {**lesson.reward.metrics, **lesson.metrics}.items():
        if np.ndim(value) or np.asarray(value).dtype.kind not in "fiub":
            raise ValueError(f"its metric {name} is {shortened(value)}; it must be a number")
    if not isinstance(lesson.memory, Memory | None):
        raise ValueError(f"the lesson's memory is {shortened(lesson.memory)}; it must be t.memory.replace(...), or "
                         "None to remember nothing")
    return adv_BT.astype(np.float32)


def _check_reward(reward: Any, count: int) -> None:
    if not isinstance(reward, Rewards) or not _is_finite(reward.reward_B, (count,)):
        shown = _shown(getattr(reward, "reward_B", reward))
        raise ValueError(f"the lesson's reward is {shown}; it must be Rewards with a finite number for each response, "
                         f"{count}")
    for term in reward.terms:
        if np.shape(term.value) != (count,):
            raise ValueError(f"the reward's term {term.name!r} is {_shown(term.value)}; it must have a number for each "
                             f"response, {count}")


def digest_of(lesson: Lesson, adv_BT: np.ndarray) -> int:
    """Tells one result of a turn from another."""
    memory = repr(lesson.memory.stored()) if lesson.memory else ""
    digest = zlib.crc32(memory.encode())
    for part in (np.ascontiguousarray(lesson.reward.reward_B, np.float32), np.ascontiguousarray(adv_BT)):
        digest = zlib.crc32(part, digest)
    return digest


def _is_finite(array: Any, shape: tuple[int, ...]) -> bool:
    array = np.asarray(array)
    return array.dtype.kind in "fiub" and array.shape == shape and bool(np.isfinite(array).all())


def _shown(value: Any) -> str:
    if isinstance(value, Responses):
        return f"{len(value)} of the {value.role}"
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return f"of shape {list(value.shape)}" + ("" if np.isfinite(value).all() else " and not finite")
    return shortened(value)
