"""A few of the torture suite's kills, signals and double starts, of one small run."""

import numpy as np
import pytest
from torture.kills import killed_run
from torture.runs import SMALL, make_undisturbed
from torture.starts import started_twice
from torture.terms import stopped_run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torture")
    return make_undisturbed(folder, SMALL, folder / "cache")


def test_killed_at_a_random_moment_and_in_a_save(undisturbed):
    assert killed_run(undisturbed, 2, np.random.default_rng(0)) == ""


def test_stopped_at_random_moments(undisturbed):
    sent, problem = stopped_run(undisturbed, 2, np.random.default_rng(0))
    assert problem == "" and sent > 0


def test_started_twice_at_the_same_moment(undisturbed):
    assert started_twice(undisturbed, 0.0) == ""
