"""An arm, a credit, an algorithm and a loss term of the user's own: by file and by object, resumed, and mistaken."""

import dataclasses
import inspect
import json
import re
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from tango_jax.loop.try_method import try_method

from tango_jax.cli.validation import validate
from tango_jax.config import default_config
from tango_jax.method.arms import ARMS, Arm, Look
from tango_jax.method.own_arm import load_arm, read_arm, stored_arm
from tango_jax.records import Credit, Rewards
from tango_jax.rl import algorithms, credit
from tango_jax.runtime.console import Console
from tango_jax.runtime.user_code import given
from tango_jax.tasks.registry import make_task
from tango_jax.tracking.loggers import RunLog
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.provenance import begin, read_provenance
from tango_jax.train import load_config, train
from torture.runs import ROLES, SMALL

SILENT = Console(enabled=False)


def halved_outcome(reward_B, is_action_BT, group_size, loss):
    return np.float32(0.5) * reward_B[:, None] * is_action_BT


def first_step_alone(so_far):
    found = credit.steps_credit(so_far, [[(True,) * len(s.steps) or None for s in so_far.answers["generator"].records]])
    return found._replace(metrics=found.metrics | {"generator/mine": 7.0})


def less_entropy(tokens):
    return 0.01 * tokens.entropy_BT


GRPO = ARMS["grpo"]
MINE = dataclasses.replace(
    GRPO, label="mine", look=Look("#123456", ":", "x"),
    turns={"generator": dataclasses.replace(GRPO.turns["generator"], credit=first_step_alone)},
)  # fmt: skip
HALVED = algorithms.Algorithm(halved_outcome, algorithms.ALGORITHMS["grpo"].step_fn, formula="half of the reward")
# The same as a file that a setting can name.
METHOD = "\n".join([
    "import dataclasses", "import numpy as np", "from tango_jax.method.arms import ARMS, Arm, Look, TurnPlan",
    "from tango_jax.rl import algorithms, credit", "",
    *(inspect.getsource(function) for function in (halved_outcome, first_step_alone, less_entropy)),
    'GRPO = ARMS["grpo"]',
    'mine = dataclasses.replace(GRPO, label="mine", look=Look("#123456", ":", "x"),',
    '    turns={"generator": dataclasses.replace(GRPO.turns["generator"], credit=first_step_alone)})',
    'halved = algorithms.Algorithm(halved_outcome, algorithms.ALGORITHMS["grpo"].step_fn)',
])  # fmt: skip


def settings(*overrides: str):
    same_shapes = ("mesh.fsdp=1", "sft.steps=0", "max_prompt=64", "max_response=48")  # fewer programs to compile
    small = [*SMALL, *(f"{role}.{setting}" for role in ROLES for setting in same_shapes)]
    return load_config("tiny", [*small, "rl.generator_steps=1", "rl.warmup_steps=0", "compile_cache=", *overrides])


def by_file(folder: Path):
    (folder / "method.py").write_text(METHOD)
    place = folder / "method.py"
    return settings(f"arm={place}:mine", f"generator.loss.algorithm={place}:halved",
                    f"generator.loss.term={place}:less_entropy")  # fmt: skip


def numbers(workdir: Path) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "throughput/", "memory/"))}
            for row in read_metrics(workdir / "metrics.jsonl")]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A finished run of the file's method."""
    folder = tmp_path_factory.mktemp("method")
    with open(folder / "log", "w") as log:
        train(by_file(folder), folder / "run", Console(stream=log))
    return folder


def test_a_run_by_file_learns_by_its_method_and_stores_it(made):
    summary = json.loads((made / "run/summary.json").read_text())
    assert summary["arm"] == "mine"
    assert "\narm mine (mine): " in (made / "log").read_text()  # its name and label, without the path
    [turn] = [row for row in numbers(made / "run") if row["phase"] == "generator"]
    assert turn["generator/mine"] == 7.0 and turn["generator/alpha"] > 0  # of its credit, which blends in steps
    stored = read_provenance(made / "run")
    assert {"arm", "generator.loss.algorithm", "generator.loss.term"} <= set(stored["files"])
    assert (made / "run" / stored["files"]["arm"]["copy"]).read_text() == METHOD
    assert stored["arm"]["name"] == "mine" and stored["arm"]["look"]["colour"] == "#123456"
    again = read_arm(stored["arm"])
    assert (again.label, again.look, again.turns["generator"].credit) == ("mine", MINE.look, "first_step_alone")
    assert again.turns["generator"].calls == MINE.turns["generator"].calls
    [row] = [json.loads(line) for path in (made / "run/rollouts").glob("turn_*") for line in path.open()][:1]
    assert [term["name"] for term in row["advantage"]["terms"]] == ["outcome", "steps"]


