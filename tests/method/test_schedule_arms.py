"""What each arm trains, turn by turn, and when it is evaluated: sequences written out by hand."""

import pytest

from tango_jax.config import default_config
from tango_jax.method.own_arm import make_schedule
from tango_jax.rl.schedule import (
    evaluations_before,
    generator_steps_after,
    is_evaluation_due,
    turn_at,
    turns_since_evaluation,
)


def make_config(arm, warmup_steps=2, generator_steps=5, n_g=2, n_v=1, every=2):
    config = default_config()
    config.arm, config.eval.every = arm, every
    config.rl.warmup_steps, config.rl.generator_steps = warmup_steps, generator_steps
    config.rl.generator_turns_per_cycle, config.rl.verifier_turns_per_cycle = n_g, n_v
    return config


def letters(schedule) -> str:
    """W warm-up, G generator, V verifier."""
    return "".join({"warmup": "W", "generator": "G", "verifier": "V"}[turn.phase] for turn in schedule.turns())


# Generator steps made once each turn is over, and the turns after which both roles are evaluated (`eval.every` is 2:
# the end of the warm-up, generator steps 2 and 4, and the end).
@pytest.mark.parametrize("arm, turns, steps_after, evaluated", [
    ("tango", "WWGGVGGVG", [0, 0, 1, 2, 2, 3, 4, 4, 5], [1, 3, 6, 8]),
    ("grpo", "GGGGG", [1, 2, 3, 4, 5], [1, 3, 4]),
    ("grpo_curriculum", "GGGGG", [1, 2, 3, 4, 5], [1, 3, 4]),
    ("fixed_verifier", "GGGGG", [1, 2, 3, 4, 5], [1, 3, 4]),
    ("gold_steps", "GGGGG", [1, 2, 3, 4, 5], [1, 3, 4]),
    ("fixed_verifier_warm", "WWGGGGG", [0, 0, 1, 2, 3, 4, 5], [1, 3, 5, 6]),
    # The verifier's turns stand where they would with both roles: behind generator steps 2 and 4.
    ("fixed_generator", "WWVV", [0, 0, 2, 4], [1, 2, 3]),
])
def test_turns_of_each_arm(arm, turns, steps_after, evaluated):
    config = make_config(arm)
    schedule = make_schedule(config)
    assert letters(schedule) == turns
    assert [generator_steps_after(schedule, index) for index in range(schedule.num_turns)] == steps_after
    assert [index for index in range(schedule.num_turns) if is_evaluation_due(config, schedule, index)] == evaluated
    assert [evaluations_before(config, schedule, index + 1) for index in evaluated] == [*range(1, len(evaluated) + 1)]
    assert evaluations_before(config, schedule, 0) == 0


def test_roles_trained_between_evaluations():
    config = make_config("tango")  # WW GG VGG VG
    found = [{turn.role for turn in turns_since_evaluation(config, make_schedule(config), done)}
             for done in (0, 2, 4, 7, 9)]
    assert found == [set(), {"verifier"}, {"generator"}, {"generator", "verifier"}, {"generator", "verifier"}]


def test_the_arms_see_the_same_roles_at_the_same_generator_steps():
    # What a curve over generator steps compares: the verifier turns of tango and of fixed_generator pair up.
    tango, alone = (make_schedule(make_config(arm, generator_steps=8)) for arm in ("tango", "fixed_generator"))
    steps = [[generator_steps_after(schedule, turn.index) for turn in schedule.turns() if turn.role == "verifier"]
             for schedule in (tango, alone)]
    assert steps[0] == steps[1] == [0, 0, 2, 4, 6, 8]


def test_several_verifier_turns_per_cycle_of_a_fixed_generator():
    config = make_config("fixed_generator", warmup_steps=0, generator_steps=6, n_g=3, n_v=2, every=3)
    schedule = make_schedule(config)
    assert letters(schedule) == "VVVV"
    # After v turns 3 * v / 2 generator steps, rounded down: 1, 3, 4, 6.
    assert [generator_steps_after(schedule, index) for index in range(4)] == [1, 3, 4, 6]
    assert [index for index in range(4) if is_evaluation_due(config, schedule, index)] == [1, 3]


@pytest.mark.parametrize("arm, changes, turns, evaluated", [
    ("tango", {"warmup_steps": 0, "generator_steps": 2, "every": 9}, "GGV", [2]),  # the end, and nothing else
    ("tango", {"warmup_steps": 0, "generator_steps": 2, "every": 1}, "GGV", [0, 1, 2]),
    ("tango", {"warmup_steps": 1, "generator_steps": 4, "every": 4}, "WGGVGGV", [0, 5, 6]),
    ("fixed_generator", {"warmup_steps": 3, "generator_steps": 1}, "WWW", [2]),  # the warm-up is all there is
    ("fixed_generator", {"warmup_steps": 0, "generator_steps": 1}, "", []),
    ("fixed_verifier_warm", {"warmup_steps": 1, "generator_steps": 3, "n_g": 3, "n_v": 3}, "WGGG", [0, 2, 3]),
])
def test_turns_at_the_edges(arm, changes, turns, evaluated):
    config = make_config(arm, **changes)
    schedule = make_schedule(config)
    assert letters(schedule) == turns
    assert [index for index in range(schedule.num_turns) if is_evaluation_due(config, schedule, index)] == evaluated


def test_alpha_counts_the_generators_own_steps():
    schedule = make_schedule(make_config("tango"))
    assert [turn_at(schedule, index).generator_step for index in range(9)] == [0, 0, 0, 1, 2, 2, 3, 4, 4]
