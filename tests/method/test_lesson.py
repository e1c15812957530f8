"""The advantage of a token is the sum of a lesson's terms, weight x advantage."""

import numpy as np
import pytest

from tango_jax.config import default_config
from tango_jax.method.lesson import advantages_of
from tango_jax.records import Lesson, Problem, Responses, Rewards, Rollout


@pytest.fixture
def sum_of():
    """The advantages of one response of two tokens, or of two such responses, by their terms."""

    def sum_of(terms: dict, count: int = 1) -> np.ndarray:
        config = default_config()
        config.generator.max_response = 2
        tokens, logps = (np.ones(2, np.int32),) * count, (np.zeros(2, np.float32),) * count
        rollout = Rollout(tokens, logps, np.zeros(count, bool), 2, 2 * count)
        problems = [Problem(str(b), "?", "") for b in range(count)]
        responses = Responses("generator", problems, [[1]] * count, 1, rollout, problems, {})
        return advantages_of(Lesson(responses, Rewards(np.zeros(count, np.float32), {}), terms), "generator", config)

    return sum_of


def test_outcome_and_steps_are_blended(sum_of):
    # 0.9 * 1 + 0.1 * (-2) = 0.7;  0.9 * (-1) + 0 = -0.9
    adv_BT = sum_of({"outcome": (0.9, np.array([[1.0, -1.0]])), "steps": (0.1, np.array([[-2.0, 0.0]]))})
    np.testing.assert_allclose(adv_BT, [[0.7, -0.9]], rtol=1e-6)
    assert adv_BT.dtype == np.float32


def test_a_weight_may_differ_from_row_to_row(sum_of):
    adv_BT = sum_of({"outcome": (np.array([2.0, 0.5]), np.array([[1.0, -1.0], [4.0, 2.0]]))}, count=2)
    np.testing.assert_array_equal(adv_BT, [[2.0, -2.0], [2.0, 1.0]])
