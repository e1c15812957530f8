"""What a turn has returned, checked; and the advantage of every token that its terms add up to."""

import zlib
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from tango_jax.records import Lesson, Memory, Responses, Rewards
from tango_jax.rl.packing import action_mask
from tango_jax.runtime.checks import require, shortened


def advantages_of(lesson: Lesson, role: str, config: ConfigDict) -> np.ndarray:
    """The sum of weight x advantage over the lesson's terms, float32 [B, T].

    Raises:
        ValueError: what the turn of `role` returned is no lesson, or does not fit the responses.
    """
    require(isinstance(lesson, Lesson), f"it returned {shortened(lesson)}; it must return a Lesson (tango_jax.records)")
    responses, reward = lesson.responses, lesson.reward
    require(isinstance(responses, Responses) and responses.role == role and len(responses) > 0,
            f"the lesson's responses are {shortened(responses)}; they must be responses of the {role}, one at least")
    require(isinstance(reward, Rewards) and _is_finite(reward.reward_B, (len(responses),)),
            f"the lesson's reward is {_described(getattr(reward, 'reward_B', reward))}; it must be Rewards with a "
            f"finite number for each response, {len(responses)}")
    shape = action_mask(config[role], responses.rollout).shape
    require(bool(lesson.terms), "the lesson has no terms: name at least one, {name: (weight, advantage of each token)}")
    adv_BT = np.zeros(shape, np.float64)
    for name, (weight, value_BT) in lesson.terms.items():
        require(_is_finite(value_BT, shape), f"the lesson's term {name!r} is {_described(value_BT)}; it must have a "
                f"finite number for each token, {list(shape)}")
        weight_B1 = np.asarray(weight, np.float64)
        require(_is_finite(weight_B1, ()) or _is_finite(weight_B1, shape[:1]), f"the weight of the lesson's term "
                f"{name!r} is {_described(weight)}; it must be one finite number, or one for each of {shape[0]} rows")
        adv_BT += weight_B1.reshape(-1, 1) * np.asarray(value_BT, np.float64)
    for term in reward.terms:
        require(np.shape(term.value) == shape[:1], f"the reward's term {term.name!r} is {_described(term.value)}; it "
                f"must have a number for each response, {shape[0]}")
    for name, value in {**reward.metrics, **lesson.metrics}.items():
        require(np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiub",
                f"its metric {name} is {shortened(value)}; it must be a number")
    require(isinstance(lesson.memory, Memory | None), f"the lesson's memory is {shortened(lesson.memory)}; it must be "
            "t.memory.replace(...), or None where nothing is to be remembered")
    return adv_BT.astype(np.float32)


def digest_of(lesson: Lesson, adv_BT: np.ndarray) -> int:
    """A number that tells one result of a turn from another: processes, and two calls with the same responses, must
    have the same."""
    memory = repr(lesson.memory.stored()) if lesson.memory else ""
    parts = [np.ascontiguousarray(lesson.reward.reward_B, np.float32), np.ascontiguousarray(adv_BT), memory.encode()]
    digest = 0
    for part in parts:
        digest = zlib.crc32(part, digest)
    return digest


def _is_finite(array: Any, shape: tuple[int, ...]) -> bool:
    array = np.asarray(array)
    return array.dtype.kind in "fiub" and array.shape == shape and bool(np.isfinite(array).all())


def _described(array: Any) -> str:
    try:
        return f"of shape {list(np.shape(array))}" + ("" if np.isfinite(array).all() else " and not finite")
    except (TypeError, ValueError):
        return shortened(array)
