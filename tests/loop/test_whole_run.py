"""What a run that nothing interrupts leaves behind, and what its metrics say of every turn."""

import json
import re
from pathlib import Path

import pytest

from support.tiny_train import LAST_TURN
from tango_jax.tracking.loggers import SHARED_WITH_TURNS
from tango_jax.tracking.metrics import read_metrics

ROLES = ("generator", "verifier")


def test_the_run_ends_with_its_results(tiny_run):
    workdir, stdout = tiny_run
    summary = json.loads((workdir / "summary.json").read_text())
    provenance = summary.pop("provenance")
    assert provenance["files"] == {}  # a shipped config, and nothing of the user's
    assert provenance["devices"] == {"cpu": 1} and len(provenance["source"]) == 12
    assert {name for name, digest in provenance["start"].items() if len(digest) >= 12} >= set(ROLES)
    [attempt] = json.loads((workdir / "provenance.json").read_text())["attempts"]
    assert attempt["command"].startswith("python -m tango_jax.train --config=configs/tiny.py --workdir=")
    assert {name: set(value) if isinstance(value, dict) else None for name, value in summary.items()} == {
        "arm": None, "seed": None, "wall_seconds": None, "compiles_after_warmup": None, "logprob_gap_max": None,
        "generator": {"accuracy_initial", "accuracy_final"},
        "verifier": {"step_f1_initial", "step_f1_final", "outcome_f1_initial", "outcome_f1_final"},
    }
    assert (summary["arm"], summary["seed"], summary["compiles_after_warmup"]) == ("tango", 0, 0)
    assert 0 < summary["logprob_gap_max"] < 1e-4
    listed = {Path(line.strip()) for line in stdout.split("\nfiles:\n")[1].splitlines()}
    assert listed == {workdir / name for name in ("metrics.jsonl", "summary.json", "curves.png", "transcripts.md",
                                                  "rollouts", "checkpoints", "sft")}
    assert all(path.exists() for path in listed)
    assert (workdir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(re.findall("^## `last_letter/test/", (workdir / "transcripts.md").read_text(), re.MULTILINE)) == 6


def test_both_roles_take_their_turns(tiny_run):
    assert "the verifier has no turn" not in tiny_run.stdout and "warning" not in tiny_run.stdout
    rows = read_metrics(tiny_run.workdir / "metrics.jsonl")
    turns = [(row["step"], row["phase"]) for row in rows if row["phase"] != "eval"]
    phases = ["warmup"] * 2 + (["generator"] * 3 + ["verifier"]) * 2
    assert turns == list(enumerate(phases, 1))
    assert [(row["step"], row["generator_step"]) for row in rows if row["phase"] == "eval"] == [
        (0, 0), (2, 0), (5, 3), (9, 6), (LAST_TURN, 6),
    ]
    assert None not in [value for row in rows for value in row.values()]


def test_a_policy_starts_at_its_reference(tiny_run):
    rows = read_metrics(tiny_run.workdir / "metrics.jsonl")
    for role in ROLES:
        kl = [row[f"{role}/kl"] for row in rows if f"{role}/kl" in row]
        assert kl[0] == pytest.approx(0.0, abs=1e-6)
        assert max(kl) > 1e-4  # and leaves it


def test_sampler_and_trainer_agree_at_every_turn(tiny_run):
    gaps = [value for row in read_metrics(tiny_run.workdir / "metrics.jsonl") for name, value in row.items()
            if name.endswith("/logprob_gap_max")]
    assert len(gaps) == LAST_TURN
    assert 0 < max(gaps) < 1e-4


def test_every_turn_of_a_run_has_what_its_verifications_were_like(tiny_run):
    rows = [row for row in read_metrics(tiny_run.workdir / "metrics.jsonl") if row["phase"] != "eval"]
    assert {row["phase"] for row in rows} == {"warmup", "generator", "verifier"}
    for row in rows:
        for name in ("length_mean", "length_max", "truncation_rate", "tokens_sampled", "shortened_rate"):
            assert f"verifier/{name}" in row, row["phase"]
        tokens = row["generator/tokens_sampled"] + row["verifier/tokens_sampled"]
        seconds = row["time/sample_s"] + row["time/verify_s"]
        assert row["throughput/sampled_tokens_per_s"] == pytest.approx(tokens / seconds)
    for role, phases in (("generator", {"generator"}), ("verifier", {"warmup", "verifier"})):
        first, *later = [row for row in rows if row["phase"] in phases]
        assert abs(first[f"{role}/kl_first"]) < 1e-5  # before its first update, a policy is its reference
        assert later and all(f"{role}/kl_first" not in row and 0 <= row[f"{role}/kl"] < 0.06 for row in later)
    for row in read_metrics(tiny_run.workdir / "metrics.jsonl"):
        if row["phase"] == "eval":
            assert [row[f"grader/eval_{name}"] for name in ("errors", "timeouts", "overlong")] == [0, 0, 0]
            assert 0 <= row["verifier/live/truncation_rate"] <= 1 and row["verifier/live/shortened_rate"] == 0


def test_what_an_evaluation_shares_with_turns_has_other_names_in_other_loggers(tiny_run):
    of_turns, of_evaluations = set(), set()
    for row in read_metrics(tiny_run.workdir / "metrics.jsonl"):
        (of_evaluations if row["phase"] == "eval" else of_turns).update(row)
    shared = (of_turns & of_evaluations) - {"step", "phase"}
    assert {"generator_step", "time/sample_s"} <= shared and all(name.startswith(SHARED_WITH_TURNS) for name in shared)
