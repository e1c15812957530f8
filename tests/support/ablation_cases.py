"""Rows of an experiment's table, made by hand."""

from collections.abc import Mapping
from pathlib import Path

from tango_jax.config import default_config
from tango_jax.method.own_arm import stored_arm
from tango_jax.runtime.atomic import write_json_atomic
from tango_jax.tracking.evaluations import Evaluation, evaluations_of, sources_of
from tango_jax.tracking.learning_curve import Curve


def evaluation(step: int, accuracy: float, **other) -> Evaluation:
    """After so many generator turns of a run without a verifier, with 100 tokens and two seconds a turn."""
    facts = {"task": "last_letter", "setting": "", "start": 3, "arm": "grpo", "seed": 0, "turn": step,
             "sampled_tokens": 100 * step, "seconds": 2.0 * step, "verifier_step_f1": 0.5,
             "verifier_outcome_f1": 0.25}
    return Evaluation(**(facts | {"generator_step": step, "accuracy": accuracy} | other))


def curve(accuracy_by_step: dict[int, float], **other) -> Curve:
    return Curve(tuple(evaluation(step, accuracy, **other) for step, accuracy in accuracy_by_step.items()))


def run_rows(arm: str, accuracy: tuple[float, ...], start: int = 3, seed: int = 0, **other) -> list[Evaluation]:
    """A run that is evaluated every 10 generator steps."""
    return [evaluation(10 * index, value, arm=arm, start=start, seed=seed, **other)
            for index, value in enumerate(accuracy)]


OWN_ARMS = """
import dataclasses
from tango_jax.method.arms import ARMS
my_judge = dataclasses.replace(ARMS["fixed_generator"], label="mine that judges")
my_baseline = dataclasses.replace(ARMS["grpo"], label="mine by outcomes")
"""


def finished_rows(
    workdir: Path, arm: str, accuracy: tuple[float, ...], start: Mapping[str, str] = {}, **settings
) -> list[Evaluation]:
    """The rows of a finished run of an arm, as an experiment reads them from its workdir."""
    config = default_config()
    config.update_from_flattened_dict({"arm": arm} | settings)
    workdir.mkdir(parents=True)
    write_json_atomic(workdir / "summary.json", {"provenance": {"start": start}})
    write_json_atomic(workdir / "provenance.json", {"attempts": [{}], "files": {}, "arm": stored_arm(arm)})
    metrics = [{"step": 10 * index, "phase": "eval", "generator_step": 10 * index, "generator/accuracy": value}
               for index, value in enumerate(accuracy)]
    return evaluations_of(metrics, config, "", sources_of(workdir))