def test_by_object_it_is_the_same_and_resumes_only_from_the_same_source(made, tmp_path):
    def run(arm: Arm) -> dict:
        return train(settings(), tmp_path / "run", SILENT, arm=arm, algorithms={"generator": HALVED},
                     loss_terms={"generator": less_entropy})  # fmt: skip

    summary = run(MINE)
    assert numbers(tmp_path / "run") == numbers(made / "run") and summary["arm"] == "mine"
    assert json.loads((tmp_path / "run/config.json").read_text())["arm"] == "python:mine"
    assert run(MINE) == summary  # finished

    def first_step_alone(so_far):  # another source of the same name
        return credit.outcome_credit(so_far)

    plan = dataclasses.replace(MINE.turns["generator"], credit=first_step_alone)
    with pytest.raises(ValueError, match=r"another method \(arm: the text of the object mine differs from") as error:
        run(dataclasses.replace(MINE, turns={"generator": plan}))
    [stored] = re.findall(r"the one stored in (\S+)\)", str(error.value))
    assert Path(stored).parent == tmp_path / "run/user_files" and "generator/mine" in Path(stored).read_text()
    assert str(Path.cwd()) not in str(error.value)
    with pytest.raises(ValueError, match="arm=python:mine was handed over by a Python program: call .*train with it"):
        train(load_config(str(tmp_path / "run/config.json")), tmp_path / "run", SILENT)


def test_an_edited_credit_is_no_resumption(made):
    (made / "method.py").write_text(METHOD.replace("7.0", "8.0"))
    try:
        with pytest.raises(ValueError, match=r"was begun with another method \(arm: .*method\.py has changed"):
            train(by_edited_file(made), made / "run", SILENT)
    finally:
        (made / "method.py").write_text(METHOD)


def by_edited_file(folder: Path):
    place = folder / "method.py"
    return settings(f"arm={place}:mine", f"generator.loss.algorithm={place}:halved",
                    f"generator.loss.term={place}:less_entropy")  # fmt: skip


def test_a_turn_may_name_files_for_its_reward_and_credit(tmp_path):
    (tmp_path / "parts.py").write_text(
        "from tango_jax.rl import credit\n"
        "def double(answers, rl):\n"
        "    usual = credit.outcome_reward(answers, rl)\n"
        "    return usual._replace(reward_B=2 * usual.reward_B)\n"
        "def shared(so_far):\n    return credit.outcome_credit(so_far)\n")
    plan = dataclasses.replace(GRPO.turns["generator"], reward=f"{tmp_path}/parts.py:double",
                               credit=f"{tmp_path}/parts.py:shared")  # fmt: skip
    summary = train(settings(), tmp_path / "run", SILENT, arm=dataclasses.replace(GRPO, label="parts",
                                                                                turns={"generator": plan}))
    assert summary["arm"] == "parts"
    files = read_provenance(tmp_path / "run")["files"]
    assert {"arm, reward of generator", "arm, credit of generator"} <= set(files)
    with pytest.raises(ValueError, match="'judge' is no role: choose from generator and verifier"):
        train(settings(), tmp_path / "other", SILENT, rewards={"judge": len})


# ------------------------------------------------------------------------------------------------ mistakes in one line


