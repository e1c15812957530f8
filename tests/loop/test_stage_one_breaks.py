"""A stage 1 that breaks down stops with one line, saves nothing of it, and the advice in that line works."""

import contextlib
import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.paths import ROOT
from support.tiny_checkpoints import full_disk
from tango_jax import sft
from tango_jax.cli.command_line import load_config
from tango_jax.loop import fine_tuning, imitation
from tango_jax.records import Problem, TrainState
from tango_jax.rl.policy import make_policy
from tango_jax.rl.supervised import Sft
from tango_jax.runtime import checkpoint as checkpoint_lib
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import Checkpointer, CheckpointError, read_state
from tango_jax.runtime.console import Console
from tango_jax.tasks.registry import make_task
from tango_jax.tasks.task import SftExample
from tango_jax.tracking.metrics import read_metrics
from tango_jax.weights.workdir import start_source

TINY = str(ROOT / "configs/tiny.py")
NEVER = SimpleNamespace(is_due=lambda: False, held=contextlib.nullcontext)


@pytest.fixture(scope="module")
def policies() -> dict:
    config = load_config(TINY, ["verifier.max_prompt=64"])
    return {role: make_policy(role, config[role], start_source(config, role)) for role in ("generator", "verifier")}


class Scripted:
    """In place of the model: one weight and one loss for each step, typed by hand."""

    def __init__(self, losses, weights, heldout):
        self.losses, self.weights, self.heldout, self.steps = losses, weights, heldout, []

    def make(self, policy) -> Sft:
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def state_of(weight, step):
            weight, step = np.float32([weight]), np.int32(step)
            return TrainState({"weight": jax.device_put(weight, place)}, (), jax.device_put(step, place))

        def update(state, batch, base):
            step = int(state.step) + 1
            self.steps.append(step)
            loss, weight = (script.get(step, 1.0) for script in (self.losses, self.weights))
            return state_of(weight, step), {"loss": jnp.float32(loss)}

        def loss(params, batch):
            return jnp.float32(self.heldout.get(self.steps[-1], 1.0))

        shardings = TrainState({"weight": place}, (), place)

        def init(key_data):
            return TrainState({"weight": jnp.ones(1)}, (), jnp.int32(0))

        return Sft(init, None, update, loss, shardings)


def run(monkeypatch, policy, workdir, losses=None, weights=None, heldout=None, preemption=NEVER,
        start_params=None, keep=2, **settings):
    """Stage 1 of six steps, evaluated and saved after the third and the last."""
    script = Scripted(losses or {}, weights or {}, heldout or {})
    monkeypatch.setattr(fine_tuning, "make_sft", script.make)
    config = load_config(TINY)
    config.generator.sft.update(settings)
    config.checkpoint.keep = keep
    policy = dataclasses.replace(policy, config=config.generator)
    task = make_task(config, {"generator": policy.tokenizer, "verifier": policy.tokenizer})
    return fine_tuning.run_sft(policy, task, config, workdir, Console(enabled=False), "stage 1", preemption,
                             {} if start_params is None else {"generator": start_params})


def saved(workdir) -> list[int]:
    return Checkpointer(workdir / "sft/generator/checkpoints").steps()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("script, step, what, kept", [
    (dict(losses={1: NAN}), 1, "had a loss of nan", []),
    (dict(losses={2: -INF}), 2, "had a loss of -inf", []),
    (dict(losses={4: NAN}), 4, "had a loss of nan", [3]),
    (dict(losses={6: NAN}), 6, "had a loss of nan", [3]),
    (dict(heldout={3: NAN}), 3, "led to a held-out loss of nan per token", []),
    (dict(heldout={6: INF}), 6, "led to a held-out loss of inf per token", [3]),
    (dict(heldout={6: 1e11}), 6, r"led to a held-out loss of 1e\+11 per token \(10 times the loss of uniform", [3]),
    (dict(weights={3: NAN}), 3, "left values in params/weight that are not finite or absurdly large", []),
    (dict(weights={6: INF}), 6, "left values in params/weight that are not finite", [3]),
    (dict(weights={6: 1e38}), 6, "left values in params/weight that are not finite or absurdly large", [3]),
    (dict(heldout={6: NAN}, max_heldout_loss=2.0), 6, "led to a held-out loss of nan", [3]),
])
def test_what_is_not_finite_is_never_saved(policies, tmp_path, monkeypatch, script, step, what, kept):
    with pytest.raises(FloatingPointError, match=rf"^step {step} of the generator's stage 1 {what}.*new --workdir"):
        run(monkeypatch, policies["generator"], tmp_path, **script)
    assert saved(tmp_path) == kept
    rows = [row["step"] for row in read_metrics(tmp_path / "sft/generator/metrics.jsonl")]
    assert rows == kept  # nor written down as a result


