"""Alarms: detect from the metrics that a run is going wrong, and suggest what to try.

loggers.py writes `alarm/<name>` as 1 into the rows of the turns in which an alarm is active, and as 0 into the row
with which it clears. Alarms depend on the rows of metrics.jsonl alone: resumed runs and reports find the same ones.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tango_jax.config import ROLES
from tango_jax.tracking.alarm_rules import LIMITS, OF_UPDATES, RULES, Limits, is_over
from tango_jax.tracking.metrics import TURN_PHASES


class Alarm(NamedTuple):
    name: str  # the metric is alarm/<name>
    seen: str
    limit: str
    advice: str


class Period(NamedTuple):
    """The turns during which an alarm was active; `last` is None if it still is."""

    name: str
    first: int
    last: int | None
    alarm: Alarm | None  # at its first turn; None if this version's limits do not raise it


def check(rows: Sequence[dict], ringing: Collection[str] = (), limits: Limits = LIMITS) -> list[Alarm]:
    """The alarms at the last row (rows oldest first).

    Those in `ringing`, active at the row before, clear once their value is inside the limit by `Limits.margin`.
    """
    over = {f"{role}/{name}" for role in ROLES if is_over(rows, role, limits.window) for name, _ in OF_UPDATES}
    found = {name: rule(rows, limits, limits.margin if name in ringing else 1.0)
             for name, rule in RULES.items() if name not in over}
    return [Alarm(name, *finding) for name, finding in found.items() if finding is not None]


def as_metrics(alarms: Sequence[Alarm], before: Collection[str] = ()) -> dict[str, int]:
    """{"alarm/<name>": 1} for every active alarm, and 0 for those of `before` that clear with this row."""
    now = {alarm.name for alarm in alarms}
    return {f"alarm/{name}": int(name in now) for name in RULES if name in now or name in before}


def ringing_at(row: dict) -> frozenset[str]:
    return frozenset(name for name in RULES if row.get(f"alarm/{name}"))


def messages(before: Collection[str], rows: Sequence[dict], alarms: Sequence[Alarm]) -> list[str]:
    step, now = rows[-1]["step"], {alarm.name for alarm in alarms}
    lines = [
        f"alarm {alarm.name} (turn {step}): {alarm.seen}; the limit is {alarm.limit}. What to try: {alarm.advice}"
        for alarm in alarms
        if alarm.name not in before
    ]
    for name in RULES:
        if name in before and name not in now:
            last = max((place for place, row in enumerate(rows[:-1]) if name not in ringing_at(row)), default=-1)
            lines.append(f"alarm {name} is over (turn {step}; it began at turn {rows[last + 1]['step']})")
    return lines


def periods(rows: Sequence[dict], limits: Limits = LIMITS) -> list[Period]:
    """When each alarm was active, in order of their starts."""
    turns = [row for row in rows if row["phase"] in TURN_PHASES]
    found: list[Period] = []
    open_at: dict[str, int] = {}  # name -> index in `found`
    before: frozenset[str] = frozenset()
    for index, row in enumerate(turns):
        now = ringing_at(row)
        if now - before:
            alarms = {alarm.name: alarm for alarm in check(turns[: index + 1], before, limits)}
            for name in [name for name in RULES if name in now - before]:
                open_at[name] = len(found)
                found.append(Period(name, row["step"], None, alarms.get(name)))
        for name in before - now:
            found[open_at[name]] = found[open_at[name]]._replace(last=turns[index - 1]["step"])
        before = now
    return found
