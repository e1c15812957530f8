"""Arms with the same seed are paired: the same problems at the same generator step, and the same random numbers."""

import types

import numpy as np
import pytest

from support.paths import CONFIGS
from support.turns import LOGP, solution, verification
from tango_jax.cli.command_line import load_config
from tango_jax.loop import turn as turns
from tango_jax.loop.turn import RunContext, run_turn
from tango_jax.method.arms import ARMS
from tango_jax.method.load import load_method
from tango_jax.method.own_arm import make_schedule
from tango_jax.method.texts import with_parents
from tango_jax.records import Memory, Responses, Rollout, problem_of
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.tasks.registry import make_task


@pytest.fixture
def asked(monkeypatch):
    """Every call of a role in a run without models: (prompt, ids of problems, random key). Every other solution is
    rejected; where groups have a signal, half of the solutions are right."""
    calls, has_signal = [], [False]

    def respond(context, states, role, parents, group_size, key_data, is_greedy=False, prompt=None):
        ids = [problem_of(parent).id for parent in parents]
        calls.append((prompt.name, ids, tuple(int(word) for word in key_data)))
        owners = [parent for parent in parents for _ in range(group_size)]
        if role == "generator":
            records = [solution(has_signal[0] and row % 2 == 0, text="\\boxed{a}") for row in range(len(owners))]
        else:
            accepts = [bool(row % 2 and has_signal[0]) for row in range(len(owners))]
            records = [verification("CORRECT" if one else "INCORRECT") for one in accepts]
        rollout = Rollout((np.zeros(2, int),) * len(owners), (np.full(2, LOGP, np.float32),) * len(owners),
                          np.zeros(len(owners), bool), 1, len(owners),
                          (np.array([1, -1]),) * len(owners) if prompt.is_scored else None)
        return Responses(role, parents, [[1]] * len(parents), group_size, rollout, with_parents(records, owners), {},
                         prompt.name)

    monkeypatch.setattr(turns, "respond", respond)
    monkeypatch.setattr(turns, "update_policy", lambda *arguments: (None, {}))
    monkeypatch.setattr(turns, "turn_metrics", lambda *arguments: {})
    monkeypatch.setattr(turns, "turn_flops", lambda *arguments: {})
    monkeypatch.setattr(turns.PolicyWork, "reference_logps",
                        lambda self, responses, prompt: np.zeros((len(responses), 48), np.float32))

    def run(arm: str, *overrides: str, signal: bool = False) -> dict:
        has_signal[0] = signal
        config = load_config(str(CONFIGS / "tiny.py"), [f"arm={arm}", "task.verifier_words=(1,1)", *overrides])
        policies = {role: types.SimpleNamespace(roles=(role,)) for role in ("generator", "verifier")}
        context = RunContext(config, make_task(config, {}), policies, {}, PhaseTimer(), load_method(config))
        memory, states, seen = Memory(), {"generator": None, "verifier": None}, {}
        for place in make_schedule(config).turns():
            calls.clear()
            memory = run_turn(context, states, memory, place).memory
            seen[place.role, place.role_step] = list(calls)
        return seen

    return run


def test_every_arm_gets_the_same_problems_and_random_numbers_at_the_same_generator_step(asked):
    by_arm = {name: asked(name) for name, arm in ARMS.items() if "generator" in arm.turns and name != "grpo_curriculum"}
    assert len(by_arm) >= 5
    for step in range(6):
        solved = [seen["generator", step][0] for seen in by_arm.values()]
        assert all(one == solved[0] for one in solved), step
        judged = [seen["generator", step][1] for seen in by_arm.values() if len(seen["generator", step]) > 1]
        assert len(judged) >= 3 and all(one == judged[0] for one in judged), step


def test_the_verifiers_turns_are_paired_too(asked):
    tango, alone = asked("tango"), asked("fixed_generator")
    steps = [key for key in tango if key[0] == "verifier"]
    assert len(steps) == 4 and all(tango[key] == alone[key] for key in steps)


def test_no_turn_repeats_problems_or_random_numbers(asked):
    seen = asked("tango")
    problems = [problem for calls in seen.values() for problem in calls[0][1]]
    keys = [key for calls in seen.values() for _, _, key in calls]
    assert len(set(problems)) == len(problems) and len(set(keys)) == len(keys)
    assert {problem.split("/")[1] for problem in problems} == {"rl", "rl_verifier"}


def test_a_curriculum_has_its_own_problems_and_the_same_random_numbers(asked):
    short, long = asked("grpo_curriculum"), asked("grpo")
    for step in range(6):
        assert {problem.split("/")[1] for problem in short["generator", step][0][1]} == {"rl_curriculum"}
        assert short["generator", step][0][2] == long["generator", step][0][2]


def test_dynamic_sampling_goes_on_behind_the_problems_that_it_took(asked):
    """No group has a signal here: each turn takes three batches of 4, with random numbers of their own."""
    seen = asked("grpo", "rl.dynamic_sampling=2")
    for step in range(6):
        calls = seen["generator", step]
        assert [problem for _, problems, _ in calls for problem in problems] == [
            f"last_letter/rl/{index}" for index in range(12 * step, 12 * step + 12)
        ]
        assert len({key for _, _, key in calls}) == 3
        assert calls[0][2] == asked("grpo")["generator", step][0][2]


def test_dynamic_sampling_leaves_arms_paired_whatever_they_draw(asked):
    """One arm draws one batch a turn, the other three: both begin every turn with the same problems."""
    one, three = asked("tango", "rl.dynamic_sampling=2", signal=True), asked("grpo", "rl.dynamic_sampling=2")
    for step in range(6):
        assert len(one["generator", step]) == 2 and len(three["generator", step]) == 3  # the first asks the verifier
        assert one["generator", step][0] == three["generator", step][0]
    all_of_one = [problem for step in range(4) for problem in one["verifier", step][0][1]]
    assert all_of_one == [f"last_letter/rl_verifier/{12 * step + place}" for step in range(4) for place in range(4)]
