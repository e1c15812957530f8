"""The rules behind the alarms.

A rule takes the rows of metrics.jsonl (oldest first), the limits, and `ease`, a factor of at most 1 that tightens them.
It returns None where all is well or there are too few rows to judge.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from tango_jax.config import ROLES
from tango_jax.runtime.failures import typed_command

# Prefixes of the metrics of verdicts, and how a message names them.
VERDICTS = {"verifier/live_": "in the generator's turns", "verifier/": "in the verifier's turns",
            "verifier/judged_": "on a part of the solutions of the generator's turns"}
# A process reward model is read, too, and has neither.
BETTER_READER = "use a stronger checkpoint or, if the verifier has them, a longer stage 1 or warm-up"
# The grader's failures: grader/errors of the generator's own prompt, and grader/KIND_errors.
GRADED = re.compile("grader/(.*?)_?errors")


class Limits(NamedTuple):
    window: int = 5  # turns to average over; with fewer, only log-prob gap, first KL and grader alarms are raised
    margin: float = 0.9  # an alarm clears when its value is inside the limit by this factor
    verdict_rate: float = 0.95  # share of one verdict; raised only if balanced accuracy is also below the next limit
    verdict_accuracy: float = 0.6
    wrong_steps: float = 0.5  # share of right verdicts with a wrong step; only where verdicts reach the limit above
    misaligned: float = 0.3  # share of verifications with more or fewer judgements than steps
    truncation: float = 0.1  # share of responses that reach the length limit
    # Nats between sampler and trainer log-probs: 3e-7 in full float32, about 2e-4 in bfloat16.
    logprob_gap: float = 0.02
    logprob_gap_share: float = 0.02  # share of tokens whose probabilities differ by more than 10 %
    first_kl: float = 0.01  # nats per token at a role's first update, where it should be 0
    kl: float = 0.5  # nats per token
    entropy_low: float = 0.1  # relative to the mean over the role's first `window` turns
    entropy_high: float = 3.0
    grader_failures: float = 0.01  # share of answers for which the grader fails or times out
    groups_without_signal: float = 0.95  # share of groups in which all samples have the same reward
    step_count_corr: float = 0.5  # of step advantages with the number of steps, within groups
    steps_approved: float = 0.8  # raised only where a larger share of the steps is approved
    useful_share: float = 0.4  # of the tokens that an update computes, those that are not padding
    still_kl: float = 1e-6  # a role is not learning if its KL stays below this for a window after its first window


LIMITS = Limits()
Finding = tuple[str, str, str]  # what was observed; the limit; what to try
Rule = Callable[[Sequence[dict], Limits, float], Finding | None]


def values(rows: Iterable[dict], name: str, count: int) -> list[float]:
    """The metric in the first `count` rows that have it. Non-finite values are stored as null and are skipped."""
    return list(islice((row[name] for row in rows if row.get(name) is not None), count))


def recent_mean(rows: Sequence[dict], name: str, count: int, least: int) -> float | None:
    found = values(reversed(rows), name, count)
    return float(np.mean(found)) if len(found) >= least else None


def recent_turns(rows: Sequence[dict], role: str, count: int) -> list[dict]:
    return [row for row in rows if (row.get("phase") == "generator") == (role == "generator")][-count:]


def is_over(rows: Sequence[dict], role: str, count: int) -> bool:
    """Whether a role's training has probably ended: no turn for longer than ever before, and for 4 x `count` turns.
    A warm-up that ends early leaves out numbers of turns, so rows are counted."""
    places = [place for place, row in enumerate(rows) if (row.get("phase") == "generator") == (role == "generator")]
    return bool(places) and len(rows) - 1 - places[-1] > max([4 * count, *np.diff(places)])


def means_over_turns(rows: Sequence[dict], role: str, names: Sequence[str], count: int) -> list[float] | None:
    """The means of metrics over the last `count` turns of a role. A turn that lacks one is left out. None if half of
    the turns do: older ones say nothing of today."""
    turns = [] if is_over(rows, role, count) else recent_turns(rows, role, count)
    found = [[row[name] for name in names] for row in turns if all(row.get(name) is not None for name in names)]
    return np.mean(found, axis=0).tolist() if len(turns) == count and 2 * len(found) > count else None


def prompts_of(role: str, rows: Iterable[dict]) -> list[str]:
    """Names of the prompts that a role answers in these turns, also in a user's method."""
    metrics = dict.fromkeys(name for row in rows for name in row)
    names = [name.removesuffix("/truncation_rate") for name in metrics if name.endswith("/truncation_rate")]
    solved = {"generator", *(match[1] for name in metrics if (match := GRADED.fullmatch(name)))}
    return [name for name in names if (name in solved) == (role == "generator")]


