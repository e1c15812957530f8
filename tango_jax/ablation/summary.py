"""The results of an experiment in Markdown: rows of its table in; for each setting what every arm reached, and how arms
compare, with the number of runs and intervals."""

from collections.abc import Mapping, Sequence

import numpy as np

from tango_jax.method.arms import DEFAULT_ARM
from tango_jax.tracking.evaluations import Evaluation, beside_the_arm
from tango_jax.tracking.intervals import MIN_FOR_INTERVAL, Estimate, Unit, difference, estimate, gap_share, ratio
from tango_jax.tracking.known_arms import known_names, record_of
from tango_jax.tracking.learning_curve import (
    LEVEL,
    Arms,
    Curves,
    Reached,
    curves_by_setting,
    cut_to_shared_span,
    mean_accuracy,
    same_span,
    steps_to,
    tokens_to,
    trains_generator,
)

METHODS = f"""\
Accuracy is greedy, on held-out problems; its mean is over generator steps (the area under the curve). Steps and tokens
(of both roles, warm-up included) are those to an accuracy of {LEVEL:g}, by linear interpolation between evaluations. A
run that does not reach it counts with all that it had: the mean of its arm is then a lower bound (≥), and a ratio to it
an upper one (≤); where runs of both arms do not reach it, the ratio is no bound (~). Runs of different lengths are cut
to the generator steps that all of them have, and the table says to which. Square brackets hold 95 % intervals, paired
by start and seed where arms are compared: Student's t over the means of the starts or, of a single start, over its
seeds, which says nothing about other starts. Where there are fewer than {MIN_FOR_INTERVAL} runs, each stands in round
brackets instead."""


def summarize(rows: Sequence[Evaluation]) -> str:
    """Markdown with a section for every setting of every task."""
    parts = [METHODS]
    for (task, setting), arms in curves_by_setting(rows).items():
        parts += [heading(task, setting, arms), _start(arms), *_other_methods(arms), *_arms_table(arms),
                  *_comparisons(arms)]
    return "\n\n".join(parts) + "\n"


def heading(task: str, setting: str, arms: Arms) -> str:
    units = {unit for curves in arms.values() for unit in curves}
    starts, seeds = {start for start, _ in units}, {seed for _, seed in units}
    counts = ", ".join(f"{len(found)} {name}{'s' * (len(found) > 1)} ({', '.join(map(str, sorted(found)))})"
                       for name, found in (("start", starts), ("seed", seeds)))  # fmt: skip
    return f"## {', '.join(filter(None, [task, setting]))}: {counts}"


def in_order(arms: Mapping[str, object]) -> list[str]:
    """Arms in their usual order; those that are not known come last."""
    names = known_names()
    return sorted(arms, key=lambda arm: names.index(arm) if arm in names else len(names))


def outcome_only(arms: Mapping[str, object]) -> str | None:
    """The baseline: the first arm whose generator is trained alone, with nothing but outcome rewards."""
    for arm in in_order(arms):
        record = record_of(arm)
        if record is not None and not record.uses_verifier and not record.needs_gold_steps:
            return arm
    return None


def upper_bound(arms: Mapping[str, object]) -> str | None:
    """The arm that is given the labels of every step."""
    return next((arm for arm in in_order(arms) if (record := record_of(arm)) and record.needs_gold_steps), None)


def sampled_at_start(arms: Arms) -> float | None:
    """Share of right answers in the first generator turn, of the first arm that has it; None if no arm has."""
    for arm in in_order(arms):
        sampled = [curve.evaluations[0].sampled_accuracy for curve in arms[arm].values()]
        if None not in sampled:
            return float(np.mean(sampled))
    return None


def pass_rate_at_start(arms: Arms) -> float:
    """Share of right answers before the generator has learned: of sampled solutions, or else of greedy ones."""
    sampled = sampled_at_start(arms)
    if sampled is not None:
        return sampled
    return float(np.mean([curve.evaluations[0].accuracy for curves in arms.values() for curve in curves.values()]))


def values_of(reached: Mapping[Unit, Reached]) -> dict[Unit, float]:
    return {unit: found.x for unit, found in reached.items()}