HEAD = METHOD + "\n"
CREDIT = 'arm = dataclasses.replace(GRPO, label="x", turns={"generator": dataclasses.replace(GRPO.turns["generator"], '
# An arm of two calls and a third, of which one is replaced.
TWICE = (
    "from tango_jax.method.arms import SOLVE_AND_BE_JUDGED, Call\n"
    "def made(changed):\n"
    "    calls = {call.name: call for call in SOLVE_AND_BE_JUDGED.calls} | changed\n"
    "    plan = dataclasses.replace(SOLVE_AND_BE_JUDGED, calls=tuple(calls.values()))\n"
    "    return dataclasses.replace(GRPO, turns={'generator': plan})\n"
    "arm = made({"
)  # fmt: skip
MISTAKES = {
    "no such file": ("", {"arm": "none.py:x"}, r"arm=none\.py:x: there is no file none\.py"),
    "no such name": (HEAD, {"arm": "own.py:x"}, r"arm=own\.py:x: own\.py has no record 'x'"),
    "not an arm": (HEAD + "arm = 3\n", {"arm": "own.py:arm"}, r"arm=own\.py:arm is an int; it must be an Arm"),
    "a known name": (HEAD + "tango = ARMS['tango']\n", {"arm": "own.py:tango"},
                     "has the name of an arm that is built in"),
    "no turns": (HEAD + "arm = dataclasses.replace(GRPO, turns={})\n", {"arm": "own.py:arm"},
                 "turns must be a mapping from"),
    "another role": (HEAD + "arm = dataclasses.replace(GRPO, turns={'judge': GRPO.turns['generator']})\n",
                     {"arm": "own.py:arm"}, "turns must be a mapping from generator or verifier to a TurnPlan"),
    "no calls": (HEAD + CREDIT + "calls=())})\n", {"arm": "own.py:arm"}, "calls must be Calls of the generator, then"),
    "second solutions of several verifications": (
        HEAD + "from tango_jax.method.arms import SOLVE_TWICE, Call\n"
        "calls = (SOLVE_TWICE.calls[0], Call('verifier', 'verifications_per_solution'), SOLVE_TWICE.calls[2])\n"
        "arm = dataclasses.replace(GRPO, turns={'generator': dataclasses.replace(SOLVE_TWICE, calls=calls)})\n",
        {"arm": "own.py:arm"}, "a second solution follows one verification of each solution: leave the samples of b"),
    "second solutions of all": (
        HEAD + TWICE + "'second_solution': Call('generator', '', text='second_solution')})\n", {"arm": "own.py:arm"},
        "about of the second_solution='' is not one of rejected"),
    "several second judgements": (
        HEAD + TWICE + "'second_judgement': Call('verifier', 'samples_per_prompt', text='second_judgement')})\n",
        {"arm": "own.py:arm"}, "samples of the second_judgement='samples_per_prompt' is not one of "),
    "a choice by labels where the generator learns": (
        HEAD + TWICE + "'verifier': Call('verifier', '', about='one_of_either_label')})\n", {"arm": "own.py:arm"},
        "about of the verifier='one_of_either_label' is not one of "),
    "unknown credit": (HEAD + CREDIT + "credit='mine')})\n", {"arm": "own.py:arm"},
                       r"turns\['generator'\], credit='mine' is not one of outcome_credit, verified_majority_"),
    "credit of another signature": (HEAD + "def f(a, b):\n    pass\n" + CREDIT + "credit='own.py:f')})\n",
                                    {"arm": "own.py:arm"}, r"own\.py, line \d+: missing a required argument"),
    "no algorithm": (HEAD + "a = 3\n", {"generator.loss.algorithm": "own.py:a"}, "is an int; it must be an Algorithm"),
    "a term of another shape": (HEAD + "def t(tokens):\n    return tokens.adv_BT.sum()\n",
                                {"verifier.loss.term": "own.py:t"}, r"must return a float for each token, \[2, 5\]"),
    "a term that fails": (HEAD + "def t(tokens):\n    return tokens.nothing\n", {"generator.loss.term": "own.py:t"},
                          r"own\.py, line \d+: AttributeError: .*'nothing'"),
    "arms of one name": (HEAD, {"ablation.arms": ("own.py:mine", "other.py:mine")}, "has two arms of one name"),
}  # fmt: skip


