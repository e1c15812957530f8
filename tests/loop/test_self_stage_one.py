"""Stage 1 without a teacher: rounds of sampling and imitating, what is kept, and a run that is stopped anywhere in it.

Responses are written by a script; sampling by the model itself is tested in test_self_sampling.py.
"""

import json
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from support.math_cases import math_config
from support.own_problems import write_problems
from support.own_samples import Response, response, solution
from support.policies import policies_of
from support.tiny_checkpoints import write_tiny_folder
from support.tiny_train import repeatable_rows
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES
from tango_jax.loop import run, self_rounds, self_sampling, self_stage_one
from tango_jax.loop.init_from import UNTRAINED
from tango_jax.loop.resume import abstract_states
from tango_jax.loop.stage_one import run_stage_one
from tango_jax.records import Problem
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import peek_meta, read_state
from tango_jax.runtime.console import Console
from tango_jax.runtime.trees import tree_fingerprint
from tango_jax.tasks.self_text import Claim
from tango_jax.tasks.tagged_examples import read_tagged_rows
from tango_jax.text.prompts import OWN
from tango_jax.text.templates import judged
from tango_jax.tracking.metrics import read_metrics
from tango_jax.viewer.runs import own_samples

SILENT = Console(enabled=False)
PROBLEMS, SAMPLES = 10, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    return write_problems(tmp_path_factory.mktemp("problems") / "sums.jsonl", count=14)


def config_of(folder, problems, **settings):
    config = math_config(folder, train=str(problems), test="", stage_one="self", min_steps=2)
    config["self"].update({"problems": PROBLEMS, "samples": SAMPLES, "keep": 2, "rounds": 3})
    for role in (config.generator, config.verifier):
        # Long answers and long solutions, in bytes: a sum in two steps has about 120.
        role.sft.pack_length, role.sft.eval_every, role.sft.checkpoint_every = 900, 1, 1
        role.max_prompt = 600
        role.sft.optimizer.lr = 1e-3
    config.update_from_flattened_dict(settings)
    validate(config)
    return config


class Script:
    """In place of sampling: responses that depend on the weights, on the key and on the place.

    `plain`: the share of well-formed responses to the plain prompt after so many trainings; a training is known by its
    weights, so a resumed run whose weights differ ends otherwise.
    """

    def __init__(self, plain: dict[str, list[float]], right: float = 0.75, is_verdict_right=lambda number: True):
        self.plain, self.right, self.is_verdict_right = plain, right, is_verdict_right
        self.seen: dict[str, list[str]] = {role: [] for role in ROLES}
        self.calls: list[tuple[str, str, int]] = []  # role, prompt, parents x samples

    def respond(self, context, states, role, parents, group_size, key_data, prompt):
        mark = tree_fingerprint(states[role].weights)
        if mark not in self.seen[role]:
            self.seen[role].append(mark)
        self.calls.append((role, prompt.name, len(parents) * group_size))
        share = self.plain[role][self.seen[role].index(mark)] if prompt is OWN[role] else 0.75
        rng, records = np.random.default_rng(key_data), []
        for place, parent in enumerate(parents):
            for number in range(group_size):
                is_formed = (place * group_size + number) % 4 < 4 * share  # shares are quarters
                letter, is_right = "abcdef"[rng.integers(6)], (place + number) % 4 < 4 * self.right
                is_right = is_right if role == "generator" else self.is_verdict_right(number)
                more = "" if prompt is OWN[role] else "\n\nProblem:\nWhat"  # examples are gone on with
                records.append(response(context, parent, Response(is_formed, is_right, letter, more)))
        return SimpleNamespace(records=records)


def stage_one(config, workdir, script, monkeypatch, console=SILENT, policies=None, preemption=None):
    monkeypatch.setattr(self_sampling, "respond", script.respond)
    policies = policies or policies_of(config)
    _, task = run.rehearsed(config, policies)
    return run_stage_one(policies, config, task, workdir, console, preemption or hosts.Preemption(is_watching=False))


def rounds_of(workdir, role):
    stored = json.loads((workdir / "self" / role / "rounds.json").read_text())
    return stored["result"], stored["rounds"]


