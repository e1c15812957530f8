"""Alarms: what the metrics of the turns say about a run that is going wrong, with what to try.

In: rows of metrics.jsonl, oldest first, and the limits (`alarms.*` in defaults.py). Out: an `Alarm` for everything that
is wrong at the last row. Stage: the end of every turn (loggers.py), which writes `alarm/<name>` 0 or 1 into the row and
tells a person when an alarm starts and when it is over. All of it is a function of the rows (the rules are those of
alarm_rules.py), so a resumed run, which has them, goes on with the same alarms, and a report can tell the whole story
from the file (`periods`).

Rows are kept from the first one on, since some limits are relative to how a role began; a run has hundreds of them.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.tracking.alarm_rules import RULES

TURN_PHASES = ("warmup", "generator", "verifier")  # evaluations, which are greedy, ring nothing


class Alarm(NamedTuple):
    """One thing that is wrong."""

    name: str  # the metric is alarm/<name>
    seen: str
    limit: str  # with the config key that sets it
    advice: str


class Period(NamedTuple):
    """An alarm from its first turn to its last; `last` is None while it rings."""

    name: str
    first: int
    last: int | None
    alarm: Alarm | None  # as it was at its first turn; None if it does not ring with these limits


def check(rows: Sequence[dict], limits: ConfigDict, ringing: Collection[str] = ()) -> list[Alarm]:
    """Everything that is wrong at the last row.

    An alarm in `ringing`, which rang one row before, goes on until what it saw is inside the limit by a share of
    `alarms.margin`: a value that hovers about its limit does not start an alarm again and again.
    """
    found = []
    for name, rule in RULES.items():
        finding = rule(rows, limits, limits.margin if name in ringing else 1.0)
        if finding is not None:
            found.append(Alarm(name, *finding))
    return found


def as_metrics(alarms: Sequence[Alarm]) -> dict[str, int]:
    """{"alarm/<name>": 1 if it rings else 0} for all there are."""
    names = {alarm.name for alarm in alarms}
    return {f"alarm/{name}": int(name in names) for name in RULES}


def ringing_at(row: dict) -> frozenset[str]:
    """Names of the alarms that rang when the row was written."""
    return frozenset(name for name in RULES if row.get(f"alarm/{name}"))


def messages(before: Collection[str], rows: Sequence[dict], alarms: Sequence[Alarm]) -> list[str]:
    """Lines for a person: alarms that start with the last row, and those that were ringing and are over."""
    step, now = rows[-1]["step"], {alarm.name for alarm in alarms}
    lines = [
        f"alarm {alarm.name} (turn {step}): {alarm.seen}; the limit is {alarm.limit}. What to try: {alarm.advice}"
        for alarm in alarms
        if alarm.name not in before
    ]
    for name in RULES:
        if name in before and name not in now:
            first = next((row["step"] for row in reversed(rows[:-1]) if name not in ringing_at(row)), 0) + 1
            lines.append(f"alarm {name} is over (turn {step}; it began at turn {first})")
    return lines


def periods(rows: Sequence[dict], limits: ConfigDict) -> list[Period]:
    """When each alarm rang, in order of their starts, from all rows of a run (or of the part that there is)."""
    turns = [row for row in rows if row["phase"] in TURN_PHASES]
    found: list[Period] = []
    open_at: dict[str, int] = {}  # name -> index in `found`
    before: frozenset[str] = frozenset()
    for index, row in enumerate(turns):
        now = ringing_at(row)
        if now - before:
            alarms = {alarm.name: alarm for alarm in check(turns[: index + 1], limits, before)}
            for name in [name for name in RULES if name in now - before]:
                open_at[name] = len(found)
                found.append(Period(name, row["step"], None, alarms.get(name)))
        for name in before - now:
            found[open_at[name]] = found[open_at[name]]._replace(last=turns[index - 1]["step"])
        before = now
    return found
