"""Runs whose verifier judges a part of the solutions: what equals GRPO, and what a resumption keeps."""

import shutil

import numpy as np
import pytest

from support.paths import CONFIGS
from support.policies import policies_of
from support.tiny_train import StopAfter, repeatable_rows
from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.loop import run
from tango_jax.method import trust
from tango_jax.runtime import hosts, termination
from tango_jax.runtime.checkpoint import peek_meta
from tango_jax.runtime.console import Console
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.rollout_dump import read_rollouts

SILENT = Console(enabled=False)


def config_of(*overrides: str):
    # One shape of what is sampled, and the same for both roles: what is compiled for one is in the cache for the other.
    one_shape = [f"{role}.{setting}" for role in ROLES for setting in (
        "mesh.fsdp=1", "row_buckets=(8,)", "cache_buckets=()", "max_response=48")]
    return load_config(str(CONFIGS / "tiny.py"), [*one_shape, "rollouts.every=1", "eval.every=6", *overrides])


@pytest.fixture(scope="module")
def train():
    """`run_or_resume` in silence. What is compiled is compiled once: neither trust nor the arm changes a policy."""
    policies = policies_of(config_of())

    def run_of(config, workdir, preemption=None):
        return run.run_or_resume(config, workdir, SILENT, policies, preemption)

    return run_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def doubted(folder, train):
    """A verifier that is never believed."""
    train(config_of("rl.trust=(0.999,1)", "rl.judge=silent"), folder / "doubted")
    return folder / "doubted"


@pytest.mark.long
def test_without_trust_a_run_is_grpo_to_the_digit(folder, doubted, train):
    train(config_of("arm=grpo"), folder / "grpo")
    ours, theirs = ([{name: value for name, value in row.items() if name.startswith("generator/")}
                     for row in read_metrics(path / "metrics.jsonl") if row["phase"] == "generator"]
                    for path in (doubted, folder / "grpo"))
    assert len(theirs) == 6
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine | plain == mine and mine["generator/trust"] == 0


@pytest.mark.long
def test_a_resumed_run_goes_on_with_the_evidence_that_it_had(folder, doubted, train):
    config = config_of("rl.trust=(0.999,1)", "rl.judge=silent")
    for turns in (3, 2):
        with pytest.raises(hosts.Preempted):
            train(config, folder / "stopped", preemption=StopAfter(turns))
    train(config, folder / "stopped")
    assert repeatable_rows(folder / "stopped/metrics.jsonl") == repeatable_rows(doubted / "metrics.jsonl")


class StopWhileSampling(hosts.Preemption):
    """As if SIGTERM came while a run samples, when no response has ended, for the given time, counted from 0."""

    def __init__(self, number, monkeypatch):
        super().__init__(is_watching=False)
        self._is_watching, self.left = True, number
        monkeypatch.setattr(termination, "is_requested", lambda: self.left < 0)
        monkeypatch.setattr(termination, "hold", lambda: None)
        monkeypatch.setattr(termination, "release", lambda: None)

    def ends_sampling(self, show_fn):
        show = super().ends_sampling(show_fn)

        def count(part):
            self.left -= part.startswith("0 of ")
            show(part)

        return count


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 6, 9, 15])
def test_a_turn_that_is_told_to_stop_while_it_samples_is_repeated(doubted, train, tmp_path, monkeypatch, number):
    """In an evaluation or a turn, before the first turn or after it; every turn that has ended is saved."""
    config = config_of("rl.trust=(0.999,1)", "rl.judge=silent")
    shutil.copytree(doubted / "sft", tmp_path / "run/sft")
    shutil.copy(doubted / "config.json", tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(hosts.Preempted):
        train(config, tmp_path / "run", preemption=StopWhileSampling(number, patch))
    ended = [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl") if row["phase"] != "eval"]
    found = peek_meta(tmp_path / "run/checkpoints")
    assert (found.step if found else 0) == max(ended, default=0) < 10
    train(config, tmp_path / "run")
    assert repeatable_rows(tmp_path / "run/metrics.jsonl") == repeatable_rows(doubted / "metrics.jsonl")


@pytest.mark.long
def test_the_dump_says_which_solutions_were_judged(folder, train):
    train(config_of("rl.judge=failed"), folder / "failed")
    rows = [row for row in read_rollouts(folder / "failed/rollouts") if row["role"] == "generator"]
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["turn"], row["group"]), []).append(row)
    for members in groups.values():
        has_right = any(row["solution"]["is_correct"] for row in members)
        assert [len(row["verifications"]) for row in members] == [int(not has_right)] * len(members)
    shares = [row["generator/judged_share"] for row in read_metrics(folder / "failed/metrics.jsonl")
              if row["phase"] == "generator"]
    judged = [row for row in rows if row["verifications"]]
    assert np.mean(shares) == pytest.approx(len(judged) / len(rows))