def test_a_loss_is_read_while_the_next_step_runs(policies, tmp_path, monkeypatch):
    script = Scripted({4: NAN}, {}, {})
    monkeypatch.setattr(Scripted, "make", lambda self, policy, make=Scripted.make: make(script, policy))
    with pytest.raises(FloatingPointError, match="^step 4 "):
        run(monkeypatch, policies["generator"], tmp_path)
    assert script.steps == [1, 2, 3, 4, 5]


def test_sigterm_saves_nothing_that_is_broken(policies, tmp_path, monkeypatch):
    due = SimpleNamespace(**vars(NEVER) | {"is_due": lambda: True})
    with pytest.raises(hosts.Preempted):
        run(monkeypatch, policies["generator"], tmp_path / "good", preemption=due)
    assert saved(tmp_path / "good") == [1]
    with pytest.raises(FloatingPointError, match="^step 1 "):
        run(monkeypatch, policies["generator"], tmp_path / "bad", heldout={1: NAN}, preemption=due)
    assert saved(tmp_path / "bad") == []
    # The held-out loss in the record is that of the step that was saved.
    abstract = {"weight": np.ones(1, np.float32)}
    meta = read_state(tmp_path / "good/sft/generator/checkpoints", abstract, part=("params",)).meta
    assert (meta["heldout_loss"], meta["left_out"]) == (1.0, 0)


def test_a_disk_that_fills_up_ends_it_and_the_next_start_goes_on(policies, tmp_path, monkeypatch):
    """Checkpoints are written while it goes on: the one of step 6 waits for that of step 3."""
    message = "could not save step 3 .*No space left"
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match=message):
        patched.setattr(checkpoint_lib, "seal", full_disk)
        run(monkeypatch, policies["generator"], tmp_path)
    assert saved(tmp_path) == []
    run(monkeypatch, policies["generator"], tmp_path)
    assert saved(tmp_path) == [3, 6]
    assert [row["step"] for row in read_metrics(tmp_path / "sft/generator/metrics.jsonl")] == [3, 6]


@pytest.mark.parametrize("keep, kept", [(1, [6]), (2, [3, 6])])
def test_it_keeps_as_many_checkpoints_as_the_run(policies, tmp_path, monkeypatch, keep, kept):
    run(monkeypatch, policies["generator"], tmp_path, keep=keep)
    assert saved(tmp_path) == kept


def test_it_does_not_go_on_with_other_examples_prompts_or_parameters(policies, tmp_path, monkeypatch):
    policy, due = policies["generator"], SimpleNamespace(**vars(NEVER) | {"is_due": lambda: True})
    for workdir in (tmp_path / "begun", tmp_path / "finished"):
        with pytest.raises(hosts.Preempted):
            run(monkeypatch, policy, workdir, preemption=due)
    run(monkeypatch, policy, tmp_path / "finished")
    for workdir, step in ((tmp_path / "begun", 1), (tmp_path / "finished", 6)):
        said = rf"^stage 1 of the generator: {{}} changed since the checkpoint of step {step} in .* another --workdir$"
        with pytest.raises(ValueError, match=said.format("its examples or prompts")):
            run(monkeypatch, dataclasses.replace(policy, template="Say it: {problem}"), workdir)
        with pytest.raises(ValueError, match=said.format("the generator's stage 1, which it starts from,")):
            run(monkeypatch, policy, workdir, start_params={"weight": np.ones(1, np.float32)})
    run(monkeypatch, policy, tmp_path / "begun")
    assert saved(tmp_path / "begun") == saved(tmp_path / "finished")


@pytest.mark.parametrize("loss, passes", [(2.0, True), (2.1, False)])
def test_the_gate(policies, tmp_path, monkeypatch, loss, passes):
    for _ in range(2):  # a finished stage 1 is measured by what it recorded
        if passes:
            run(monkeypatch, policies["generator"], tmp_path, heldout={6: loss}, max_heldout_loss=2.0)
        else:
            with pytest.raises(ValueError, match=r"held-out loss of 2\.100 per token; the gate is .*new --workdir"):
                run(monkeypatch, policies["generator"], tmp_path, heldout={6: loss}, max_heldout_loss=2.0)


