"""The alarm table of the report.

Takes a run with its metrics and returns which alarms were active, from which turn to which, and what to try.
"""

from tango_jax.tracking.alarms import Period, periods
from tango_jax.tracking.metrics import TURN_PHASES
from tango_jax.viewer.runs import Run


def alarms(run: Run) -> dict:
    """Return {"note": a sentence, "rows": one per period of an alarm}."""
    turns = [row for row in run.rows if row["phase"] in TURN_PHASES]
    if not turns:
        return {"note": "No turns yet.", "rows": []}
    found = periods(run.rows)
    latest = turns[-1]["step"]
    if not found:
        return {"note": f"No alarms in {latest} turns.", "rows": []}
    going_on = sum(period.last is None for period in found)
    note = f"Alarms in {latest} turns: {len(found)} ({going_on} still active at the last turn)."
    return {"note": note, "rows": [_row(period, latest) for period in found]}


def _row(period: Period, latest: int) -> dict:
    last = latest if period.last is None else period.last
    turns = f"{period.first}" if last == period.first else f"{period.first} to {last}"
    what = period.alarm  # None if another version, with other limits, raised it
    return {
        "name": period.name,
        "turns": turns + (" (still active)" if period.last is None else ""),
        "range": [period.first, last],
        "seen": what.seen if what else "raised under different limits",
        "limit": what.limit if what else "",
        "advice": what.advice if what else "",
    }