def kept_of(workdir, role, number):
    return read_tagged_rows(str(workdir / f"self/{role}/kept_{number}.jsonl"), is_for_verifier=role == "verifier")


@pytest.fixture(scope="module")
def policies(folder, problems):
    """Compiled once for all runs of these settings."""
    return policies_of(config_of(folder, problems))


SHARES = {"generator": [0.0, 0.5, 1.0], "verifier": [0.25, 1.0]}


@pytest.fixture
def config(folder, problems):
    return config_of(folder, problems)


@pytest.fixture(scope="module")
def taught(folder, problems, policies, tmp_path_factory):
    """(workdir, script, weights) of a whole stage 1."""
    workdir, script = tmp_path_factory.mktemp("runs") / "taught", Script(SHARES)
    with pytest.MonkeyPatch.context() as patch:
        weights = stage_one(config_of(folder, problems), workdir, script, patch, policies=policies)
    return workdir, script, weights


def test_rounds_sample_keep_and_imitate_until_the_gate(config, policies, taught, monkeypatch):
    tmp_path, script, weights = taught
    result, rounds = rounds_of(tmp_path, "generator")
    assert result == 2 and [row["plain_share"] for row in rounds] == [0.0, 0.6, 1.0]  # of 10
    # Less was well formed without examples, so the second round shows them again.
    assert [row.get("prompt") for row in rounds] == [None, "examples", "examples"]
    assert rounds[1]["samples"] == PROBLEMS * SAMPLES and 0 < rounds[1]["kept"] < rounds[2]["kept"]
    for number in (1, 2):
        rows = kept_of(tmp_path, "generator", number)
        assert len(rows) == rounds[number]["kept"] == len({(row.problem.question, row.solution) for row in rows})
        for row in rows:
            a, b = (int(word) for word in row.problem.question.removeprefix("What is ").rstrip("?").split(" + "))
            assert row.problem.answer == str(a + b)
    for role in ROLES:
        assert peek_meta(tmp_path / f"sft/{role}/checkpoints").step == config[role].sft.steps
        assert not list(tmp_path.glob(f"self/{role}/round_*/sft/*/*"))  # the result has been moved
        assert script.seen[role][-1] == tree_fingerprint(weights[role])
    told = own_samples(tmp_path, {"self.keep": 2})  # in the report
    assert [line.split()[4] for line in told] == list(ROLES) and told[0].endswith("it starts from round 2")
    assert "before it, 0% of its responses to the plain prompt were well formed; round 1: 40 samples" in told[0]
    assert "kept (right and well formed, at most self.keep=2 of a prompt);" in told[0]
    assert "at most self.keep=2 of a prompt, as many of right as of wrong solutions);" in told[1]
    # Another run finds the result, and samples nothing.
    calls = len(script.calls)
    again = stage_one(config, tmp_path, script, monkeypatch, policies=policies)
    assert len(script.calls) == calls
    assert all(tree_fingerprint(again[role]) == tree_fingerprint(weights[role]) for role in ROLES)


class Cool(Script):
    """At the temperature of the rounds, all responses to the plain prompt are well formed, and go on."""

    def respond(self, context, states, role, parents, group_size, key_data, prompt):
        found = super().respond(context, states, role, parents, group_size, key_data, prompt)
        if prompt is OWN[role] and context.policies[role].config.temperature == self_sampling.TEMPERATURE:
            made = [Response(True, True, letter, "\n\nProblem:\nWhat") for letter in "abcd"[:group_size]]
            found.records = [response(context, parent, one) for parent in parents for one in made]
        return found