class Killed(BaseException):
    """As SIGKILL during a step: nothing is saved any more."""


def killed_at(step):
    """A preemption that ends the process in place of the given step's check."""
    steps = iter(range(1, 100))

    def is_due():
        if next(steps) == step:
            raise Killed
        return False

    return SimpleNamespace(**vars(NEVER) | {"is_due": is_due})


def test_it_saves_by_time_as_well_and_goes_on_from_there(policies, tmp_path, monkeypatch):
    policy, lines = policies["generator"], []
    monkeypatch.setattr(Console, "log", lambda self, text: lines.append(text))
    monkeypatch.setattr(fine_tuning, "SAVE_S", -1.0)  # overdue after every step
    monkeypatch.setattr(fine_tuning, "SAVE_SHARE", -1.0)
    script = dict(losses={2: 0.5, 4: 0.25}, heldout={2: 3.0, 4: 2.0}, checkpoint_every=1000, eval_every=4)
    with pytest.raises(Killed):
        run(monkeypatch, policy, tmp_path / "killed", preemption=killed_at(3), **script)
    assert saved(tmp_path / "killed") == [1, 2]
    ended = run(monkeypatch, policy, tmp_path / "killed", **script)
    assert any(line.endswith("resuming at step 2/6") for line in lines)
    monkeypatch.setattr(fine_tuning, "SAVE_S", float("inf"))
    expected = run(monkeypatch, policy, tmp_path / "whole", **script)
    assert saved(tmp_path / "whole") == [6] and float(ended["weight"][0]) == float(expected["weight"][0])
    rows, wanted = (read_metrics(tmp_path / name / "sft/generator/metrics.jsonl") for name in ("killed", "whole"))
    assert rows == wanted and [row["step"] for row in rows] == [4, 6]