def _start(arms: Arms) -> str:
    found = {name: [getattr(curve.evaluations[0], name) for curves in arms.values() for curve in curves.values()]
             for name in ("accuracy", "verifier_step_f1", "verifier_outcome_f1")}  # fmt: skip
    titles = {"accuracy": "greedy accuracy", "verifier_step_f1": "verifier step F1 on the fixed pool",
              "verifier_outcome_f1": "outcome F1"}  # fmt: skip
    shown = [f"{titles[name]} {np.mean(values):.3f}" for name, values in found.items() if None not in values]
    sampled = sampled_at_start(arms)
    told = "" if sampled is None else f"; {100 * sampled:.3g} % of the solutions of the first generator turn are right"
    return f"Start: {', '.join(shown)}{told}."


def _other_methods(arms: Arms) -> list[str]:
    """A line about arms that differ in more than the arm."""
    by_method: dict[str, list[str]] = {}
    for arm in in_order(arms):
        for method in {beside_the_arm(curve.evaluations[0].method) for curve in arms[arm].values()} - {""}:
            by_method.setdefault(method, []).append(arm)
    if len(by_method) < 2:
        return []
    return [f"Other settings differ as well, such as a schedule, a reward, a loss or a learning rate, between "
            f"{' and '.join(', '.join(names) for names in by_method.values())}: these arms do not compare as arms."]


def _arms_table(arms: Arms) -> list[str]:
    """The table of the arms, over the generator steps that all runs have, and a line that names these if some have
    more."""
    ends = {arm: sorted({curve.last_step for curve in curves.values()}) for arm, curves in arms.items()}
    span, arms = min(found[0] for found in ends.values()), cut_to_shared_span(arms)
    titles = ("arm", "runs", "accuracy, mean", "accuracy, end", f"reached {LEVEL:g}", "steps", "1000 tokens",
              "verifier step F1, end", "outcome F1, end", "step F1 on live solutions, sampled")  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for arm in in_order(arms):
        curves = arms[arm]
        steps = tokens = {}
        if trains_generator(arm):
            steps = {unit: steps_to(curve) for unit, curve in curves.items()}
            tokens = {unit: tokens_to(curve) for unit, curve in curves.items()}
            tokens = {unit: found._replace(x=found.x / 1000) for unit, found in tokens.items()}
        reached = f"{sum(found.is_reached for found in steps.values())} of {len(steps)}" if steps else ""
        mean = {unit: mean_accuracy(curve) for unit, curve in curves.items()}
        cells = [arm, str(len(curves)), _mean(mean), _mean(_last(curves, "accuracy")), reached, _mean_reached(steps),
                 _mean_reached(tokens), _score(curves, "verifier_step_f1"), _score(curves, "verifier_outcome_f1"),
                 _live(curves)]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    if all(found == [span] for found in ends.values()):
        return ["\n".join(lines)]
    told = ", ".join(f"{arm} {'/'.join(map(str, ends[arm]))}" for arm in in_order(ends))
    return [f"Over the first {span} generator steps, which all runs have (to their ends: {told}).", "\n".join(lines)]


def _comparisons(arms: Arms) -> list[str]:
    """Tables of the arms against the baseline, and of the method against the others."""
    arms = {arm: curves for arm, curves in arms.items() if trains_generator(arm)}
    baseline, bound, parts = outcome_only(arms), upper_bound(arms), []
    if baseline:
        pairs = [(arm, baseline) for arm in in_order(arms) if arm != baseline]
        parts.append(_comparison_table(arms, pairs, bound))
    if DEFAULT_ARM in arms:
        pairs = [(DEFAULT_ARM, arm) for arm in in_order(arms) if arm not in (DEFAULT_ARM, baseline)]
        parts.append(_comparison_table(arms, pairs, None))
    return list(filter(None, parts))


def _comparison_table(arms: Arms, pairs: Sequence[tuple[str, str]], bound: str | None) -> str:
    """Each row compares two arms over the steps that their common units have; with a bound also by the share of the gap
    to it that the first closes."""
    if not pairs:
        return ""
    titles = ["arm / arm", "pairs", "over steps", "steps, ratio", "tokens, ratio", "mean accuracy, difference"]
    titles += [f"share of the gap from {pairs[0][1]} to {bound}"] if bound else []
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for first, second in pairs:
        both, span = same_span({arm: arms[arm] for arm in (first, second)})
        count = len(both[first])
        if not count:
            continue
        cells = [f"{first} / {second}", str(count), str(span)]
        for measure_fn in (steps_to, tokens_to):
            cells.append(ratio_text(*({unit: measure_fn(curve) for unit, curve in both[arm].items()}
                                  for arm in (first, second))))  # fmt: skip
        cells.append(figure_text(difference(*_means(both).values()), count, sign="+"))
        if bound:
            cells.append(_gap_share(arms, (first, second, bound), count, span) if first != bound else "1")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _means(arms: Arms) -> dict[str, dict[Unit, float]]:
    return {arm: {unit: mean_accuracy(curve) for unit, curve in curves.items()} for arm, curves in arms.items()}