def test_a_round_shows_examples_by_samples_as_rounds_take_them(config, policies, tmp_path, monkeypatch, capsys):
    """The samples that the gate counts are whole ones, at the temperature of the turns, so they are not compared."""
    config.verifier.sft.steps = 0
    script = Cool({"generator": [0.0, 0.5, 1.0]})
    stage_one(config, tmp_path, script, monkeypatch, Console(interval_s=0), policies)
    _, rounds = rounds_of(tmp_path, "generator")
    assert [row.get("prompt") for row in rounds] == [None, "examples", "plain"]
    assert [row["plain_share"] for row in rounds] == [0.0, 0.6, 1.0]
    assert ("round 2 samples with the plain prompt: 100 % of 10 samples with the plain prompt at temperature 0.7 are "
            "well formed up to </answer>, and 75 % of those with examples") in capsys.readouterr().out
    # The look of the gate, and of a later round.
    assert [call[2] for call in script.calls if call[1] == OWN["generator"].name] == [10, 10, 10, 40, 10]


def test_the_verifier_learns_from_as_many_right_as_wrong_solutions_and_from_damaged_steps(taught):
    rows = kept_of(taught[0], "verifier", 1)
    is_right = ["{CORRECT}</final" in row.verification for row in rows]
    assert sum(is_right) * 2 == len(rows) > 3
    damaged = 0
    for row, right in zip(rows, is_right, strict=True):
        a, b = (int(word) for word in row.problem.question.removeprefix("What is ").rstrip("?").split(" + "))
        assert (row.problem.answer == str(a + b)) == right
        first_step_holds = f"= {a + b}.</step>" in row.solution.splitlines()[1]
        damaged += right and not first_step_holds
        assert ("{INCORRECT}" in row.verification.split("</step>")[0]) == (not first_step_holds)
    assert damaged > 0


def test_what_is_kept_fits_and_is_imitated(config, policies):
    """Ten judgements of right solutions; of ten of wrong ones, in more tokens, three fit. The kept ones are six."""
    problems = [Problem(f"p{number}", f"What is {number} + {number + 1}?", str(2 * number + 1)) for number in range(20)]
    claims = [Claim(one, solution(one, place % 2 == 0, "a"), 2, place % 2 == 0) for place, one in enumerate(problems)]
    texts = [judged(["a", "b" * (9 if place % 2 == 0 or place < 6 else 40)], [claim.is_right] * 2)
             for place, claim in enumerate(claims)]
    tokenizers = {role: policies[role].tokenizer for role in ROLES}
    config.verifier.max_response = len(tokenizers["verifier"].encode_response(texts[1]))
    config.generator.sft.pack_length = 1  # which no solution fits, and the generator imitates none here
    pupil = self_rounds.Pupil(policies["verifier"], config, None, tokenizers, None, None, claims, None, None)
    kept, too_long = pupil.kept([[self_sampling.Sampled(text, False, None)] for text in texts])
    assert ["{CORRECT}</final" in row.verification for row in kept] == [True, False] * 3 and too_long == 7
    made = self_rounds._examples(pupil, "verifier", kept)
    assert (made.num_train, made.num_heldout, made.num_too_long) == (5, 1, 0)


def test_solutions_to_judge_are_chosen_among_those_that_fit(config, policies, tmp_path, monkeypatch):
    """Each problem's first sample is wrong and too long for the verifier's prompt of 600 tokens; its last one fits."""
    made = [(False, "x" * 700), (True, "a"), (False, "b")]
    monkeypatch.setattr(self_stage_one.PartSampler, "sample", lambda self, folder, asked, problems, *args: [
        [self_sampling.Sampled(solution(problem, is_right, mark), False, is_right) for is_right, mark in made]
        for problem in problems])
    _, task = run.rehearsed(config, policies)
    stage = self_stage_one.OwnStageOne(policies, config, task, tmp_path, SILENT, hosts.Preemption(is_watching=False),
                                       None)
    claims = stage.prompts_of("verifier", lambda: {})
    kinds = [(claim.is_right, claim.damaged is not None) for claim in claims]
    assert len(claims) == PROBLEMS and all("x: " not in claim.text for claim in claims)
    assert [kinds.count(kind) for kind in ((False, False), (True, False), (True, True))] == [5, 3, 2]


