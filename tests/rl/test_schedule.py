"""The interleaved schedule and the decay of alpha, against sequences written out by hand."""
import pytest

from tango_jax.rl.schedule import Place, Schedule, alpha_at, turn_at


def letters(schedule: Schedule) -> str:
    """W warm-up, G generator, V verifier."""
    return "".join({"warmup": "W", "generator": "G", "verifier": "V"}[turn.phase] for turn in schedule.turns())


@pytest.mark.parametrize(
    "kind, step, expected",
    [
        ("exponential", 0, 0.1),
        ("exponential", 150, 0.01),  # 0.1 * (1/100)^(1/2)
        ("exponential", 75, 0.0316228),  # 0.1 * (1/100)^(1/4) = 0.1 / sqrt(10)
        ("exponential", 300, 0.001),
        ("linear", 0, 0.1),
        ("linear", 150, 0.0505),  # 0.1 - 0.099 / 2
        ("linear", 300, 0.001),
        ("cosine", 0, 0.1),
        ("cosine", 100, 0.07525),  # 0.001 + 0.0495 * (1 + 1/2)
        ("cosine", 150, 0.0505),
        ("cosine", 300, 0.001),
        ("none", 0, 0.1),
        ("none", 300, 0.1),
        ("exponential", 999, 0.001),  # held at the end
    ],
)
def test_alpha(kind, step, expected):
    assert alpha_at(step, 300, 0.1, 0.001, kind) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("share, expected", [(0.0, 0.001), (0.25, 0.02575), (1.0, 0.1)])  # 0.001 + 0.099 * share
def test_alpha_follows_the_share_of_groups_of_one_outcome(share, expected):
    for step in (0, 150, 300):
        assert alpha_at(step, 300, 0.1, 0.001, "signal", share) == pytest.approx(expected)


def test_turns_of_each_role_are_counted():
    turns = Schedule(2, 3, 1, generator_turns=6).turns()  # WW GGGV GGGV
    assert [(turn.role[0], turn.role_step) for turn in turns] == [
        ("v", 0), ("v", 1), ("g", 0), ("g", 1), ("g", 2), ("v", 2), ("g", 3), ("g", 4), ("g", 5), ("v", 3),
    ]


def test_tango_warms_up_then_interleaves():
    schedule = Schedule(2, 3, 1, generator_turns=6)
    assert letters(schedule) == "WW" + "GGGV" + "GGGV"
    assert schedule.num_turns == 10
    assert schedule.turns()[:7] == (
        Place(0, "verifier", "warmup", 0),
        Place(1, "verifier", "warmup", 0),
        Place(2, "generator", "generator", 0),
        Place(3, "generator", "generator", 1),
        Place(4, "generator", "generator", 2),
        Place(5, "verifier", "verifier", 3),
        Place(6, "generator", "generator", 3),
    )


def test_incomplete_last_cycle_ends_with_the_generator():
    assert letters(Schedule(1, 3, 2, generator_turns=7)) == "W" + "GGGVV" + "GGGVV" + "G"
    assert letters(Schedule(0, 3, 2, generator_turns=2)) == "GG"


def test_published_run_has_440_steps():
    turns = Schedule(40, 3, 1, generator_turns=300).turns()
    assert len(turns) == 440
    assert sum(turn.role == "generator" for turn in turns) == 300
    assert turns[-1] == Place(439, "verifier", "verifier", 300)
    assert turns[-2] == Place(438, "generator", "generator", 299)


@pytest.mark.parametrize(
    "schedule, expected",
    [
        # grpo, gold_steps, fixed_verifier
        (Schedule(2, 3, 1, 4, train_verifier=False), "GGGG"),
        # fixed_verifier after a warm-up
        (Schedule(2, 3, 0, 4), "WWGGGG"),
        # fixed_generator: tango would be WW GGGVV GGGVV G
        (Schedule(2, 3, 2, 7, train_generator=False), "WWVVVV"),
        # a warm-up and nothing else
        (Schedule(2, 1, 1, 0), "WW"),
        (Schedule(2, 3, 0, 7, train_generator=False), "WW"),
    ],
)
def test_arms(schedule, expected):
    assert letters(schedule) == expected


def test_generator_steps_stay_at_zero_when_the_generator_is_fixed():
    assert {turn.generator_step for turn in Schedule(1, 3, 2, 6, train_generator=False).turns()} == {0}


def test_a_turn_outside_the_run_is_refused():
    with pytest.raises(ValueError, match="turn 10 .* 10 turns"):
        turn_at(Schedule(2, 3, 1, 6), 10)
    with pytest.raises(ValueError, match="turn -1"):
        turn_at(Schedule(2, 3, 1, 6), -1)
