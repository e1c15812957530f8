"""A sample of the mistakes that the torture suite makes by the hundred."""

from torture.mistake_list import IN_THE_ENVIRONMENT, WRITTEN
from torture.mistakes import mistakes


def test_mistakes_end_in_one_line_and_leave_nothing():
    tried, survived, failures = mistakes(count=12, seed=3)
    assert failures == [] and tried == survived == 12


def test_there_are_a_hundred_of_them_over_all_commands():
    lines = {(command, *added) for command, *added in WRITTEN} | set(IN_THE_ENVIRONMENT)
    assert len(lines) == len(WRITTEN) + len(IN_THE_ENVIRONMENT) >= 100
    assert {command for command, *_ in WRITTEN} == {
        "train", "sft", "generate", "sample", "export", "evaluate", "judge", "grade", "report", "plan", "bench",
        "ablate",
    }