def test_it_says_that_it_begins_again_where_nothing_was_saved(policies, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(Console, "log", lambda self, text: lines.append(text))
    with pytest.raises(Killed):
        run(monkeypatch, policies["generator"], tmp_path, preemption=killed_at(2))
    assert saved(tmp_path) == [] and not any("begins again" in line for line in lines)
    run(monkeypatch, policies["generator"], tmp_path)
    assert "stage 1: the attempt before this one saved no checkpoint; it begins again at step 1" in lines


def test_a_save_that_takes_long_is_not_repeated_at_once(policies, tmp_path, monkeypatch):
    """The clock is typed by hand: a step takes 100 s, a save 30 s; the next is due 600 s after it."""
    now = [0.0]

    def update(self, policy, make=Scripted.make):
        jitted = make(self, policy)

        def slow(*args):
            now[0] += 100.0
            return jitted.update(*args)

        return jitted._replace(update=slow)

    save = Checkpointer.save
    monkeypatch.setattr(Scripted, "make", update)
    monkeypatch.setattr(Checkpointer, "save", lambda *args: (save(*args), now.append(now.pop() + 30.0)))
    monkeypatch.setattr(fine_tuning.time, "monotonic", lambda: now[0])
    run(monkeypatch, policies["generator"], tmp_path, keep=20, steps=17, checkpoint_every=1000, eval_every=1000)
    assert saved(tmp_path) == [2, 9, 16, 17]


# ------------------------------------------------------------------------------------------ the model, the command line


def test_a_huge_learning_rate_breaks_the_model(tmp_path):
    config = load_config(TINY, ["generator.sft.optimizer.lr=1e30", "generator.model.num_layers=1"])
    source = start_source(config, "generator")
    policy = make_policy("generator", config.generator, source, devices=jax.devices()[:1])
    task = make_task(config, {"generator": policy.tokenizer, "verifier": policy.tokenizer})
    with pytest.raises(FloatingPointError, match=r"^step \d of the generator's stage 1 .*lr=1e\+30"):
        fine_tuning.run_sft(policy, task, config, tmp_path, Console(enabled=False), "stage 1", NEVER, {})
    assert saved(tmp_path) == []


@pytest.mark.parametrize("trains_adapters, setting", [(False, r"lr=0\.002"), (True, r"lora_lr=0\.02")])
def test_the_advice_names_the_rate_in_use(trains_adapters, setting):
    config = load_config(TINY, ["generator.sft.optimizer.lr=2e-3"])
    policy = SimpleNamespace(role="generator", config=config.generator, trains_adapters=trains_adapters)
    started = SimpleNamespace(policy=policy, checkpointer=SimpleNamespace(latest_step=lambda: None))
    assert re.search(rf"lower generator\.sft\.optimizer\.{setting}$", str(fine_tuning._breakdown(started, 3, "broke")))


def test_the_command_ends_with_one_line_whose_advice_works(tmp_path, monkeypatch):
    def make_scripted(policy):
        return Scripted({5: NAN} if policy.config.sft.optimizer.lr > 1 else {}, {}, {}).make(policy)

    monkeypatch.setattr("tango_jax.cli.session.configure", lambda config: None)
    monkeypatch.setattr(fine_tuning, "make_sft", make_scripted)
    command = [f"--config={TINY}", "--config.verifier.sft.steps=0"]
    with pytest.raises(SystemExit, match="^error: step 5 of the generator's stage 1 had a loss of nan.*[^\n]$") as end:
        sft.main([*command, "--config.generator.sft.optimizer.lr=1e30", f"--workdir={tmp_path / 'run'}"])
    advice = re.search(r"choose a new (--workdir) and lower (generator\.sft\.optimizer\.lr)=1e\+30", str(end.value))
    assert advice and saved(tmp_path / "run") == [3]
    lower = f"--config.{advice[2]}=1e-3"
    with pytest.raises(SystemExit, match="other settings"):  # in the same one it would be refused
        sft.main([*command, lower, f"--workdir={tmp_path / 'run'}"])
    sft.main([*command, lower, f"{advice[1]}={tmp_path / 'other'}"])
    assert saved(tmp_path / "other") == [3, 6]


# ------------------------------------------------------------------------------------- examples that do not fit a role


def example(words: int) -> SftExample:
    letters = "abcdefgh"[:words]
    question = " ".join(f"ab{letter}#{k}" for k, letter in enumerate(letters, 1))
    solution = "".join(f"<step>#{k} ends in {letter}</step>" for k, letter in enumerate(letters, 1))
    return SftExample(Problem("p", question, letters), solution, words, "<step>#1 reads a</step>" * words)


def test_an_example_that_would_lose_its_end_is_left_out(policies):
    policy = policies["verifier"]  # prompts of at most 64 tokens, rows of 64 + 48
    sizes = {"train": [1, 2, 7, 3], "heldout": [8, 8]}
    task = SimpleNamespace(sft_example=lambda role, split, index: example(sizes[split][index]))
    whole = [imitation.sft_sequence(policy, example(words))[2] for words in (1, 2, 3, 7, 8)]
    assert whole == [True, True, True, False, False]
    pairs = imitation.sft_pairs(policy, task, "train", 0, 4)
    assert len(pairs) == 3 and all(len(prompt) <= 64 for prompt, _ in pairs)
    batch = imitation.pack_pairs(policy, pairs, 4)
    assert float(jnp.sum(batch.weight_NZRT)) == pytest.approx(1.0)
    # Nothing is left: no gradient, and no failure.
    assert imitation.pack_pairs(policy, imitation.sft_pairs(policy, task, "train", 2, 1), 1).num_micro == 0
    with pytest.raises(ValueError, match=r"none of the first 8 held-out examples .*verifier\.max_prompt=64"):
        task.sft_example = lambda role, split, index: example(8)
        imitation.heldout_batch(policy, task)


def test_what_was_left_out_is_counted_over_restarts(policies, tmp_path, monkeypatch):
    sft_pairs, stops, lines = imitation.sft_pairs, iter([False] * 4 + [True] + [False] * 9), []
    monkeypatch.setattr(imitation, "sft_pairs", lambda *args: sft_pairs(*args)[args[2] == "train" :])
    monkeypatch.setattr(Console, "log", lambda self, text: lines.append(text))
    preemption = SimpleNamespace(**vars(NEVER) | {"is_due": lambda: next(stops)})
    with pytest.raises(hosts.Preempted):
        run(monkeypatch, policies["generator"], tmp_path, preemption=preemption)
    run(monkeypatch, policies["generator"], tmp_path, preemption=preemption)
    assert any("6 of 24 examples were left out" in line for line in lines)
