"""Rows of an experiment's table, made by hand."""

from tango_jax.tracking.evaluations import Evaluation
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
