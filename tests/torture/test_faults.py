"""A few of the torture suite's faults, and a check that it would see one that goes unnoticed."""

from torture import faults
from torture.faults import Ended, disk_faults
from torture.runs import ROLES


def test_faults_at_random_moments_change_nothing_in_the_end(tiny_train, tiny_run, tmp_path):
    overrides = (*tiny_train.overrides, *(f"{role}.init_from={tiny_run.workdir}" for role in ROLES),
                 "rl.warmup_steps=1", "rl.generator_steps=1", "rl.generator_turns_per_cycle=1", "checkpoint.every=1",
                 "eval.every=1")  # fmt: skip
    done = disk_faults(4, 3, tmp_path, overrides, kinds=("file_size", "metrics_removed", "terminated", "errno"))
    assert (done.tried, done.survived, done.failures) == (4, 4, [])


def test_an_end_with_a_traceback_is_a_failure():
    assert faults.problem_of_end(Ended("error: full", "", "")) == ""
    assert faults.problem_of_end(Ended(75, "told to stop", "")) == ""
    for ended in (Ended("error: a\nb", "", ""), Ended(None, "Traceback (most", ""), Ended(None, "", "KeyError: 1"),
                  Ended("interrupted", "", "")):  # fmt: skip
        assert faults.problem_of_end(ended)