def is_read(rows: Sequence[dict], name: str, count: int) -> bool:
    """Whether these responses are read in one pass and not written: a verifier's marks, or a reward model's scores."""
    return any(row.get(f"{name}/tokens_scored") for row in rows[-count:])


def _verifications(rows: Sequence[dict], count: int) -> tuple[str, bool]:
    """The prompt whose verdicts are measured, as in `Turn.judgements`, and whether it is read."""
    names = prompts_of("verifier", rows[-count:])
    name = "verifier" if "verifier" in names or not names else names[0]
    return name, is_read(rows, name, count)


def _not_read(name: str) -> str:
    """Of a verifier that is read: its judgements always have the right form."""
    return (f"nothing is read of a solution without steps: raise rl.format_weight; if marks are cut off (see {name}/"
            f"truncation_rate), raise verifier.max_response; if solutions are (see {name}/shortened_rate), raise "
            "verifier.max_prompt")


def _truncation(role: str, rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    recent = [row for turn in ROLES for row in recent_turns(rows, turn, limits.window)]
    means = [(*found, name, turn) for name in prompts_of(role, recent) for turn in ROLES
             if (found := means_over_turns(rows, turn, [f"{name}/truncation_rate"], limits.window))]
    mean, name, turn = max(means, default=(0.0, role, role))
    if mean <= limits.truncation * ease:
        return None
    return (
        f"{mean:.1%} of the {role}'s responses{'' if name == role else f' to the prompt {name}'} ended at the length "
        f"limit in the {turn}'s turns",
        f"{limits.truncation}",
        f"these marks are too long to be read: raise {role}.max_response" if is_read(rows, name, limits.window) else
        "read a few: if they never end, the stop token or stage 1 is at fault; if they are sound, raise "
        f"{role}.max_response, or mask them out of the loss with {role}.loss.mask_overlong",
    )


def _logprob_gap(role: str, rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    # From the first turn on: an early gap points to a bug in the sampler.
    mean = recent_mean(rows, f"{role}/logprob_gap_mean", limits.window, least=1)
    share = recent_mean(rows, f"{role}/logprob_gap_share", limits.window, least=1)
    if mean is None or share is None:
        return None
    if mean <= limits.logprob_gap * ease and share <= limits.logprob_gap_share * ease:
        return None
    first, more = ("", "") if is_read(rows, role, limits.window) else (
        f"set {role}.top_p=1 and {role}.top_k=0; ",
        f" (most with int8 in {role}.model.sample_cache_dtype or sample_weight_dtype), which "
        f"{role}.loss.importance_cap=2 corrects for")
    return (
        f"log-probs of the {role}'s sampler and trainer differ by {mean:.3g} nats on average, and by more than 10 % at "
        f"{share:.1%} of the tokens",
        f"{limits.logprob_gap} nats, or a share of {limits.logprob_gap_share}",
        f"{first}compare with {role}.model.compute_dtype=float32 and JAX_DEFAULT_MATMUL_PRECISION=highest: if the gap "
        f"remains, a mask, position or cache is wrong; if not, it is rounding{more}",
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
        f"{'look at its marks' if is_read(rows, role, limits.window) else 'read its responses'}: it may hack the "
        f"reward; lower {role}.optimizer.lr or raise {role}.loss.kl_coef",
    )


def _entropy(role: str, rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    last = recent_mean(rows, f"{role}/entropy", limits.window, least=limits.window)
    if last is None:
        return None
    first = float(np.mean(values(rows, f"{role}/entropy", limits.window)))
    ratio = max(last, 1e-6) / max(first, 1e-6)
    seen = f"the entropy of the {role} went from {first:.3g} to {last:.3g} nats per token (a factor of {ratio:.2g})"
    if ratio < limits.entropy_low / ease:
        return (
            seen,
            f"{limits.entropy_low}",
            f"its marks are nearly certain: right if {role}/pool/step_f1 is high; else lower {role}.optimizer.lr"
            if is_read(rows, role, limits.window) else
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


def _recent_verdicts(rows: Sequence[dict], names: Sequence[str], count: int) -> Iterator[tuple[str, list[float]]]:
    """Prefixes with verdicts in the last `count` turns, and the means of metrics over these."""
    for prefix, role in product(VERDICTS, ROLES):
        if found := means_over_turns(rows, role, [f"{prefix}{name}" for name in names], count):
            yield prefix, found


def _one_verdict(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    names = ("rate_correct", "rate_invalid", "outcome_balanced_accuracy")
    name, is_reader = _verifications(rows, limits.window)
    for prefix, (correct, invalid, accuracy) in _recent_verdicts(rows, names, limits.window):
        rates = {"CORRECT": correct, "INCORRECT": 1.0 - correct - invalid, "INVALID": invalid}
        verdict = max(rates, key=rates.get)
        # If nearly all solutions belong to one class, one verdict is right, and the balanced accuracy is high.
        if rates[verdict] <= limits.verdict_rate * ease or accuracy >= limits.verdict_accuracy / ease:
            continue
        malformed = _not_read(name) if is_reader else (
            f"its responses are truncated or malformed: see {name}/truncation_rate and {prefix}format, and give the "
            "verifier's stage 1 more steps")
        better = BETTER_READER if is_reader else "give the verifier's stage 1 more steps or use a stronger checkpoint"
        advice = (
            malformed
            if verdict == "INVALID"
            else f"it cannot tell solutions apart: {better}; if it is trained, lower verifier.optimizer.lr, and check "
            "in verifier/solutions_correct that both classes occur"
        )
        return (
            f"{rates[verdict]:.1%} of the verdicts are {verdict} {VERDICTS[prefix]}, with a balanced accuracy of "
            f"{accuracy:.2f}",
            f"a share of {limits.verdict_rate}, with a balanced accuracy below {limits.verdict_accuracy}",
            advice,
        )
    return None


def _wrong_steps(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    names = ("right_verdict_wrong_steps", "outcome_balanced_accuracy")
    rewarded, alpha = (recent_mean(rows, f"generator/{name}", limits.window, least=1)
                       for name in ("step_rewarded_share", "alpha"))
    if not rewarded or alpha == 0:  # as at trust 0, or where alpha's schedule has ended
        return None
    _, is_reader = _verifications(rows, limits.window)
    better = BETTER_READER if is_reader else "give the verifier's stage 1 or rl.warmup_steps more steps"
    for prefix, (share, accuracy) in _recent_verdicts(rows, names, limits.window):
        if share > limits.wrong_steps * ease and accuracy >= limits.verdict_accuracy * ease:
            return (
                f"{share:.1%} of the right verdicts come with a step that is judged wrongly {VERDICTS[prefix]}; the "
                f"balanced accuracy of the verdicts is {accuracy:.2f}",
                f"{limits.wrong_steps}",
                f"step rewards mislead the generator: lower rl.alpha_initial, {better}, and read some in the report "
                "(filter: right verdict, wrong steps)",
            )
    return None


def _misaligned(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    means = (means_over_turns(rows, "generator", [f"verifier/{prefix}_rate_misaligned"], limits.window)
             for prefix in ("live", "judged"))
    mean = next((found[0] for found in means if found is not None), None)
    has_step_rewards = recent_mean(rows, "generator/step_rewarded_share", limits.window, least=1) is not None
    if mean is None or mean <= limits.misaligned * ease or not has_step_rewards:
        return None
    name, is_reader = _verifications(rows, limits.window)
    return (
        f"{mean:.1%} of the verifications in the generator's turns have more or fewer judgements than the solution has "
        "steps, and the solution gets no step rewards",
        f"{limits.misaligned}",
        _not_read(name) if is_reader else
        "read a few: a generator that joins its steps, or writes none, escapes the verifier; raise rl.format_weight. "
        "If the steps are sound, give the verifier's stage 1 more steps, or rl.warmup_steps with rl.gamma above 0",
    )


def _grader(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    recent = list(islice((row for row in reversed(rows) if any(map(GRADED.fullmatch, row))), limits.window))
    errors = timeouts = graded = 0
    found = [(row, match) for row in recent for match in map(GRADED.fullmatch, row) if match]
    for row, match in found:
        # Labels by majority are of the generator's own answers.
        name = "generator" if match[1] in ("", "label") else match[1]
        if row.get(f"{name}/tokens_sampled"):
            errors += row[match[0]] or 0
            timeouts += row.get(match[0].replace("errors", "timeouts")) or 0
            graded += round(row[f"{name}/tokens_sampled"] / row[f"{name}/length_mean"])
    if not graded or (errors + timeouts) / graded <= limits.grader_failures * ease:
        return None
    return (
        f"the grader failed on {errors + timeouts} of {graded} answers ({errors} errors, {timeouts} timeouts), which "
        "count as wrong",
        f"{limits.grader_failures}",
        f"grade a file of such answers ({typed_command('grade')}); gold answers that are not mathematical need another "
        "grader kind",
    )


def _standing_still(role: str, rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    alpha, rewarded, taught = (recent_mean(rows, f"{role}/{name}", limits.window, least=1)
                               for name in ("alpha", "step_rewarded_share", "teacher_kl"))
    name, whose = f"{role}/groups_filled_up", f"groups that the {role} trains on"  # with dynamic sampling
    if not any(name in row for row in rows):
        name, whose = f"{role}/groups_without_signal", f"{role}'s groups"
    share = recent_mean(rows, name, limits.window, least=limits.window) if taught is None else None
    # Where outcomes are all the same, step rewards may still teach, and a teacher does.
    if share is not None and share - (alpha or 0.0) * (rewarded or 0.0) > limits.groups_without_signal * ease:
        turns = recent_turns(rows, role, limits.window)
        # What the arm rewards may be one of several: a grade, the majority's label, a product.
        names = sorted({name for row in turns for name in row
                        if name.startswith(f"{role}/reward/") or name == "generator/labelled_right"})
        known = ", ".join(f"{name} is {recent_mean(turns, name, limits.window, least=1) or 0:.2f}" for name in names)
        return (
            f"in {share:.1%} of the {whose} all samples have the same reward{f' ({known})' * bool(known)}: no "
            "learning signal",
            f"{limits.groups_without_signal}",
            "a reward near 0: the task is too hard, or the parser or grader rejects everything; near 1: it is easy; "
            f"otherwise raise {role}.temperature or rl.samples_per_prompt",
        )
    # Not logged without a reference policy (loss.kl_coef=0).
    kls = values(reversed(rows), f"{role}/kl", 2 * limits.window)
    largest = max(map(abs, kls[: limits.window]), default=0.0)
    # The first values are skipped: the policy had no time to move.
    if len(kls) == 2 * limits.window and largest < limits.still_kl / ease:
        return (
            f"the KL of the {role} to its reference was at most {largest:.2g} in its last {limits.window} turns: its "
            "weights barely change",
            f"{limits.still_kl}",
            f"raise {role}.optimizer.lr, and keep {role}.model.param_dtype=float32: bfloat16 loses small updates",
        )
    return None


def _step_count(rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    names = ("generator/step_count_corr", "generator/steps_approved")
    correlation, approved = means_over_turns(rows, "generator", names, limits.window) or (0.0, 0.0)
    if approved <= limits.steps_approved * ease or abs(correlation) <= limits.step_count_corr * ease:
        return None
    return (
        f"{approved:.0%} of the rewarded steps are approved, and the step advantages of a group follow the number of "
        f"steps (correlation {correlation:+.2f})",
        f"{limits.step_count_corr}, where more than {limits.steps_approved} are approved",
        f"step rewards teach to write {'more' if correlation > 0 else 'fewer'} steps, whatever they say: compare with "
        "generator.loss.step_norm=solutions",
    )


def _padding(role: str, rows: Sequence[dict], limits: Limits, ease: float) -> Finding | None:
    mean = recent_mean(rows, f"{role}/useful_share", limits.window, least=limits.window)
    if mean is None or mean >= limits.useful_share / ease or is_over(rows, role, limits.window):
        return None
    own_rows = "" if is_read(rows, role, limits.window) else (
        f", or set {role}.prompts_per_micro_batch=0, so that rows hold several prompts")
    return (
        f"{1 - mean:.0%} of the tokens that the {role}'s updates compute are padding",
        f"{limits.useful_share} of useful tokens",
        f"raise {role}.pack_length, so that more responses fit a row{own_rows}; tango_jax.plan compares the times",
    )


OF_UPDATES = (("logprob_gap", _logprob_gap), ("reference", _reference), ("kl", _kl), ("entropy", _entropy),
              ("standing_still", _standing_still))
RULES: dict[str, Rule] = {
    "generator/step_count": _step_count,
    "verifier/one_verdict": _one_verdict,
    "verifier/wrong_steps": _wrong_steps,
    "verifier/misaligned": _misaligned,
    "grader/failures": _grader,
} | {
    f"{role}/{name}": partial(rule, role)
    for name, rule in (*OF_UPDATES, ("truncation", _truncation), ("padding", _padding))
    for role in ROLES
}
