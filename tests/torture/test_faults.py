"""A few of the torture suite's faults, and a check that it would see one that goes unnoticed."""

import pytest

from torture import faults
from torture.faults import Ended, disk_faults
from torture.runs import ROLES, SMALL


@pytest.mark.long
@pytest.mark.release
def test_faults_at_random_moments_change_nothing_in_the_end(tmp_path):
    overrides = (*SMALL, *(f"{role}.sft.steps=0" for role in ROLES))
    done = disk_faults(4, 3, tmp_path, overrides, kinds=("file_size", "metrics_removed", "terminated", "errno"))
    assert (done.tried, done.survived, done.failures) == (4, 4, [])


def test_an_end_with_a_traceback_is_a_failure():
    assert faults.problem_of_end(Ended("error: full", "", "")) == ""
    assert faults.problem_of_end(Ended(75, "told to stop", "")) == ""
    for ended in (Ended("error: a\nb", "", ""), Ended(None, "Traceback (most", ""), Ended(None, "", "KeyError: 1"),
                  Ended("interrupted", "", "")):
        assert faults.problem_of_end(ended)