@pytest.mark.long
@pytest.mark.release
def test_practice_goes_on_with_what_was_counted(folder, train):
    config = config_of("rl.practice=half_right", "task.verifier_words=(1,2)", "rl.generator_steps=9")
    train(config, folder / "practice")
    with pytest.raises(hosts.Preempted):
        train(config, folder / "practice_stopped", preemption=StopAfter(7))
    train(config, folder / "practice_stopped")
    rows = [repeatable_rows(folder / name / "metrics.jsonl") for name in ("practice", "practice_stopped")]
    assert rows[0] == rows[1]
    saved = peek_meta(folder / "practice/checkpoints").meta
    # Two turns of warm-up and three more, each of which looks at four times four problems.
    assert saved["passes"] and saved["cursors"] == {"train": 9 * 4, "verifier": 5 * 16}


@pytest.mark.long
@pytest.mark.release
def test_a_warm_up_that_ends_sooner_leaves_the_later_turns_their_numbers(folder, train, monkeypatch):
    """The measure has its tests in tests/method/test_trust.py; here it says after the second turn that it is enough."""
    def reached(rl, place, memory):
        return {"verifier/warmup_trust": float(place.index == 1)} if place.phase == "warmup" else {}

    monkeypatch.setattr(trust, "warmup_metrics", reached)
    config = config_of("rl.trust=(0.4,0.55)", "rl.warmup_until=0.5", "rl.warmup_steps=5", "checkpoint.every=4")
    train(config, folder / "sooner")
    rows = read_metrics(folder / "sooner/metrics.jsonl")
    assert [row["step"] for row in rows if row["phase"] == "warmup"] == [1, 2]
    assert [row["verifier/warmup_trust"] for row in rows if row["phase"] == "warmup"] == [0, 1]
    assert [row["step"] for row in rows if row["phase"] != "warmup"][:3] == [0, 5, 6]
    assert [row["phase"] for row in rows if row["step"] == 5] == ["eval"]
    assert peek_meta(folder / "sooner/checkpoints").meta["turn"] == rows[-1]["step"]
    # Stopped right after the turn that ends it, where a checkpoint is saved and the evaluation is still owed.
    class StopAfterWarmUp(hosts.Preemption):
        def is_due(self) -> bool:
            path = folder / "sooner_stopped/metrics.jsonl"
            return path.exists() and read_metrics(path)[-1]["step"] == 2

    with pytest.raises(hosts.Preempted):
        train(config, folder / "sooner_stopped", preemption=StopAfterWarmUp(is_watching=False))
    meta = peek_meta(folder / "sooner_stopped/checkpoints").meta
    assert meta["turn"] == 5 and meta["owes_evaluation"]
    train(config, folder / "sooner_stopped")
    assert repeatable_rows(folder / "sooner_stopped/metrics.jsonl") == repeatable_rows(folder / "sooner/metrics.jsonl")
