"""All arms of all settings against one of them: a table and `against.png`, for `ablate --figures ... --against=ARM`.

The summary compares arms within a setting. Here arms of other settings stand beside them as well, such as `tango` with
and without trust, or arms with a stage 1 of their own; what differs in more than the arm is marked. Pairs are runs of
one start and seed. All runs are cut to the generator steps that all of them have; since arms sample different numbers
of tokens in a step, accuracy also stands over the tokens that all of them sampled by then.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tango_jax.ablation.families import Settings, title_of
from tango_jax.ablation.summary import figure_text, in_order, ratio_text, upper_bound
from tango_jax.method.arms import Look
from tango_jax.runtime.checks import require
from tango_jax.tracking.curves import MARKERS, label_of, looks_of
from tango_jax.tracking.evaluations import Evaluation, beside_the_arm
from tango_jax.tracking.intervals import MIN_FOR_INTERVAL, Estimate, Unit, difference, estimate, gap_share
from tango_jax.tracking.learning_curve import (
    Curves,
    cut_to_shared_span,
    mean_accuracy,
    mean_over_tokens,
    shared_tokens,
    tokens_to,
)
from tango_jax.tracking.plots import WIDTH, make_figure, style

ROW_HEIGHT = 0.26  # inches
TITLES = ("over the generator steps", "over the same tokens")
NOTE = """\
Mean accuracy by start in round brackets, differences paired by start and seed with 95 % t intervals over start means in
square ones. † differs from the reference in more than the arm: in the setting of its name, or in prompts or stage 1."""


class Member(NamedTuple):
    """An arm of a setting."""

    arm: str
    setting: str
    curves: Curves
    measures: tuple[dict[Unit, float], ...]  # accuracy as TITLES says, and at the end

    @property
    def name(self) -> str:
        return title_of(self.arm, self.setting)


def compare(settings: Settings, against: str) -> tuple[str, Figure]:
    """The table, as Markdown, and the figure of a single task.

    Args:
        against: the reference, an arm or ARM:SETTING; an arm alone must be there in one setting only.

    Raises:
        ValueError: the settings are those of several tasks, or there is not one such reference.
    """
    tasks = sorted({task for task, _ in settings})
    require(len(tasks) == 1, f"--against={against} compares runs of one task, and the generator learned in these: "
            f"{', '.join(tasks) or 'none'}. Name the tables of one")  # fmt: skip
    members, tokens = _members({setting: arms for (_, setting), arms in settings.items()})
    reference = _reference(members, against)
    return _table(tasks[0], members, reference, tokens), _draw(tasks[0], members, reference, tokens)


def _members(settings: dict) -> tuple[list[Member], int]:
    """The arms of all settings, cut to what all of them have, and the tokens that all of them sampled."""
    found = {(arm, setting): arms[arm] for setting, arms in settings.items() for arm in in_order(arms)}
    found = cut_to_shared_span(found)
    tokens = shared_tokens(curve for curves in found.values() for curve in curves.values())
    measure_fns = (mean_accuracy, lambda curve: mean_over_tokens(curve, tokens),
                   lambda curve: curve.evaluations[-1].accuracy)  # fmt: skip
    return [Member(arm, setting, curves, tuple({unit: fn(curve) for unit, curve in curves.items()}
                                               for fn in measure_fns))
            for (arm, setting), curves in found.items()], tokens  # fmt: skip


def _reference(members: Sequence[Member], against: str) -> Member:
    arm, _, setting = against.partition(":")
    of_arm = [member for member in members if member.arm == arm]
    # Without a setting: the arm that has none, or the arm's only one.
    named = [member for member in of_arm if member.setting == setting] or (of_arm if not setting else [])
    known = ", ".join(f"{member.arm}:{member.setting}".rstrip(":") for member in members)
    count = len(named) or "none"
    require(len(named) == 1, f"--against={against} names {count} of the arms and settings: choose one of {known}")
    return named[0]


def _table(task: str, members: Sequence[Member], reference: Member, tokens: int) -> str:
    of_setting = {member.arm: member for member in members if member.setting == reference.setting}
    bound = of_setting.get(upper_bound(of_setting))
    gap = f"of the gap to {bound.arm}" if bound else None
    titles = ["arm", "runs", "accuracy, start", "mean over steps", f"minus {reference.arm}", gap,
              f"mean over {tokens / 1000:,.0f}k tokens", f"minus {reference.arm}", "accuracy, end",
              "1000 tokens in all", "tokens to 0.8, ratio"]  # fmt: skip
    lines = [f"## {task}: all arms against {reference.name}", "", NOTE, "",
             _line(title for title in titles if title), "|---" * len(list(filter(None, titles))) + "|"]  # fmt: skip
    for member in members:
        over_steps, over_tokens, end = member.measures
        mark = "" if _is_like(member, reference) else " †"
        share = None
        if bound:
            measures = (member.measures[0], reference.measures[0], bound.measures[0])
            share = "" if member is reference else "1" if member is bound else _text(gap_share(*measures), len(end))
        totals = [curve.evaluations[-1].sampled_tokens / 1000 for curve in member.curves.values()]
        cells = [member.name + mark, str(len(end)), f"{_start(member):.3f}", _by_start(over_steps),
                 _minus(member, reference, 0), share, _by_start(over_tokens), _minus(member, reference, 1),
                 f"{estimate(end).value:.3f}", f"{np.mean(totals):,.0f}", _tokens(member, reference)]  # fmt: skip
        lines.append(_line(cell for cell in cells if cell is not None))
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _is_like(member: Member, reference: Member) -> bool:
    """Whether all runs have the reference's stage 1, prompts and settings beside the arm."""
    def facts(row: Evaluation) -> tuple[str, ...]:
        return row.setup, beside_the_arm(row.method), row.problems, row.generator_start
    units = member.curves.keys() & reference.curves.keys()
    return bool(units) and all(facts(member.curves[unit].evaluations[0]) == facts(reference.curves[unit].evaluations[0])
               for unit in units)  # fmt: skip