def test_a_model_that_follows_the_prompt_has_no_stage_one(config, policies, tmp_path, monkeypatch, capsys):
    script = Script({"generator": [1.0], "verifier": [1.0]})
    weights = stage_one(config, tmp_path, script, monkeypatch, Console(interval_s=0), policies)
    said = capsys.readouterr().out
    assert "the generator: 100 % of 10 samples with the plain prompt are well formed" in said
    assert said.count("it needs no stage 1 and starts as it is") == 2
    # 10 problems looked at; then 40 solutions for the verifier to judge, of which 10 are chosen.
    assert [call[2] for call in script.calls] == [10, PROBLEMS * SAMPLES, 10]
    fresh = {role: tree_fingerprint(policy.load_params()) for role, policy in policies.items()}
    assert {role: tree_fingerprint(weights[role]) for role in ROLES} == fresh
    assert not (tmp_path / "sft/generator/metrics.jsonl").exists()
    # What a run without updates left serves as a start, also of another run.
    other = config.copy_and_resolve_references()
    for role in ROLES:
        other[role].init_from = str(tmp_path)
    again = stage_one(other, tmp_path / "other", script, monkeypatch, policies=policies)
    assert {role: tree_fingerprint(again[role]) for role in ROLES} == fresh


@pytest.mark.parametrize("shares, told", [
    ([0.0, 0.5, 0.25], "60 % well-formed samples, less than 80 %: turns may teach the rest"),
    ([0.0, 0.0, 0.0], "0 % well-formed samples, less than 80 %: turns teach only where a problem's samples differ"),
])
def test_a_round_that_does_not_help_is_not_taken(config, policies, tmp_path, monkeypatch, capsys, shares, told):
    script = Script(SHARES | {"generator": shares})
    if not any(shares):  # which leaves the verifier nothing to judge
        config.verifier.sft.steps = 0
    weights = stage_one(config, tmp_path, script, monkeypatch, Console(interval_s=0), policies)
    result, rounds = rounds_of(tmp_path, "generator")
    assert result == 1 and len(rounds) == 3
    said = capsys.readouterr().out
    assert "starts from round 1, as round 2 was no better" in said
    assert f"ends its stage 1 with {told}" in said
    numbers = re.search(r"the generator imitates (\d+) of its own samples, (\d+) held out \(round 1\)", said)
    assert sum(map(int, numbers.groups())) == rounds[1]["kept"]
    assert f"{rounds[1]['kept']} are kept (right and well formed, at most self.keep=2 of a prompt); after" in said
    assert tree_fingerprint(weights["generator"]) == script.seen["generator"][1]


@pytest.mark.parametrize("at", ["_move", "commit"])
def test_a_stop_between_the_last_round_and_its_end_loses_nothing(config, policies, tmp_path, monkeypatch, taught, at):
    monkeypatch.setattr(self_rounds, at, raises_once := Raises(getattr(self_rounds, at)))
    script = Script(SHARES)
    config.verifier.sft.steps = 0
    with pytest.raises(KeyboardInterrupt):
        stage_one(config, tmp_path, script, monkeypatch, policies=policies)
    calls = len(script.calls)
    weights = stage_one(config, tmp_path, script, monkeypatch, policies=policies)
    assert raises_once.calls == 2 and len(script.calls) == calls
    assert tree_fingerprint(weights["generator"]) == tree_fingerprint(taught[2]["generator"])


