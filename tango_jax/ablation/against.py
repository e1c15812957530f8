"""All arms of all settings against one of them: a table and `against.png`, for `ablate --figures ... --against=ARM`.

Means are over the generator steps that all runs have, and over the tokens and FLOPs that all runs used by then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tango_jax.ablation.summary import (
    difference_text,
    ends_text,
    gap_text,
    head,
    in_order,
    line,
    other_sources,
    ratio_text,
    title_of,
    units_text,
    upper_bound,
)
from tango_jax.method.arms import Look
from tango_jax.runtime.checks import require
from tango_jax.tracking.curves import MARKERS, label_of, looks_of
from tango_jax.tracking.evaluations import Evaluation
from tango_jax.tracking.intervals import MIN_FOR_INTERVAL, Estimate, Unit, estimate, independent_means
from tango_jax.tracking.learning_curve import (
    LEVEL,
    Curve,
    Curves,
    Pairs,
    Settings,
    differing,
    flops_to,
    has_flops,
    mean_accuracy,
    mean_over,
    measured,
    over_same_steps,
    pairs_of,
    tokens_to,
)
from tango_jax.tracking.plots import WIDTH, make_figure, style

ROW_HEIGHT = 0.26  # inches
NOTE = """\
Round brackets: means of starts, or the seeds of a single start. Square brackets: 95 % t intervals over them.
Comparisons are paired: runs with the same start and seed, over the generator steps that both have.
Tokens are those sampled: a verifier that does not write has none. TFLOPs (10^12 FLOPs, by arithmetic) count what both
roles sample, read and are updated with.
† marks an arm that differs from the reference in more than the arm: in its setting, prompts, weights or stage 1."""


class Amount(NamedTuple):
    """What runs cost, and how much of it all of them used."""

    title: str
    column: str
    size: float
    digits: int
    common: float
    to_level: Callable

    def mean(self, curve: Curve) -> float:
        return mean_over(curve, self.column, self.common)

    def shown(self, value: float) -> str:
        return f"{value / self.size:,.{self.digits}f}"

    @property
    def text(self) -> str:
        return f"{self.shown(self.common)}{self.title}"


class Member(NamedTuple):
    arm: str
    setting: str
    whole: Curves  # to their ends
    curves: Curves  # over the steps that all runs of all members have
    pairs: Pairs  # with the reference

    @property
    def name(self) -> str:
        return title_of(self.arm, self.setting)

    @property
    def is_like_reference(self) -> bool:
        """Whether the arm alone differs. A missing digest and another setting count as a difference."""
        ours, theirs = self.pairs.arms
        both = [(ours[unit], theirs[unit]) for unit in ours]
        rows = [(one.evaluations[0], other.evaluations[0]) for one, other in both]
        is_told = all((one.setup and other.setup) or one.setting == other.setting for one, other in rows)
        return bool(rows) and is_told and not any(differing(*curves) for curves in both)


def compare(settings: Settings, against: str, missing: str = "") -> tuple[str, Figure]:
    """The table, as Markdown, and the figure. `against`: ARM or ARM:SETTING. `missing`: what to say of runs that are
    left out. Raises ValueError unless there is one task and one such reference."""
    tasks = sorted({task for task, _ in settings})
    require(len(tasks) == 1, f"--against={against} compares runs of one task; in these tables the generator learned "
            f"{', '.join(tasks) or 'none'}. Name the tables of one task")
    found = {(arm, setting): arms[arm] for (_, setting), arms in settings.items() for arm in in_order(arms)}
    reference = _reference(found, against)
    cut, span = over_same_steps(found)
    ends = [curve.evaluations[-1] for curves in cut.values() for curve in curves.values()]
    amounts = [Amount("k tokens", "sampled_tokens", 1e3, 0, min(end.sampled_tokens for end in ends), tokens_to)]
    if has_flops(cut.values()):
        amounts.append(Amount(" TFLOPs", "flops", 1e12, 2, min(end.flops for end in ends), flops_to))
    members = [Member(*key, found[key], cut[key], pairs_of(found[key], found[reference])) for key in found]
    facts = (tasks[0], members, members[list(found).index(reference)], span, amounts, missing)
    return _table(*facts), _draw(*facts)


def _reference(found: Mapping[tuple[str, str], Curves], against: str) -> tuple[str, str]:
    arm, _, setting = against.partition(":")
    of_arm = [key for key in found if key[0] == arm]
    # Without a setting: the arm without one, or the arm's only setting.
    named = [key for key in of_arm if key[1] == setting] or (of_arm if not setting else [])
    known = ", ".join(":".join(filter(None, key)) for key in found)
    count = len(named) or "none"
    require(len(named) == 1, f"--against={against} matches {count} of the arms and settings: choose one of {known}")
    return named[0]


def _table(task: str, members: Sequence[Member], reference: Member, span: int, amounts: Sequence[Amount],
           missing: str) -> str:
    of_setting = {member.arm: member for member in members if member.setting == reference.setting}
    bound = of_setting.get(upper_bound(set(of_setting) - {reference.arm}))
    titles = ["arm", "runs", "accuracy, start", "mean over steps", "pairs", "over steps", f"minus {reference.arm}",
              *([f"of the gap to {bound.arm}"] if bound else []), "accuracy, end"]
    for amount in amounts:
        titles += [f"mean over {amount.text}", f"minus {reference.arm}", f"{amount.title.strip()} in all",
                   f"{amount.title.split()[-1]} to {LEVEL:g}, ratio"]
    told = ends_text({member.name: member.whole for member in members}, span)
    lines = [f"## {task}: all arms against {reference.name}", "", NOTE, *filter(None, [told, missing]),
             *other_sources([member.whole for member in members]), "", *head(titles)]
    for member in members:
        first = measured(member.curves, lambda curve: curve.evaluations[0])
        last = measured(member.curves, lambda curve: curve.evaluations[-1])
        mark = "" if member is reference or member.is_like_reference else " †"
        cells = [member.name + mark, str(len(last)), f"{_mean(first, 'accuracy'):.3f}",
                 _by_start(measured(member.curves, mean_accuracy)), *_compared(member, reference, bound),
                 f"{_mean(last, 'accuracy'):.3f}"]
        for amount in amounts:
            pairs = member.pairs if member is not reference else None
            cells += [_by_start(measured(member.curves, amount.mean)),
                      difference_text(pairs, amount.mean) if pairs else "",
                      amount.shown(_mean(last, amount.column)),
                      ratio_text(pairs, amount.to_level) if pairs else ""]
        lines.append(line(cells))
    return "\n".join(lines) + "\n"


def _compared(member: Member, reference: Member, bound: Member | None) -> list[str]:
    if member is reference:
        return [""] * (4 if bound else 3)
    gap = [gap_text(member.whole, reference.whole, bound.whole)] if bound else []
    return [*units_text(member.pairs), difference_text(member.pairs), *gap]


def _mean(rows: Mapping[Unit, Evaluation], name: str) -> float:
    return estimate({unit: getattr(row, name) for unit, row in rows.items()}).value


def _means(values: Mapping[Unit, float]) -> list[float]:
    return independent_means(list(values), np.array(list(values.values()))).tolist()


def _by_start(values: Mapping[Unit, float]) -> str:
    means = _means(values)
    shown = f" ({' '.join(f'{mean:.3f}' for mean in means)})" if len(means) > 1 else ""
    return f"{np.mean(means):.3f}{shown}"


def _draw(task: str, members: Sequence[Member], reference: Member, span: int, amounts: Sequence[Amount],
          missing: str) -> Figure:
    looks = looks_of(list(dict.fromkeys(member.arm for member in members)))
    title = (f"{task}: mean accuracy over the first {span} generator steps, and over the first "
             f"{' and '.join(amount.text for amount in amounts)}\n"
             "lines: 95 % intervals (t) over the means of starts (ticks)" + f"\n{missing}" * bool(missing))
    figure = make_figure(title, WIDTH + 2.0 * (len(amounts) - 1), 1.3 + ROW_HEIGHT * len(members))
    *means, minus = figure.subplots(1, 2 + len(amounts), sharey=True)
    measures = {"over the generator steps": mean_accuracy}
    measures |= {f"over the same {amount.title.split()[-1]}": amount.mean for amount in amounts}
    for row, member in enumerate(members):
        look, pairs = looks[member.arm], member.pairs
        for axes, measure_fn in zip(means, measures.values(), strict=True):
            values = measured(member.curves, measure_fn)
            _draw_row(axes, row, look, estimate(values, most=1.0), values)
        if member is not reference and pairs.units:
            ours, theirs = (measured(curves, mean_accuracy) for curves in pairs.arms)
            _draw_row(minus, row, look, pairs.difference(), {unit: ours[unit] - theirs[unit] for unit in ours})
            minus.text(1.02, row, f"{len(pairs.units)} pairs, {pairs.span} steps", fontsize=7, va="center",
                       transform=minus.get_yaxis_transform())
    minus.axvline(0.0, color="black", linewidth=0.8)
    for axes, name in zip(figure.axes, (*measures, f"minus {reference.name}, by steps"), strict=True):
        style(axes)
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.set_xlabel(name, fontsize=8)
    for axes in means:
        axes.set_xlim(-0.03, 1.03)
    means[0].set_yticks(range(len(members)), [title_of(label_of(member.arm), member.setting) for member in members])
    means[0].set_ylim(len(members) - 0.5, -0.5)
    return figure


def _draw_row(axes: Axes, row: int, look: Look, found: Estimate, values: Mapping[Unit, float]) -> None:
    if np.isfinite(found.low) and len(values) >= MIN_FOR_INTERVAL:
        axes.plot([found.low, found.high], [row, row], color=look.colour, linewidth=1.2)
    means = _means(values)
    axes.plot(means, [row] * len(means), "|", color=look.colour, markersize=12)
    axes.plot(found.value, row, MARKERS[look.marker], color=look.colour, markersize=5)
