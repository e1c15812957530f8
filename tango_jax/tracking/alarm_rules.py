"""The rules behind the alarms. Each rule inspects the metrics so far and returns what is wrong, or None.

A rule takes the rows of metrics.jsonl (oldest first), the limits, and `ease`, a factor of at most 1 that tightens them.
It returns a `Finding`, or None if all is well or there are too few rows to judge. alarms.py evaluates every rule at the
end of each turn.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from tango_jax.config import ROLES
from tango_jax.runtime.failures import typed_command

# Where the verifier is measured: the beginning of the metrics' names, and how a message names it.
VERDICTS = {"verifier/live_": "in the generator's turns", "verifier/": "in the verifier's turns",
            "verifier/judged_": "of the part that it judges in the generator's turns"}  # fmt: skip


class Limits(NamedTuple):
    """What a run that is well stays within."""

    window: int = 5  # turns to average over; with fewer, only log-prob gap, first KL and grader alarms are raised
    margin: float = 0.9  # an alarm clears when its value is inside the limit by this margin (a factor)
    verdict_rate: float = 0.95  # share of one verdict; raised only if balanced accuracy is also below the next limit
    verdict_accuracy: float = 0.6
    # Share of the right verdicts that come with a wrong judgement of a step; raised only if balanced accuracy is at
    # least the limit before. For tasks with step labels.
    wrong_steps: float = 0.5
    wrong_labels: float = 0.25  # share of labels that differ from the grade whose place they take
    misaligned: float = 0.3  # share of the verifications whose judgements are more or fewer than the steps
    truncation: float = 0.1  # share of responses that reach the length limit
    shortened: float = 0.1  # share of solutions that are cut to fit the verifier's prompt
    # Mean gap in nats between sampler and trainer log-probs; it is 3e-7 in full float32 and about 2e-4 in bfloat16.
    logprob_gap: float = 0.02
    logprob_gap_share: float = 0.02  # share of tokens whose probabilities differ by more than 10 %
    first_kl: float = 0.01  # nats per token at a role's first update, where it should be 0
    kl: float = 0.5  # nats per token
    entropy_low: float = 0.1  # relative to the mean over the role's first `window` turns
    entropy_high: float = 3.0
    steps_low: float = 0.5  # relative to the mean over the first `window` turns
    steps_high: float = 1.5
    grader_failures: float = 0.01  # share of answers for which the grader fails or times out
    groups_without_signal: float = 0.95  # share of groups in which all samples have the same reward
    still_kl: float = 1e-6  # a role is not learning if its KL stays below this for a window after its first window


LIMITS = Limits()
Finding = tuple[str, str, str]  # what was observed; the limit; what to try
Rule = Callable[[Sequence[dict], Limits, float], Finding | None]


def values(rows: Iterable[dict], name: str, count: int) -> list[float]:
    """The metric in the first `count` rows that have it. Non-finite values are stored as null and are skipped."""
    return list(islice((row[name] for row in rows if row.get(name) is not None), count))


def recent_mean(rows: Sequence[dict], name: str, count: int, least: int) -> float | None:
    """Mean of the last `count` values, or None if there are fewer than `least` values."""
    found = values(reversed(rows), name, count)
    return float(np.mean(found)) if len(found) >= least else None


def means_by_role(rows: Sequence[dict], name: str, count: int) -> list[float]:
    """`recent_mean` of the generator's turns and of the verifier's, where there are `count` values. Their problems may
    be others, so that one must not hide the other."""
    generators = [row for row in rows if row.get("phase") == "generator"]
    others = [row for row in rows if row.get("phase") != "generator"]
    means = [recent_mean(turns, name, count, least=count) for turns in (generators, others)]
    return [mean for mean in means if mean is not None]


def _truncation(role: str, rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    mean = max(means_by_role(rows, f"{role}/truncation_rate", limits.window), default=None)
    if mean is None or mean <= limits.truncation * ease:
        return None
    return (
        f"{mean:.1%} of the {role}'s responses ended at the length limit",
        f"{limits.truncation}",
        "read a few of them: if they never end, the stop token or stage 1 is at fault; if they are sound, raise "
        f"{role}.max_response, or mask them out of the loss with {role}.loss.mask_overlong",
    )


def _logprob_gap(role: str, rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    # Checked from the first turn on: a gap this early points to a bug in the sampler, not to the training.
    mean = recent_mean(rows, f"{role}/logprob_gap_mean", limits.window, least=1)
    share = recent_mean(rows, f"{role}/logprob_gap_share", limits.window, least=1)
    if mean is None or share is None:
        return None
    if mean <= limits.logprob_gap * ease and share <= limits.logprob_gap_share * ease:
        return None
    return (
        f"log-probs of the {role}'s sampler and trainer differ by {mean:.3g} nats on average, and by more than 10 % at "
        f"{share:.1%} of the tokens",
        f"{limits.logprob_gap} nats, or a share of {limits.logprob_gap_share}",
        f"set {role}.top_p=1 and {role}.top_k=0; compare with {role}.model.compute_dtype=float32 and, in the "
        "environment, JAX_DEFAULT_MATMUL_PRECISION=highest: if the gap remains, a mask, position or cache is wrong; if "
        f"it disappears, it is rounding, which {role}.loss.importance_cap=2 corrects for (int8 in "
        f"{role}.model.sample_cache_dtype or sample_weight_dtype rounds most)",
    )


def _reference(role: str, rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    kl = next(iter(values(rows, f"{role}/kl_first", 1)), 0.0)
    if kl <= limits.first_kl * ease:
        return None
    return (
        f"the KL of the {role} to its reference was {kl:.3g} at its first update, where both have the same weights",
        f"{limits.first_kl}",
        f"the two models are scored differently: compare with {role}.model.compute_dtype=float32",
    )


def _kl(role: str, rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    mean = recent_mean(rows, f"{role}/kl", limits.window, least=limits.window)
    if mean is None or mean <= limits.kl * ease:
        return None
    return (
        f"the KL of the {role} to its reference is {mean:.3g} nats per token",
        f"{limits.kl}",
        f"lower {role}.optimizer.lr or raise {role}.loss.kl_coef, and read its responses: it may have found a way to "
        "hack the reward without solving anything",
    )


def _ratio_to_start(
    rows: Sequence[dict], name: str, limits: Limits, floor: float
) -> tuple[float, float, float] | None:
    """(ratio, mean of the first values, mean of the last values). Means below `floor` are raised to `floor`."""
    last = recent_mean(rows, name, limits.window, least=limits.window)
    if last is None:
        return None
    first = float(np.mean(values(rows, name, limits.window)))
    return max(last, floor) / max(first, floor), first, last


def _entropy(role: str, rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    compared = _ratio_to_start(rows, f"{role}/entropy", limits, floor=1e-6)
    if compared is None:
        return None
    ratio, first, last = compared
    seen = f"the entropy of the {role} went from {first:.3g} to {last:.3g} nats per token (a factor of {ratio:.2g})"
    if ratio < limits.entropy_low / ease:
        return (
            seen,
            f"{limits.entropy_low}",
            f"the policy no longer explores: raise {role}.loss.entropy_coef, set {role}.loss.clip_high above clip_low, "
            f"or lower {role}.optimizer.lr",
        )
    if ratio > limits.entropy_high * ease:
        return (
            seen,
            f"{limits.entropy_high}",
            f"the policy is degenerating: lower {role}.optimizer.lr or {role}.loss.entropy_coef, or raise "
            f"{role}.loss.kl_coef",
        )
    return None


def _steps(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    compared = _ratio_to_start(rows, "generator/steps_mean", limits, floor=1.0)
    if compared is None:
        return None
    ratio, first, last = compared
    seen = f"solutions went from {first:.3g} to {last:.3g} steps (a factor of {ratio:.2g})"
    if ratio > limits.steps_high * ease:
        return (
            seen,
            f"{limits.steps_high}",
            "read a few: empty steps can earn step rewards without doing any work. Lower rl.alpha_initial, or train "
            "the verifier more (rl.verifier_turns_per_cycle)",
        )
    if ratio < limits.steps_low / ease:
        return (
            seen,
            f"{limits.steps_low}",
            "read a few: with everything in a few steps, the verifier has little to judge. Raise rl.format_weight or "
            "task.min_steps, or lower generator.optimizer.lr",
        )
    return None


def _recent_verdicts(rows: Sequence[dict], names: Sequence[str], count: int) -> Iterator[tuple[str, list[float]]]:
    """Where verdicts were given, and the means of metrics of them over the last `count` turns there.

    The verifier's verdicts in the generator's turns and those in its own are kept apart: its own turns may have other
    problems. A place that fewer turns have is left out.
    """
    for prefix, place in VERDICTS.items():
        in_place = ([row.get(f"{prefix}{name}") for name in names] for row in reversed(rows))
        found = list(islice((means for means in in_place if None not in means), count))
        if len(found) == count:
            yield place, np.mean(found, axis=0).tolist()


def _one_verdict(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    names = ("rate_correct", "rate_invalid", "outcome_balanced_accuracy")
    for place, (correct, invalid, accuracy) in _recent_verdicts(rows, names, limits.window):
        rates = {"CORRECT": correct, "INCORRECT": 1.0 - correct - invalid, "INVALID": invalid}
        verdict = max(rates, key=rates.get)
        # If nearly all solutions belong to one class, giving one verdict is right, and the balanced accuracy is high.
        if rates[verdict] <= limits.verdict_rate * ease or accuracy >= limits.verdict_accuracy / ease:
            continue
        advice = (
            "its responses are truncated or malformed: see verifier/truncation_rate and verifier/format, and give the "
            "verifier's stage 1 more steps"
            if verdict == "INVALID"
            else "a verifier that cannot tell solutions apart collapses to one verdict: give its stage 1 more steps, "
            "use a stronger checkpoint, lower verifier.optimizer.lr, and check in verifier/solutions_correct that both "
            "classes occur"
        )
        return (
            f"{rates[verdict]:.1%} of the verdicts are {verdict} {place}, with a balanced accuracy of {accuracy:.2f}",
            f"a share of {limits.verdict_rate}, with a balanced accuracy below {limits.verdict_accuracy}",
            advice,
        )
    return None


def _wrong_steps(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    names = ("right_verdict_wrong_steps", "outcome_balanced_accuracy")
    for place, (share, accuracy) in _recent_verdicts(rows, names, limits.window):
        # Verdicts that tell nothing apart are the business of another alarm.
        if share <= limits.wrong_steps * ease or accuracy < limits.verdict_accuracy * ease:
            continue
        return (
            f"{share:.1%} of the right verdicts come with a step that is judged wrongly {place}; the balanced accuracy "
            f"of the verdicts is {accuracy:.2f}",
            f"{limits.wrong_steps}",
            "the verdict is right for other reasons than the steps, and step rewards mislead the generator: lower "
            "rl.alpha_initial, give the verifier's stage 1 more steps or rl.warmup_steps more turns, and read some in "
            "the report (filter: right verdict, wrong steps)",
        )
    return None


def _misaligned(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    # Of all solutions, or of those that it judges.
    means = (recent_mean(rows, f"verifier/{prefix}_rate_misaligned", limits.window, least=limits.window)
             for prefix in ("live", "judged"))  # fmt: skip
    mean = next((mean for mean in means if mean is not None), None)
    has_step_rewards = recent_mean(rows, "generator/step_rewarded_share", limits.window, least=1) is not None
    if mean is None or mean <= limits.misaligned * ease or not has_step_rewards:
        return None
    return (
        f"{mean:.1%} of the verifications in the generator's turns have more or fewer judgements than the solution has "
        "steps, so that it has no step reward",
        f"{limits.misaligned}",
        "read a few: a generator that joins its steps, or writes none, escapes a verifier that errs; raise "
        "rl.format_weight. If the steps are sound, give the verifier's stage 1 more steps, or rl.warmup_steps more "
        "turns with rl.gamma above 0",
    )


def _labels(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    mean = min(means_by_role(rows, "generator/label_accuracy", limits.window), default=None)
    if mean is None or 1 - mean <= limits.wrong_labels * ease:
        return None
    return (
        f"{1 - mean:.1%} of the labels differ from the grade: the majority's answers are taken for right, and often "
        "are not",
        f"{limits.wrong_labels}",
        "labels of a majority that is mostly wrong teach its mistakes: begin with a better stage 1 or with easier "
        "problems, or raise rl.samples_per_prompt",
    )


# Whose answers are graded, by what the names of their failures begin with.
GRADED = {"grader/": "generator", "grader/label_": "generator", "grader/second_try_": "second_try"}


def _grader(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    recent = list(islice((row for row in reversed(rows) if row.get("grader/errors") is not None), limits.window))
    pairs = [(row, start) for row in recent for start in GRADED if row.get(f"{start}errors") is not None]
    errors, timeouts = (sum(row[start + name] for row, start in pairs) for name in ("errors", "timeouts"))
    graded = sum(round(row[f"{GRADED[start]}/tokens_sampled"] / row[f"{GRADED[start]}/length_mean"])
                 for row, start in pairs)  # fmt: skip
    if not recent or (errors + timeouts) / graded <= limits.grader_failures * ease:
        return None
    return (
        f"the grader failed on {errors + timeouts} of {graded} answers ({errors} errors, {timeouts} timeouts), which "
        "count as wrong",
        f"{limits.grader_failures}",
        f"grade a file of such answers on its own ({typed_command('grade')}); gold answers that are not mathematical "
        "need another grader kind; a timeout means that grading took seconds of processor time, twice",
    )


def _shortened(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    for name, role, what in (
        ("verifier/shortened_rate", "verifier", "solutions were cut to fit the verifier's prompt: it judges steps that "
         "it cannot see"),
        ("verifier/teacher_silent", "verifier", "tokens have no teacher, whose prompt has no room for the solution"),
        ("second_try/shortened_rate", "generator", "second tries see a solution or a verification that was cut"),
        ("second_judgement/shortened_rate", "verifier", "second judgements are about a verification that was cut"),
    ):  # fmt: skip
        mean = max(means_by_role(rows, name, limits.window), default=None)
        if mean is not None and mean > limits.shortened * ease:
            return (f"{mean:.1%} of the {what}", f"{limits.shortened}",
                    f"raise {role}.max_prompt, or lower generator.max_response")  # fmt: skip
    return None


def _weight_of_steps(role: str, rows: Sequence[dict], count: int) -> float:
    """How much of the advantage comes from step rewards lately: alpha, times the share of samples that have any."""
    alpha, share = (recent_mean(rows, f"{role}/{name}", count, least=1) for name in ("alpha", "step_rewarded_share"))
    return (alpha or 0.0) * (share or 0.0)


def _standing_still(role: str, reward: str, rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    share = recent_mean(rows, f"{role}/groups_without_signal", limits.window, least=limits.window)
    # Where outcomes are all the same, step rewards may still teach.
    if share is not None and share - _weight_of_steps(role, rows, limits.window) > limits.groups_without_signal * ease:
        names = [f"{role}/reward/{name}" for name in (reward, "own")]  # a user's function may give all of the reward
        means = {name: recent_mean(rows, name, limits.window, least=1) for name in names}
        known = ", ".join(f"{name} is {mean:.2f}" for name, mean in means.items() if mean is not None)
        known = f" ({known})" if known else ""
        return (
            f"in {share:.1%} of the {role}'s groups all samples have the same reward{known}: no learning signal",
            f"{limits.groups_without_signal}",
            "a reward near 0 means that the task is too hard, or that the parser or grader rejects everything; one "
            f"near 1 means that it is too easy; otherwise raise {role}.temperature or rl.samples_per_prompt",
        )
    # Not logged without a reference policy (loss.kl_coef=0): whether the weights move is then not known here.
    kls = values(reversed(rows), f"{role}/kl", 2 * limits.window)
    largest = max(map(abs, kls[: limits.window]), default=0.0)
    # The first values are skipped: the policy had no time to move yet.
    if len(kls) == 2 * limits.window and largest < limits.still_kl / ease:
        return (
            f"the KL of the {role} to its reference was at most {largest:.2g} in its last {limits.window} turns: its "
            "weights barely change",
            f"{limits.still_kl}",
            f"raise {role}.optimizer.lr, and keep {role}.model.param_dtype=float32: bfloat16 loses small updates",
        )
    return None


RULES: dict[str, Rule] = {
    "verifier/one_verdict": _one_verdict,
    "verifier/wrong_steps": _wrong_steps,
    "verifier/misaligned": _misaligned,
    "generator/labels": _labels,
    "verifier/shortened": _shortened,
    "generator/steps": _steps,
    "grader/failures": _grader,
    "generator/standing_still": partial(_standing_still, "generator", "outcome"),
    "verifier/standing_still": partial(_standing_still, "verifier", "correctness"),
} | {
    f"{role}/{name}": partial(rule, role)
    for name, rule in (
        ("logprob_gap", _logprob_gap),
        ("reference", _reference),
        ("kl", _kl),
        ("entropy", _entropy),
        ("truncation", _truncation),
    )
    for role in ROLES
}
