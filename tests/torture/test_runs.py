"""A few of the torture suite's kills, signals and double starts, of one small run."""

import numpy as np
import pytest

from torture.kills import killed_run
from torture.runs import ROLES, make_undisturbed
from torture.starts import started_twice
from torture.terms import stopped_run


@pytest.fixture(scope="module")
def undisturbed(tiny_train, tiny_run, tmp_path_factory):
    """Reinforcement learning only, with functions that another run has compiled."""
    overrides = (*tiny_train.overrides, *(f"{role}.init_from={tiny_run.workdir}" for role in ROLES),
                 "rl.warmup_steps=1", "rl.generator_steps=1", "rl.generator_turns_per_cycle=1", "checkpoint.every=1",
                 "eval.every=1")  # fmt: skip
    return make_undisturbed(tmp_path_factory.mktemp("torture"), overrides, tiny_train.compile_cache, True)


def test_killed_at_a_random_moment_and_in_a_save(undisturbed):
    assert killed_run(undisturbed, 2, np.random.default_rng(0)) == ""


def test_stopped_at_random_moments(undisturbed):
    sent, problem = stopped_run(undisturbed, 2, np.random.default_rng(0))
    assert problem == "" and sent > 0


def test_started_twice_at_the_same_moment(undisturbed):
    assert started_twice(undisturbed, 0.0) == ""