def _start(member: Member) -> float:
    return estimate({unit: curve.evaluations[0].accuracy for unit, curve in member.curves.items()}).value


def _start_means(measure: dict[Unit, float]) -> list[float]:
    starts = dict.fromkeys(start for start, _ in measure)
    return [float(np.mean([value for (start, _), value in measure.items() if start == each])) for each in starts]


def _by_start(measure: dict[Unit, float]) -> str:
    means = _start_means(measure)
    shown = f" ({' '.join(f'{mean:.3f}' for mean in means)})" if len(means) > 1 else ""
    return f"{np.mean(means):.3f}{shown}"


def _text(found: Estimate, count: int) -> str:
    return figure_text(found, count, lambda value: f"{value:.2f}")


def _minus(member: Member, reference: Member, index: int) -> str:
    if member is reference:
        return ""
    ours, theirs = member.measures[index], reference.measures[index]
    return figure_text(difference(ours, theirs), len(ours.keys() & theirs.keys()), sign="+")


def _tokens(member: Member, reference: Member) -> str:
    if member is reference:
        return ""
    return ratio_text(*({unit: tokens_to(curve) for unit, curve in one.curves.items()} for one in (member, reference)))


def _draw(task: str, members: Sequence[Member], reference: Member, tokens: int) -> Figure:
    """A row for each member; two panels of accuracy, and one of paired differences from the reference over the steps:
    the mean, its interval, and the starts as ticks."""
    looks = looks_of(list(dict.fromkeys(member.arm for member in members)))
    title = (f"{task}: mean accuracy, in the middle over the first {tokens / 1000:,.0f}k tokens\n"
             "lines: 95 % intervals (t) over start means, which are the ticks")  # fmt: skip
    figure = make_figure(title, WIDTH, 1.3 + ROW_HEIGHT * len(members))
    steps, same_tokens, minus = figure.subplots(1, 3, sharey=True)
    for row, member in enumerate(members):
        look = looks[member.arm]
        for axes, measure in zip((steps, same_tokens), member.measures[:2], strict=True):
            _draw_row(axes, row, look, estimate(measure, most=1.0), measure)
        ours, theirs = member.measures[0], reference.measures[0]
        if member is not reference and (both := ours.keys() & theirs.keys()):
            _draw_row(minus, row, look, difference(ours, theirs), {unit: ours[unit] - theirs[unit] for unit in both})
    minus.axvline(0.0, color="black", linewidth=0.8)
    for axes, what in zip(figure.axes, (*TITLES, f"minus {reference.name}, by steps"), strict=True):
        style(axes)
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.set_xlabel(what, fontsize=8)
    for axes in (steps, same_tokens):
        axes.set_xlim(-0.03, 1.03)  # with whole markers at the ends
    steps.set_yticks(range(len(members)), [_label(member) for member in members])
    steps.set_ylim(len(members) - 0.5, -0.5)
    return figure


def _draw_row(axes: Axes, row: int, look: Look, found: Estimate, measure: dict[Unit, float]) -> None:
    if np.isfinite(found.low) and len(measure) >= MIN_FOR_INTERVAL:
        axes.plot([found.low, found.high], [row, row], color=look.colour, linewidth=1.2)
    means = _start_means(measure)
    axes.plot(means, [row] * len(means), "|", color=look.colour, markersize=12)
    axes.plot(found.value, row, MARKERS[look.marker], color=look.colour, markersize=5)


def _label(member: Member) -> str:
    return title_of(label_of(member.arm), member.setting)