class Raises:
    """At the first call."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == 1:
            raise KeyboardInterrupt
        return self.function(*args)


def test_rounds_end_when_no_more_are_kept(folder, problems, policies, tmp_path, monkeypatch, capsys):
    config = config_of(folder, problems, **{"self.keep": 1})
    stage_one(config, tmp_path, Script(SHARES | {"generator": [0.0, 0.5]}), monkeypatch, Console(interval_s=0),
              policies)
    result, rounds = rounds_of(tmp_path, "generator")
    assert result == 1 and rounds[2]["kept"] <= rounds[1]["kept"] and "plain_share" not in rounds[2]
    assert "in the round before: the rounds end" in capsys.readouterr().out


@pytest.mark.parametrize("script, message", [
    (Script(SHARES, right=0), "the generator's round 1: of 40 samples with worked examples, 75 % are well formed up to "
     "</answer> and 0 are kept .right and well formed, at most self.keep=2 of a prompt.; 0 have a right answer: too "
     "few to imitate; a larger model, easier problems or a file of tagged"),
    (Script({"generator": [1.0]}), "of 40 samples of the generator, none are well formed and fit the verifier's"),
])
def test_where_even_worked_examples_give_nothing_one_line_says_what_helps(
    config, policies, tmp_path, monkeypatch, script, message
):
    if script.right == 0.75:
        monkeypatch.setattr(self_stage_one, "choose_claims", lambda *args: [])
    with pytest.raises(ValueError, match=f"task.stage_one=self: .*{message}") as error:
        stage_one(config, tmp_path, script, monkeypatch, policies=policies)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("script, message, rounds", [
    (Script(SHARES, is_verdict_right=lambda number: False), "the verifier's round 1: of 40 samples with worked examples"
     ", 75 % are well formed up to </final_verification> and 0 are kept (right and well formed, at most self.keep=2 of "
     "a prompt, as many of right as of wrong solutions): 0 of 20 judgements of right solutions and 0 of 20 judgements "
     "of wrong solutions are well formed and agree with what is known", 2),
    (Script(SHARES, right=1), "of 4 samples of the generator to each problem, all that are well formed and fit "
     "the verifier's prompt are right", 1),
])
def test_a_verifier_with_nothing_to_imitate_has_no_stage_one_and_the_run_goes_on(
    config, policies, tmp_path, monkeypatch, capsys, script, message, rounds
):
    weights = stage_one(config, tmp_path, script, monkeypatch, Console(interval_s=0), policies)
    said = [line for line in capsys.readouterr().out.splitlines() if "the verifier has no stage 1" in line]
    assert len(said) == 1 and message in said[0] and " help" in said[0]
    assert tree_fingerprint(weights["verifier"]) == tree_fingerprint(policies["verifier"].load_params())
    meta = peek_meta(tmp_path / "sft/verifier/checkpoints")
    assert meta.step == 0 and meta.meta[UNTRAINED]
    result, found = rounds_of(tmp_path, "verifier")
    assert result == 0 and len(found) == rounds
    assert own_samples(tmp_path, {"self.keep": 2})[1].endswith("; it has no stage 1")
    calls = len(script.calls)  # another run finds this
    again = stage_one(config, tmp_path, script, monkeypatch, policies=policies)
    assert len(script.calls) == calls and tree_fingerprint(again["verifier"]) == tree_fingerprint(weights["verifier"])


def test_only_prompts_with_examples_tell_the_verifier_what_is_known(config, policies, taught, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Script, "respond", lambda self, *args, prompt, original=Script.respond: (
        asked.append((prompt, args[3])), original(self, *args, prompt=prompt))[1])
    stage_one(config, tmp_path, Script(SHARES), monkeypatch, policies=policies)
    lines = {True: set(), False: set()}
    for prompt, parents in asked:
        if prompt.role == "verifier":
            for parent in parents:
                text = prompt.fields(parent, False).text
                assert text.startswith(parent.text)
                lines[prompt is OWN["verifier"]].add(text.removeprefix(parent.text).strip())
    assert lines[True] == {""}
    assert lines[False] == {"The final answer is wrong.", "The final answer is right.",
                            "The final answer is right, and step 1 is wrong."}
    assert not any("The final answer is" in row.solution + row.verification for row in kept_of(tmp_path, "verifier", 1))


@pytest.mark.long
@pytest.mark.parametrize("settings", [
    {"verifier.adapter": "generator"},
    {"verifier.sft.start": "generator"},
    {"generator.model.lora.rank": 4, "verifier.model.lora.rank": 4},
    {"generator.model.lora.rank": 4, "verifier.model.lora.rank": 4, "generator.sft.full": True,
     "verifier.sft.full": True},
])
def test_one_policy_and_adapters_learn_alone_too(folder, problems, tmp_path, monkeypatch, settings):
    config = config_of(folder, problems, **settings)
    script = Script({"generator": [0.0, 0.5, 1.0], "verifier": [0.25, 1.0]})
    made = stage_one(config, tmp_path, script, monkeypatch)
    again = stage_one(config, tmp_path, script, monkeypatch)
    for role in ROLES:
        assert tree_fingerprint(made[role]) == tree_fingerprint(again[role])
        assert rounds_of(tmp_path, role)[1][-1]["plain_share"] == 1.0
    if "verifier.adapter" in settings:
        assert tree_fingerprint(made["generator"]) == tree_fingerprint(made["verifier"]) == script.seen["verifier"][-1]


class StopOnce(hosts.Preemption):
    """As if SIGTERM came once a condition holds."""

    def __init__(self, condition):
        super().__init__(is_watching=False)
        self.condition, self.is_over = condition, False

    def is_due(self) -> bool:
        due = not self.is_over and self.condition()
        self.is_over |= due
        return due


STOPS = {
    "sampling": lambda workdir: (workdir / "self/generator/round_2/part_0000.jsonl").exists(),
    "imitation": lambda workdir: (workdir / "self/generator/round_2/sft/generator/metrics.jsonl").exists(),
    "the verifier's sampling": lambda workdir: (workdir / "self/verifier/round_1/part_0000.jsonl").exists(),
    "a turn": lambda workdir: (workdir / "metrics.jsonl").exists()
    and read_metrics(workdir / "metrics.jsonl")[-1]["step"] >= 1,
}


@pytest.fixture(scope="module")
def whole(folder, problems, policies, tmp_path_factory):
    """A run that nothing interrupted."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_sampling, "PART", 4)
        patch.setattr(self_sampling, "respond", Script(SHARES).respond)
        run.run_or_resume(config_of(folder, problems), workdir, SILENT, policies)
    return workdir


