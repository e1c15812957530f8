"""A run whose verifier stops at its first INCORRECT and whose steps are rewarded by probabilities."""

import numpy as np
import pytest

from support.paths import CONFIGS
from support.policies import policies_of
from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.grading import parse_verification
from tango_jax.loop import run
from tango_jax.runtime.checks import read_json_object
from tango_jax.runtime.console import Console
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.rollout_dump import read_rollouts

SETTINGS = ("verifier.stop_at_first_error=True", "rl.step_reward=probability", "rl.verifications_per_solution=2",
            "rl.dynamic_sampling=1", "rl.trust=(0.0,0.5)", "rl.format_weight=0.5", "rollouts.every=1",
            # Two words, so that there is a step to leave out, and errors to stop at.
            *(f"task.{split}_words=(2,2)" for split in ("sft", "rl", "test")), "task.claim_noise=0.6")


@pytest.mark.long
def test_a_run_of_both(tmp_path):
    stage_one = [f"{role}.{setting}" for role in ROLES for setting in (
        "sft.steps=200", "sft.batch_size=12", "sft.eval_every=100", "sft.checkpoint_every=100", "mesh.fsdp=1",
        "row_buckets=(8,)", "cache_buckets=()", "max_response=48")]
    config = load_config(str(CONFIGS / "tiny.py"), [*stage_one, *SETTINGS])
    run.run_or_resume(config, tmp_path, Console(enabled=False), policies_of(config))
    turns = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["phase"] == "generator"]
    assert len(turns) == 6 and np.mean([row["generator/step_rewarded_share"] for row in turns]) > 0.3
    summary = read_json_object(tmp_path / "summary.json", "")
    assert summary["compiles_after_warmup"] == 0 and "first_error_f1_final" in summary["verifier"]
    stopped = rewarded = 0
    for rollout in read_rollouts(tmp_path / "rollouts", with_evaluations=True):
        num_steps, format_score = len(rollout["solution"]["steps"]), rollout["solution"]["format"]
        for number, said in enumerate(rollout["verifications"]):
            parsed = parse_verification(said["text"], num_steps, format_score, stops=True)
            assert said["judgements"] == list(parsed.judgements) and said["format"] == parsed.format_score
            stopped += parsed.aligned and None in parsed.judgements
            if rollout["role"] == "evaluation":  # greedy: there are no rewards
                assert "p_steps" not in said
                continue
            p_steps = said.get("p_steps", [])
            assert [p is None for p in p_steps] == [mark is None for mark in parsed.judgements]
            assert all(0.0 <= p <= 1.0 for p in p_steps if p is not None)
            if rollout["role"] == "generator" and (rewards := rollout["step_rewards"][number]):
                expected = [p and (2 * p - 1) / num_steps for p in p_steps]
                assert rewards == pytest.approx(expected, abs=1e-5)
                rewarded += 1
    assert stopped > 20 and rewarded > 20, (stopped, rewarded)
