"""One small run that is started twice, told to stop and killed; the torture suite does each of these many times."""

import shutil
import time

import numpy as np
import pytest

from tango_jax.runtime.termination import PREEMPTED
from torture.kills import SIGKILLED, wait_for_moment
from torture.runs import ROLES, SMALL, difference, finish, make_undisturbed, start_train
from torture.starts import problem_of_refusals
from torture.terms import one_attempt, problem_of


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Without a stage 1, of which test_resume.py has more."""
    folder = tmp_path_factory.mktemp("torture")
    overrides = (*SMALL, *(f"{role}.sft.steps=0" for role in ROLES))
    made = make_undisturbed(folder, overrides, folder / "cache", is_compiled=True)
    return made._replace(seconds=made.seconds / 2)  # it had to compile, and those that are disturbed have not


@pytest.mark.long
def test_a_run_started_twice_told_to_stop_and_killed_ends_as_if_nothing_had_happened(undisturbed):
    rng, workdir = np.random.default_rng(0), undisturbed.workdir.with_name("disturbed")
    both = [start_train(workdir, undisturbed.overrides) for _ in range(2)]
    time.sleep(rng.uniform(0, undisturbed.seconds))
    for process in both:
        process.kill()
    ends = [finish(process) for process in both]
    assert problem_of_refusals([ended for ended in ends if ended.code not in (0, SIGKILLED)]) == ""

    stopped = one_attempt(workdir, undisturbed.overrides, rng.uniform(0, undisturbed.seconds))
    assert problem_of(stopped) == "" and stopped.code in (0, PREEMPTED, -15)

    killed = start_train(workdir, undisturbed.overrides)
    wait_for_moment(killed, rng.uniform(0, undisturbed.seconds))
    killed.kill()
    assert finish(killed).code in (0, SIGKILLED)

    assert finish(start_train(workdir, undisturbed.overrides)).code == 0
    assert difference(workdir, undisturbed.workdir, undisturbed.shapes) == ""
    shutil.rmtree(workdir)
