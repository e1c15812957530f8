"""The results of an experiment in Markdown: for each setting what every arm reached, and how arms compare."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from tango_jax.method.arms import DEFAULT_ARM
from tango_jax.tracking.evaluations import Evaluation, beside_the_arm
from tango_jax.tracking.intervals import MIN_FOR_INTERVAL, Estimate, Unit, difference, estimate, ratio
from tango_jax.tracking.known_arms import known_names, record_of
from tango_jax.tracking.learning_curve import (
    LEVEL,
    Arms,
    Curves,
    Pairs,
    Reached,
    curves_by_setting,
    flops_to,
    has_flops,
    mean_accuracy,
    measured,
    over_same_steps,
    pairs_of,
    steps_to,
    tokens_to,
    trains_generator,
)
from tango_jax.tracking.scores import LEFT_OUT_SENTENCE

METHODS = f"""\
Accuracy is greedy, on held-out problems. Its mean is over generator steps (the area under the curve). Steps and tokens
(of both roles, warm-up included) are those to an accuracy of {LEVEL:g}, by linear interpolation between evaluations. A
run that does not reach it counts in full: the mean of its arm is then a lower bound (≥), and a ratio to it an upper
bound (≤). If runs of both arms do not reach it, the ratio is no bound (~). Runs of different lengths are cut to the
generator steps that all of them have, and the table says to which. A mean is over the means of the starts or, with one
start, over its seeds. Square brackets hold 95 % Student's t intervals over the same means, paired by start and seed
where arms are compared; with one start they say nothing about other starts. With fewer than {MIN_FOR_INTERVAL} runs,
round brackets hold the value of each run. Where one policy has both roles, the warm-up trains it, too: its tokens
include the warm-up, and its curves and steps begin after it. Tokens are those sampled. A verifier that does not write
(the scored arms, a process reward model) samples none: compare it by TFLOPs, in 10^12 FLOPs of what both roles
sampled, read and were updated with (tango_jax/tracking/turn_flops.py); tables of earlier versions have none.
Step F1 on live solutions is of the judgements in the generator's turns, of several of a solution the first. In arms
with step rewards they give these. They are sampled; but scored arms draw their marks only where
rl.verifications_per_solution is above 1, and a process reward model draws none.
{LEFT_OUT_SENTENCE}"""


def summarize(rows: Sequence[Evaluation]) -> str:
    parts = [METHODS]
    for (task, setting), arms in curves_by_setting(rows).items():
        parts += [f"## {heading(task, setting, arms)}", _start(arms), *_other_methods(arms),
                  *other_sources(arms.values()), *_arms_table(arms), *_comparisons(arms)]
    return "\n\n".join(parts) + "\n"


def heading(task: str, setting: str, arms: Arms) -> str:
    units = {unit for curves in arms.values() for unit in curves}
    starts, seeds = {start for start, _ in units}, {seed for _, seed in units}
    counts = ", ".join(f"{len(found)} {name}{'s' * (len(found) > 1)} ({', '.join(map(str, sorted(found)))})"
                       for name, found in (("start", starts), ("seed", seeds)))
    return f"{title_of(task, setting)}: {counts}"


def title_of(name: str, setting: str) -> str:
    return ", ".join(filter(None, [name, setting.replace(",", ", ")]))


def in_order(arms: Iterable[str]) -> list[str]:
    names = known_names()
    return sorted(arms, key=lambda arm: names.index(arm) if arm in names else len(names))


def outcome_only(arms: Iterable[str]) -> str | None:
    """The baseline: the first arm that trains the generator alone, by outcomes."""
    for arm in in_order(arms):
        record = record_of(arm)
        if record is not None and not record.uses_verifier and not record.needs_gold_steps:
            return arm
    return None


def upper_bound(arms: Iterable[str]) -> str | None:
    return next((arm for arm in in_order(arms) if (record := record_of(arm)) and record.needs_gold_steps), None)


def sampled_at_start(arms: Arms) -> str:
    """The share of right solutions in the first generator turn, of the first arm that has it."""
    for arm in in_order(arms):
        sampled = measured(arms[arm], lambda curve: curve.evaluations[0].sampled_accuracy)
        if None not in sampled.values():
            share = f"{100 * estimate(sampled).value:.3g} %"
            return f"; {share} of the solutions of {arm}'s first generator turn are right{_part_of(sampled, arms)}"
    return ""


def _part_of(values: Collection, arms: Arms) -> str:
    """Says so where not all starts and seeds of the table have a value."""
    count = len(set().union(*arms.values()))
    return "" if len(values) == count else f" (of {len(values)} of {count} starts and seeds)"


def ends_text(arms: Mapping[str, Curves], span: int) -> str:
    """What to know where arms end at different steps, or were run from different starts and seeds."""
    ends = {arm: sorted({curve.last_step for curve in curves.values()}) for arm, curves in arms.items()}
    units, told = [set(curves) for curves in arms.values()], []
    if any(found != [span] for found in ends.values()):
        all_ends = ", ".join(f"{arm} {'/'.join(map(str, found))}" for arm, found in ends.items())
        told.append(f"Over the first {span} generator steps, which all runs have (to their ends: {all_ends}).")
    if any(found != units[0] for found in units):
        told.append(f"The arms were not run from the same starts and seeds ({len(set.intersection(*units))} are common "
                    "to all): compare their differences, which are over pairs, and not their means.")
    return " ".join(told)


def line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def head(titles: Sequence[str]) -> list[str]:
    return [line(titles), "|---" * len(titles) + "|"]


def _start(arms: Arms) -> str:
    titles = {"accuracy": "greedy accuracy", "verifier_step_f1": "verifier step F1 on the fixed pool",
              "verifier_outcome_f1": "outcome F1"}
    asking, shown = [arm for arm in arms if (record := record_of(arm)) is None or record.uses_verifier], []
    for name, title in titles.items():
        # The verifier of arms that do not use it may have another start.
        chosen = in_order(asking or arms if name != "accuracy" else arms)
        groups = _alike({arm: {unit: getattr(curve.evaluations[0], name) for unit, curve in arms[arm].items()}
                         for arm in chosen})
        told = [f"{estimate(values).value:.3f}{_part_of(values, arms)}"
                + (f" of {', '.join(names)}" if len(groups) > 1 else "")
                for names, values in groups if None not in values.values()]
        shown += [f"{title} {' and '.join(told)}"] * bool(told)
    return f"Start: {', '.join(shown)}{sampled_at_start(arms)}."


def _alike(values: Mapping[str, dict[Unit, float | None]]) -> list[tuple[list[str], dict[Unit, float | None]]]:
    """The arms that have the same values, where they have any of the same run: their names, and the values of all."""
    groups: list[tuple[list[str], dict[Unit, float | None]]] = []
    for arm, own in values.items():
        for names, found in groups:
            if all(found.get(unit, value) == value for unit, value in own.items()):
                names.append(arm)
                found.update(own)
                break
        else:
            groups.append(([arm], dict(own)))
    return groups


def _other_methods(arms: Arms) -> list[str]:
    told = []
    for name, what in (("method", "other settings, such as a schedule, a reward, a loss or a learning rate"),
                       ("policies", "whether both roles are one policy (verifier.adapter)")):
        found: dict[str, list[str]] = {}
        for arm in in_order(arms):
            for value in {beside_the_arm(curve.evaluations[0]).get(name) for curve in arms[arm].values()} - {None, ""}:
                found.setdefault(value, []).append(arm)
        if len(found) > 1:
            groups = " and ".join(", ".join(names) for names in found.values())
            told.append(f"{groups} also differ in {what}: do not compare them as arms.")
    return told


def other_sources(runs: Iterable[Curves]) -> list[str]:
    sources = {curve.evaluations[0].source for curves in runs for curve in curves.values()} - {""}
    if len(sources) < 2:
        return []
    return [f"The runs were made with different source code of tango_jax ({', '.join(sorted(sources))}): if a change "
            "concerns the method, their arms do not compare."]


def _arms_table(arms: Arms) -> list[str]:
    whole = {arm: arms[arm] for arm in in_order(arms)}
    # An arm that trains the verifier alone ends with the last whole cycle, and cuts no other.
    same, span = over_same_steps({arm: curves for arm, curves in whole.items() if trains_generator(arm)} or whole)
    cut = {arm: same.get(arm, curves) for arm, curves in whole.items()}
    amounts = {"steps": (steps_to, 1), "1000 tokens": (tokens_to, 1e3)}
    if has_flops(cut.values()):
        amounts["TFLOPs"] = (flops_to, 1e12)
    lines = head(("arm", "runs", "accuracy, mean", "accuracy, end", f"reached {LEVEL:g}", *amounts,
                  "verifier step F1, end", "outcome F1, end", "step F1 on live solutions"))
    for arm, curves in cut.items():
        steps = measured(curves, steps_to) if trains_generator(arm) else {}
        shown = [_mean_reached({unit: found._replace(x=found.x / size) for unit, found in measured(curves, fn).items()})
                 if trains_generator(arm) else "" for fn, size in amounts.values()]
        reached = f"{sum(found.is_reached for found in steps.values())} of {len(steps)}" if steps else ""
        accuracy = [_mean(measured(curves, mean_accuracy)), _mean(_last(curves, "accuracy"))]
        scores = [_score(curves, name) for name in ("verifier_step_f1", "verifier_outcome_f1")]
        lines.append(line([arm, str(len(curves)), *accuracy, reached, *shown, *scores, _live(curves)]))
    ends = ends_text({arm: whole[arm] for arm in same}, span)
    return [*filter(None, [ends]), "\n".join(lines)]


def _comparisons(arms: Arms) -> list[str]:
    arms = {arm: arms[arm] for arm in in_order(arms) if trains_generator(arm)}
    baseline, parts = outcome_only(arms), []
    if baseline:
        pairs = [(arm, baseline) for arm in arms if arm != baseline]
        parts.append(_comparison_table(arms, pairs, upper_bound(arms)))
    if DEFAULT_ARM in arms:
        pairs = [(DEFAULT_ARM, arm) for arm in arms if arm not in (DEFAULT_ARM, baseline)]
        parts.append(_comparison_table(arms, pairs, None))
    return list(filter(None, parts))


def _comparison_table(arms: Arms, names: Sequence[tuple[str, str]], bound: str | None) -> str:
    if not names:
        return ""
    ratios = {"steps": steps_to, "tokens": tokens_to}
    if has_flops(arms.values()):
        ratios["FLOPs"] = flops_to
    titles = ["arm / arm", "pairs", "over steps", *(f"{what}, ratio" for what in ratios), "mean accuracy, difference"]
    lines = head(titles + [f"share of the gap from {names[0][1]} to {bound}"] * bool(bound))
    for first, second in names:
        pairs = pairs_of(arms[first], arms[second])
        if not pairs.units:
            continue
        cells = [f"{first} / {second}", *units_text(pairs), *(ratio_text(pairs, fn) for fn in ratios.values()),
                 difference_text(pairs)]
        if bound:
            cells.append(gap_text(arms[first], arms[second], arms[bound]))
        lines.append(line(cells))
    return "\n".join(lines)


def units_text(pairs: Pairs) -> list[str]:
    return [str(len(pairs.units)), str(pairs.span)]


def difference_text(pairs: Pairs, measure_fn: Callable = mean_accuracy) -> str:
    return figure_text(pairs.difference(measure_fn), len(pairs.units), sign="+")


def gap_text(arm: Curves, low: Curves, high: Curves) -> str:
    """The share of the gap that an arm closes, with units and steps where they are not the pair's."""
    if arm is high:
        return "1"
    pairs, three = pairs_of(arm, low), pairs_of(arm, low, high)
    if not three.units:
        return "no common runs"
    shown = figure_text(three.gap_share(), len(three.units))
    other = [f"of {len(three.units)}"] * (three.units != pairs.units)
    other += [f"over {three.span} steps"] * (three.span != pairs.span)
    return f"{shown} ({', '.join(other)})" if other else shown


