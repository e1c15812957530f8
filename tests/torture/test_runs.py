"""A few of the torture suite's kills, signals and double starts, of one small run."""

import numpy as np
import pytest

from torture.kills import killed_run
from torture.runs import ROLES, SMALL, make_undisturbed
from torture.starts import started_twice
from torture.terms import stopped_run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Without a stage 1, of which test_resume.py has more."""
    folder = tmp_path_factory.mktemp("torture")
    overrides = (*SMALL, *(f"{role}.sft.steps=0" for role in ROLES))
    made = make_undisturbed(folder, overrides, folder / "cache", is_compiled=True)
    return made._replace(seconds=made.seconds / 2)  # it had to compile, and those that are disturbed have not


def test_killed_at_a_random_moment(undisturbed):
    assert killed_run(undisturbed, 1, np.random.default_rng(0)) == ""


def test_stopped_at_a_random_moment(undisturbed):
    sent, problem = stopped_run(undisturbed, 1, np.random.default_rng(0))
    assert problem == "" and sent <= 1  # none if the run was over before


def test_started_twice_at_the_same_moment(undisturbed):
    assert started_twice(undisturbed, 0.0) == ""
