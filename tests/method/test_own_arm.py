"""Arms of a user: what a record must be, what settings show of it, what is stored, and algorithms that fail."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest

from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.config import default_config
from tango_jax.loop.run import rehearsed
from tango_jax.method import relatives, tango
from tango_jax.method.arms import ARMS
from tango_jax.method.load import load_method
from tango_jax.method.own_arm import load_arm, read_arm, shares_policy, stored_arm
from tango_jax.method.rewards import agreement
from tango_jax.records import Memory
from tango_jax.rl import algorithms
from tango_jax.runtime.user_code import given
from tango_jax.text.prompts import JUDGE
from tango_jax.tracking.turn_metrics import turn_metrics

HEAD = """
import dataclasses
import numpy as np
from tango_jax.method.arms import ARMS
from tango_jax.records import StepRewards
GRPO = ARMS["grpo"]
def solve(t):
    return GRPO.turns["generator"](t)
mine = dataclasses.replace(GRPO, label="mine", turns={"generator": solve})
"""
MISTAKES = {
    "no such file": ("", {"arm": "none.py:x"}, r"arm=none\.py:x: there is no file none\.py"),
    "no such name": ("", {"arm": "own.py:x"}, r"arm=own\.py:x: own\.py has no record 'x'"),
    "not an arm": ("arm = 3\n", {"arm": "own.py:arm"}, r"arm=own\.py:arm is an int; it must be an Arm"),
    "a known name": ("tango = ARMS['tango']\n", {"arm": "own.py:tango"}, "has the name of an arm that is built in"),
    "no turns": ("arm = dataclasses.replace(GRPO, turns={})\n", {"arm": "own.py:arm"}, "turns must be a mapping from"),
    "another role": ("arm = dataclasses.replace(GRPO, turns={'judge': solve})\n", {"arm": "own.py:arm"},
                     "turns must be a mapping from generator or verifier to a function of a Turn, not "),
    "no function": ("arm = dataclasses.replace(GRPO, turns={'generator': 'solve'})\n", {"arm": "own.py:arm"},
                    "turns must be a mapping from generator or verifier to a function of a Turn, not "),
    "another signature": ("def f(a, b):\n    pass\narm = dataclasses.replace(GRPO, turns={'generator': f})\n",
                          {"arm": "own.py:arm"}, r"own\.py, line \d+: TypeError: f\(\) missing 1 required positional"),
    "a verifier that it does not have": (
        "arm = dataclasses.replace(mine, uses_verifier=True)\n", {"arm": "own.py:arm"},
        r"arm=own\.py:arm has uses_verifier=True, and its turns do not sample from the verifier: set it to False"),
    "no algorithm": ("a = 3\n", {"generator.loss.algorithm": "own.py:a"}, "is an int; it must be an Algorithm"),
    "a term of another shape": ("def t(tokens):\n    return tokens.adv_BT.sum()\n",
                                {"verifier.loss.term": "own.py:t"}, r"must return a float for each token, \[2, 5\]"),
    "a term that fails": ("def t(tokens):\n    return tokens.nothing\n", {"generator.loss.term": "own.py:t"},
                          r"own\.py, line \d+: AttributeError: .*'nothing'"),
    "a memory whose names are not strings": (
        "def f(t):\n    return dataclasses.replace(solve(t), memory=t.memory.replace(own={5: 1.0}))\n"
        "arm = dataclasses.replace(mine, turns={'generator': f})\n", {"arm": "own.py:arm"},
        r"memory\.own has 5: 1\.0; it must have finite numbers by name"),
    "a memory of arrays": (
        "def f(t):\n    return dataclasses.replace(solve(t), memory=t.memory.replace(own={'a': np.ones(2)}))\n"
        "arm = dataclasses.replace(mine, turns={'generator': f})\n", {"arm": "own.py:arm"},
        r"memory\.own has 'a': array\(\[1\., 1\.\]\); it must have finite numbers by name"),
    "step rewards of fewer responses": (
        "def f(t):\n    steps = StepRewards(np.zeros((1, 2)), np.zeros((1, 2), bool), [None])\n"
        "    return dataclasses.replace(solve(t), step_rewards=[steps])\n"
        "arm = dataclasses.replace(mine, turns={'generator': f})\n", {"arm": "own.py:arm"},
        r"the lesson's step rewards are of 1 responses; they must be of the \d+ that are trained on"),
    "a measure of trust that measures nothing": (
        "from support.own_turns import debate\n", {"arm": "own.py:debate", "rl.trust": (0.4, 0.55)},
        r"rl\.trust=\(0\.4, 0\.55\) measures judgements of solutions, and this turn samples none: set rl\.trust=\(\)"),
    "arms of one name": ("", {"ablation.arms": ("own.py:mine", "other.py:mine")},
                         "has two arms with the same name"),
}


@pytest.mark.parametrize("text, changed, message", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_that_settings_show_is_one_line(text, changed, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("own.py", "other.py"):
        Path(name).write_text(HEAD + text)
    config = default_config()
    config.update_from_flattened_dict(changed)
    with pytest.raises(ValueError, match=message) as error:
        validate(config)
    lines = [line for line in str(error.value).splitlines() if "own.py" in line or "none.py" in line]
    assert lines and any(len(line) < 500 for line in lines)


OF_ROWS = "def outcome(reward_B, is_action_BT, M, loss):\n    return reward_B\n"
FAILING = "def outcome(reward_B, is_action_BT, M, loss):\n    raise KeyError('group')\n"
INFINITE = "def outcome(reward_B, is_action_BT, M, loss):\n    return is_action_BT / 0.0\n"
ALGORITHM = """
from tango_jax.rl.algorithms import ALGORITHMS, Algorithm
mine = Algorithm(outcome, ALGORITHMS["grpo"].step_fn)
"""


@pytest.mark.parametrize("text, message", [
    (OF_ROWS, r"its advantages are of shape \[8\]; there must be a finite number for each token, \[8, \d+\]"),
    (INFINITE, r"its advantages are of shape \[8, \d+\] and not finite; there must be a finite number for each token"),
    (FAILING, "KeyError: group"),
])
def test_an_algorithm_that_fails_is_found_before_the_run(text, message, tmp_path):
    (tmp_path / "own.py").write_text(text + ALGORITHM)
    with pytest.raises(ValueError) as error:
        validate(load_config("tiny", ["arm=grpo", f"generator.loss.algorithm={tmp_path}/own.py:mine"]))
    assert "\n" not in str(error.value)
    place = r"^arm=grpo, the generator's turn: generator\.loss\.algorithm=\S+own\.py:mine: \S+own\.py, line \d: "
    with pytest.raises(ValueError, match=place + message):
        raise ValueError(str(error.value))


COPIES = {
    "second_try": dataclasses.replace(ARMS["second_try"], label="a copy"),
    "meta_judged": dataclasses.replace(ARMS["meta_judged"], label="a copy"),
}


@pytest.mark.parametrize("has_algorithm", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_an_exact_copy_of_an_arm_starts_also_with_an_own_algorithm(name, has_algorithm):
    grpo = algorithms.ALGORITHMS["grpo"]
    own = {"arm": COPIES[name]}
    if has_algorithm:
        own |= {f"{role}.loss.algorithm": grpo._replace(formula="own") for role in ("generator", "verifier")}
    with given(own) as named:
        config = load_config("tiny", [f"{key}={value}" for key, value in named.items()])
        validate(config)
        assert shares_policy(config) == ARMS[name].is_one_policy
        method, _ = rehearsed(config, {})
        plain = load_method(load_config("tiny", [f"arm={name}"]))
    for role in ("generator", "verifier"):
        assert method.further_prompts(role) == plain.further_prompts(role)
        ours, theirs = (one.rehearsals[role]._replace(example=None) for one in (method, plain))
        assert ours == theirs


@pytest.mark.parametrize("name", ["generator/steps_mean", "generator/entropy", "generator/step_count_corr", "step",
                                  "time/mine", "verifier/live_accept_gap", "generator/length_mean"])
def test_a_metric_that_is_measured_anyway_is_refused_before_the_run(name):
    def solve(t):
        lesson = ARMS["grpo"].turns["generator"](t)
        return dataclasses.replace(lesson, metrics={**lesson.metrics, metric: 1.0})

    with given({"arm": dataclasses.replace(ARMS["grpo"], label="mine", turns={"generator": solve})}) as named:
        config = load_config("tiny", [f"arm={named['arm']}"])
        metric = "generator/mine"
        rehearsed(config, {})
        metric = name
        with pytest.raises(ValueError, match=f"{name}.*: rename"):
            rehearsed(config, {})


@pytest.mark.parametrize("name", ARMS)
def test_no_arm_has_such_a_metric(name):
    settings = ["verifier.loss.kl_coef=0.01", "generator.max_prompt=200", "verifier.max_prompt=300"]
    method, _ = rehearsed(load_config("tiny", [f"arm={name}", *settings, "task.verifier_words=(1, 1)"]), {})
    assert method.rehearsals.keys() == ARMS[name].turns.keys()


def test_what_a_method_remembers_is_the_same_after_a_resume():
    memory = Memory(own={"loss": np.float32(0.1), "count": 3, "is_on": True})
    assert Memory.restored(json.loads(json.dumps(memory.stored()))) == memory
    with pytest.raises(ValueError, match="memory.own has 'x': nan"):
        memory.replace(own={"x": float("nan")})


def test_judgements_to_a_users_prompt_count_as_those_to_the_verifiers():
    """In the measure of trust and in the metrics."""
    strict = dataclasses.replace(JUDGE, name="strict", stream="strict")

    def judge(prompt, t):
        solutions = t.sample("generator", t.problems("verifier"))
        judged, reward = agreement(t, t.sample("verifier", solutions, t.rl.samples_per_prompt, prompt=prompt))
        return tango.class_balanced(t, judged, reward)

    measured = []
    for prompt in (strict, JUDGE):
        turns = ARMS["tango"].turns | {"verifier": functools.partial(judge, prompt)}
        with given({"arm": dataclasses.replace(ARMS["tango"], label="mine", turns=turns)}) as named:
            method = load_method(load_config("tiny", [f"arm={named['arm']}", "rl.trust=(0.4, 0.55)"]))
        t, lesson = method.rehearsals["verifier"].example
        scores = {name: value for name, value in turn_metrics(t, lesson, {}).items() if "f1" in name}
        measured.append((lesson.memory.evidence, scores))
    assert any(measured[0][0]) and len(measured[0][1]) == 6
    assert measured[0] == measured[1]


def test_a_users_turns_may_be_those_of_the_package():
    turns = {"generator": relatives.solve_twice, "verifier": relatives.judge_and_be_judged}
    with given({"arm": dataclasses.replace(ARMS["tango"], label="mixed", turns=turns)}) as named:
        method = load_method(load_config("tiny", [f"arm={named['arm']}"]))
    assert {role: [one.name for one in method.further_prompts(role)] for role in ("generator", "verifier")} == {
        "generator": ["second_try"], "verifier": ["second_judgement"]}
    assert method.stage_one_kind() == "second_try,second_judgement"


def test_lists_and_bools_are_taken_as_arrays():
    def solve(t):
        lesson = ARMS["grpo"].turns["generator"](t)
        (weight, adv_BT), = lesson.terms.values()
        reward = lesson.reward._replace(reward_B=lesson.reward.reward_B > 0)
        return dataclasses.replace(lesson, reward=reward, terms={"listed": (weight, (adv_BT > 0).tolist())})

    with given({"arm": dataclasses.replace(ARMS["grpo"], label="lists", turns={"generator": solve})}) as named:
        rehearsal = load_method(load_config("tiny", [f"arm={named['arm']}"])).rehearsals["generator"]
    assert rehearsal.learner[:2] == (4, 2)


def test_the_record_of_an_arm_is_stored_whole():
    for name, arm in ARMS.items():
        stored = json.loads(json.dumps(stored_arm(name)))
        again = read_arm(stored)
        assert stored["name"] == name and set(again.turns) == set(arm.turns)
        assert dataclasses.replace(again, turns={}) == dataclasses.replace(arm, turns={})
    with pytest.raises(ValueError, match=r"the stored record of an arm is damaged \(KeyError"):
        read_arm({"turns": {}})


def test_a_name_that_is_none_is_told_with_the_closest():
    with pytest.raises(ValueError, match=r"arm='tangoo' is not one of tango, grpo, .* \(did you mean tango\?\)"):
        load_arm("tangoo")
    with pytest.raises(ValueError, match="arm='xyz' is not one of tango, grpo, .*; your own arm is FILE.py:name"):
        load_arm("xyz")


def test_every_arm_has_its_own_label_and_look():
    assert len({arm.label for arm in ARMS.values()}) == len({arm.look for arm in ARMS.values()}) == len(ARMS)
    assert all(arm.help for arm in ARMS.values())