def ratio_text(pairs: Pairs, measure_fn: Callable) -> str:
    if not pairs.units:
        return "no common runs"
    both = [measured(curves, measure_fn) for curves in pairs.arms]
    is_over, is_under = (all(found.is_reached for found in reached.values()) for reached in both)
    if not any(found.is_reached for reached in both for found in reached.values()):
        return "neither reaches it"
    begin = [not any(found.x for found in reached.values()) for reached in both]
    if any(begin):
        return "both begin there" if all(begin) else f"the {'first' if begin[0] else 'second'} begins there"
    bound = {(True, True): "", (True, False): "≤ ", (False, True): "≥ ", (False, False): "~ "}[is_over, is_under]
    return bound + figure_text(ratio(*map(_values, both)), len(pairs.units))


def _values(reached: Mapping[Unit, Reached]) -> dict[Unit, float]:
    return {unit: found.x for unit, found in reached.items()}


def _last(curves: Curves, name: str) -> dict[Unit, float | None]:
    return measured(curves, lambda curve: getattr(curve.evaluations[-1], name))


def _mean(values: Mapping[Unit, float | None]) -> str:
    if not values or None in values.values():
        return ""
    found = estimate(values, most=1.0)
    if len(values) < MIN_FOR_INTERVAL:
        return f"{found.value:.3f} ({', '.join(f'{value:.2f}' for value in values.values())})"
    return figure_text(found, len(values))