def contents(workdir) -> dict:
    """All that a run leaves but clocks: files of stage 1, rows of metrics, weights."""
    found = {str(path.relative_to(workdir)): path.read_bytes() for path in (workdir / "self").rglob("*.json*")
             if "sft" not in path.parts and path.name not in ("config.json", "provenance.json")}
    for name in ("metrics.jsonl", *(f"sft/{role}/metrics.jsonl" for role in ROLES)):
        found[name] = repeatable_rows(workdir / name)
    summary = json.loads((workdir / "summary.json").read_text())
    return found | {"summary": summary | {"wall_seconds": 0}}


def weights_of(workdir, policies) -> dict:
    states = read_state(workdir / "checkpoints", abstract_states(policies)).state
    return jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), states)


@pytest.mark.long
@pytest.mark.parametrize("place", STOPS)
def test_a_run_stopped_anywhere_ends_as_if_nothing_had_happened(
    config, policies, whole, tmp_path, monkeypatch, place
):
    monkeypatch.setattr(self_sampling, "PART", 4)
    script = Script(SHARES)
    monkeypatch.setattr(self_sampling, "respond", script.respond)
    workdir = tmp_path / "run"
    with pytest.raises(hosts.Preempted):
        run.run_or_resume(config, workdir, SILENT, policies, StopOnce(lambda: STOPS[place](workdir)))
    assert not (workdir / "summary.json").exists()
    sampled = len(script.calls)
    run.run_or_resume(config, workdir, SILENT, policies)
    # 4 looks of 10 problems in parts of 4 and 2 rounds; the verifier: solutions, 2 looks and a round.
    assert len(script.calls) == sum(len(list(workdir.glob(f"self/{role}/*/part_*.jsonl"))) for role in ROLES)
    assert place == "a turn" or sampled < len(script.calls)
    assert contents(workdir) == contents(whole)
    assert weights_of(workdir, policies) == weights_of(whole, policies)
    assert json.loads((workdir / "summary.json").read_text())["compiles_after_warmup"] == 0


@pytest.mark.long
def test_settings_of_a_begun_stage_one_stay(config, whole, policies, tmp_path, monkeypatch):
    monkeypatch.setattr(self_sampling, "PART", 4)
    workdir = tmp_path / "run"
    workdir.mkdir()
    shutil.copytree(whole / "self", workdir / "self")
    with pytest.raises(ValueError, match=r"config.json is missing, and without it .* whether .*self was made"):
        run.run_or_resume(config, workdir, SILENT, policies)