def _gap_share(arms: Arms, names: tuple[str, str, str], pairs: int, steps: int) -> str:
    """The share of the gap from the second arm to the third that the first closes; with the number of units and steps
    that all three have, where these are not those of the pair."""
    three, span = same_span({arm: arms[arm] for arm in names})
    common = len(three[names[0]])
    if not common:
        return "no common runs"
    shown = figure_text(gap_share(*_means(three).values()), common)
    other = [f"of {common}"] * (common != pairs) + [f"over {span} steps"] * (span != steps)
    return f"{shown} ({', '.join(other)})" if other else shown


def _last(curves: Curves, name: str) -> dict[Unit, float | None]:
    return {unit: getattr(curve.evaluations[-1], name) for unit, curve in curves.items()}


def _mean(values: Mapping[Unit, float | None]) -> str:
    if not values or None in values.values():
        return ""
    if len(values) < MIN_FOR_INTERVAL:
        return f"{np.mean(list(values.values())):.3f} ({', '.join(f'{value:.2f}' for value in values.values())})"
    return figure_text(estimate(values, most=1.0), len(values))


def _mean_reached(reached: Mapping[Unit, Reached]) -> str:
    if not reached or not any(found.is_reached for found in reached.values()):
        return ""
    values, is_bound = values_of(reached), not all(found.is_reached for found in reached.values())
    if len(values) < MIN_FOR_INTERVAL:
        shown = ", ".join(f"{'' if found.is_reached else '>'}{_short(found.x)}" for found in reached.values())
        return f"{'≥ ' * is_bound}{_short(np.mean(list(values.values())))} ({shown})"
    return "≥ " * is_bound + figure_text(estimate(values), len(values), _short)


def ratio_text(over: Mapping[Unit, Reached], under: Mapping[Unit, Reached]) -> str:
    """A ratio of means, marked where runs are censored; none where no run of either arm got there."""
    units = over.keys() & under.keys()
    if not units:
        return "no common runs"
    if not any(reached[unit].is_reached for unit in units for reached in (over, under)):
        return "neither reaches it"
    begin = [not any(reached[unit].x for unit in units) for reached in (over, under)]
    if any(begin):
        return "both begin there" if all(begin) else f"the {'first' if begin[0] else 'second'} begins there"
    is_over, is_under = (all(reached[unit].is_reached for unit in units) for reached in (over, under))
    bound = {(True, True): "", (True, False): "≤ ", (False, True): "≥ ", (False, False): "~ "}[is_over, is_under]
    return bound + figure_text(ratio(values_of(over), values_of(under)), len(units))


def _score(curves: Curves, name: str) -> str:
    values = _last(curves, name)
    shown = _mean(values)
    is_still = all(getattr(curve.evaluations[0], name) == values[unit] for unit, curve in curves.items())
    return f"{np.mean(list(values.values())):.3f}, as it was" if shown and is_still else shown


def _live(curves: Curves) -> str:
    """The sampled verifier on live solutions, at the first and at the last evaluation."""
    found = {unit: curve.of("verifier_live_step_f1") for unit, curve in curves.items()}
    found = {unit: values[np.isfinite(values)] for unit, values in found.items()}
    if not all(values.size > 1 for values in found.values()):
        return ""
    first, last = ({unit: values[place] for unit, values in found.items()} for place in (0, -1))
    change = figure_text(difference(last, first), len(found), sign="+")
    return f"{np.mean(list(first.values())):.3f} to {np.mean(list(last.values())):.3f}: {change}"


def figure_text(found: Estimate, count: int, format_fn=None, sign: str = "") -> str:
    """A figure of `count` runs with its interval, if there are runs enough for one."""
    format_fn = format_fn or (lambda value: f"{value:{sign}.3f}")
    if not count:
        return "no common runs"
    if not np.isfinite(found.value):
        return "no gap to be seen"
    if count < MIN_FOR_INTERVAL or not np.isfinite(found.low):
        return format_fn(found.value)
    return f"{format_fn(found.value)} [{format_fn(found.low)}, {format_fn(found.high)}]"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