def _mean_reached(reached: Mapping[Unit, Reached]) -> str:
    if not any(found.is_reached for found in reached.values()):
        return ""
    found, bound = estimate(_values(reached)), "" if all(one.is_reached for one in reached.values()) else "≥ "
    if len(reached) < MIN_FOR_INTERVAL:
        shown = ", ".join(f"{'' if one.is_reached else '>'}{_short(one.x)}" for one in reached.values())
        return f"{bound}{_short(found.value)} ({shown})"
    return bound + figure_text(found, len(reached), _short)


def _score(curves: Curves, name: str) -> str:
    values = _last(curves, name)
    is_still = measured(curves, lambda curve: getattr(curve.evaluations[0], name)) == values
    return f"{estimate(values).value:.3f}, as it was" if is_still and None not in values.values() else _mean(values)


def _live(curves: Curves) -> str:
    found = measured(curves, lambda curve: curve.of("verifier_live_step_f1"))
    found = {unit: values[np.isfinite(values)] for unit, values in found.items()}
    if not all(values.size > 1 for values in found.values()):
        return ""
    first, last = ({unit: values[place] for unit, values in found.items()} for place in (0, -1))
    change = figure_text(difference(last, first), len(found), sign="+")
    return f"{estimate(first).value:.3f} to {estimate(last).value:.3f}: {change}"


def figure_text(found: Estimate, count: int, format_fn: Callable[[float], str] | None = None, sign: str = "") -> str:
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