@pytest.mark.parametrize("text, changed, message", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_that_settings_show_is_one_line(text, changed, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("own.py", "other.py"):
        Path(name).write_text(text or HEAD)
    config = default_config()
    config.update_from_flattened_dict(changed)
    with pytest.raises(ValueError, match=message) as error:
        validate(config)
    lines = [line for line in str(error.value).splitlines() if "own.py" in line or "none.py" in line]
    assert lines and any(len(line) < 500 for line in lines)


def no_credit(so_far):
    return so_far.reward_B


def short_credit(so_far):
    return Credit(np.zeros((1, 1), np.float32), so_far.counters, {})


def infinite_credit(so_far):
    adv_BT = np.full(so_far.is_action_BT.shape, np.inf, np.float32)
    return Credit(adv_BT, so_far.counters, {})


def failing_credit(so_far):
    return so_far.answers["judge"]


def short_reward(answers, rl):
    return Rewards(np.zeros(17, np.float32), {})


def no_reward(answers, rl):
    return 1.0


def flat_outcome(reward_B, is_action_BT, group_size, loss):
    return reward_B


def failing_outcome(reward_B, is_action_BT, group_size, loss):
    raise KeyError("group")


@pytest.mark.parametrize("outcome_fn, message", [
    (flat_outcome, r"generator\.loss\.algorithm=\S+ its advantages are of shape \[2\]; there must be a finite number"),
    (failing_outcome, r"arm=grpo, turns\['generator'\]: its calls, reward, credit and .* do not fit \(KeyError"),
])  # fmt: skip
def test_an_algorithm_that_fails_is_found_before_the_run(outcome_fn, message, monkeypatch):
    own = algorithms.Algorithm(outcome_fn, algorithms.ALGORITHMS["grpo"].step_fn)
    monkeypatch.setattr(sys.modules[__name__], "own_algorithm", own, raising=False)
    monkeypatch.setitem(sys.modules, "arms_under_test", sys.modules[__name__])
    config = settings("arm=grpo", "generator.loss.algorithm=arms_under_test:own_algorithm")
    with pytest.raises(ValueError, match=message):
        try_method(config, make_task(config, {}))


@pytest.mark.parametrize("role, changed", [
    ("generator", {"reward": "verdict_reward"}), ("verifier", {"credit": "informed_credit"}),
    ("verifier", {"reward": "twice_judged_reward"}), ("generator", {"credit": "verified_majority_credit", "calls": 1})])
def test_functions_that_do_not_fit_the_calls_are_found_before_the_run(role, changed, monkeypatch):
    tango = ARMS["tango"]
    if "calls" in changed:
        changed = changed | {"calls": tango.turns[role].calls[:1]}
    turns = tango.turns | {role: dataclasses.replace(tango.turns[role], **changed)}
    monkeypatch.setattr(sys.modules[__name__], "arm", dataclasses.replace(tango, label="x", turns=turns), raising=False)
    monkeypatch.setitem(sys.modules, "arms_under_test", sys.modules[__name__])
    config = settings("arm=arms_under_test:arm")
    with pytest.raises(ValueError, match=rf"arm=arms_under_test:arm, turns\['{role}'\]: its calls, reward, .* do not"):
        try_method(config, make_task(config, {}))


def listed_credit(so_far):
    return credit.outcome_credit(so_far)._replace(adv_BT=so_far.is_action_BT.tolist())


def test_lists_and_bools_are_taken_as_arrays(monkeypatch):
    def whole_reward(answers, rl):
        return Rewards(np.array([True, False]), {})

    plan = dataclasses.replace(GRPO.turns["generator"], reward=whole_reward, credit=listed_credit)
    with given({"arm": dataclasses.replace(MINE, turns={"generator": plan})}) as named:
        config = settings(f"arm={named['arm']}")
        method = try_method(config, make_task(config, {}))
        reward = method.rewards["generator"]({"generator": types.SimpleNamespace(records=[0, 0])}, config.rl)
    assert reward.reward_B.dtype == np.float32


@pytest.mark.parametrize("changed, message", [
    ({"credit": no_credit}, r"it returned .*; it must return a Credit"),
    ({"credit": short_credit}, r"adv_BT is of shape \[1, 1\]; it must have a finite number for each token, \[2, \d+\]"),
    ({"credit": infinite_credit}, r"adv_BT is of shape \[2, \d+\] and not finite"),
    ({"credit": failing_credit}, r"line \d+: KeyError: judge"),
    ({"reward": short_reward}, r"reward_B is of shape \[17\]; it must have a finite number for each response of"),
    ({"reward": no_reward}, r"it returned 1\.0; it must return Rewards"),
])  # fmt: skip
def test_a_function_that_fails_is_found_before_the_run(changed, message, monkeypatch):
    plan = dataclasses.replace(ARMS["tango"].turns["generator"], **changed)
    arm = dataclasses.replace(ARMS["tango"], label="x", turns=ARMS["tango"].turns | {"generator": plan})
    monkeypatch.setattr(sys.modules[__name__], "arm", arm, raising=False)
    monkeypatch.setitem(sys.modules, "arms_under_test", sys.modules[__name__])
    config = settings("arm=arms_under_test:arm")
    [kind] = changed
    place = rf"^arm=arms_under_test:arm, turns\['generator'\], {kind}=\w+: .*"
    with pytest.raises(ValueError, match=place + message) as error:
        try_method(config, make_task(config, {}))
    assert "\n" not in str(error.value) and str(error.value).endswith("made up to try the function before the run")


def loud_credit(so_far):
    found = credit.outcome_credit(so_far)
    return found._replace(metrics=found.metrics | {"generator/reward/outcome": 1.0, "generator/length_max": 1.0})


def test_a_metric_that_another_part_of_the_turn_has_is_found_before_the_run():
    plan = dataclasses.replace(GRPO.turns["generator"], credit=loud_credit)
    with given({"arm": dataclasses.replace(MINE, turns={"generator": plan})}) as named:
        config = settings(f"arm={named['arm']}")
        with pytest.raises(ValueError, match="of the name generator/length_max and generator/reward/outcome: rename"):
            try_method(config, make_task(config, {}))


# --------------------------------------------------------------------------------------------------------- the pieces


def scaled(scale):
    def scaled_credit(so_far):
        return credit.outcome_credit(so_far)._replace(metrics={"generator/scale": scale})

    return scaled_credit


def test_what_a_closure_holds_is_part_of_the_method(tmp_path):
    def started(scale):
        plan = dataclasses.replace(GRPO.turns["generator"], credit=scaled(scale))
        with given({"arm": dataclasses.replace(MINE, turns={"generator": plan})}) as named:
            config = settings(f"arm={named['arm']}")
            with RunLog(tmp_path, config, SILENT, resume_at=0, provenance=begin(config, tmp_path, SILENT)) as log:
                log.write(0, "eval", {})

    started(0.5)
    started(0.5)
    with pytest.raises(ValueError, match="another method .arm: the text of the object mine differs from the one"):
        started(0.9)
    with pytest.raises(ValueError, match=r"arm=python:mine: mine\.turns\['generator'\]\.credit with scale is of type "
                       r"lock, whose content cannot be compared .*: hand over numbers, texts and functions instead"):
        started(threading.Lock())


def test_the_record_of_an_arm_is_stored_whole():
    assert stored_arm("tango") is None
    for built_in in ARMS.values():
        arm = dataclasses.replace(built_in, label="mine")
        with given({"arm": arm}) as named:
            assert read_arm(json.loads(json.dumps(stored_arm(named["arm"])))) == arm
    with pytest.raises(ValueError, match=r"the stored record of an arm is damaged \(KeyError"):
        read_arm({"turns": {}})
    with pytest.raises(ValueError, match="arm='tangoo' is not one of tango, grpo, .*; one of your own is FILE.py:name"):
        load_arm("tangoo")


@pytest.mark.parametrize("name", sorted(credit.CREDITS))
def test_terms_sum_to_the_advantages_and_the_rewards(name):
    """Of the built-in functions, on the made-up responses that a user's are tried on."""
    seen = []

    def recorded(so_far):
        seen.append((so_far, found := credit.CREDITS[name](so_far)))
        return found

    role = "verifier" if name == "class_balanced_credit" else "generator"
    plan = dataclasses.replace(ARMS["tango"].turns[role], credit=recorded)
    config = settings("rl.format_weight=0.25", "rl.gamma=0.5")
    with given({"arm": dataclasses.replace(ARMS["tango"], label="x", turns=ARMS["tango"].turns | {role: plan})}) as arm:
        config.arm = arm["arm"]
        method = try_method(config, make_task(config, {}))
    [(so_far, found)] = seen
    total_BT = sum(np.reshape(term.weight, (-1, 1)) * term.value for term in found.terms)
    np.testing.assert_allclose(total_BT, found.adv_BT, atol=1e-6)
    reward = method.rewards[role](so_far.answers, config.rl)
    np.testing.assert_allclose(sum(term.weight * term.value for term in reward.terms), reward.reward_B, atol=1e-6)
    assert np.ptp(reward.reward_B) > 0
