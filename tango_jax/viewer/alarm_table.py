"""The alarms of a run for the report: its metrics in; what rang from which turn to which, with what to try, out."""

from ml_collections import ConfigDict

from tango_jax.tracking.alarms import TURN_PHASES, Period, periods
from tango_jax.viewer.runs import Run


def alarms(run: Run) -> dict:
    """{"note": a sentence, "rows": one for every time that an alarm rang}; the limits are those of the run."""
    turns = [row for row in run.rows if row["phase"] in TURN_PHASES]
    if not any(name.startswith("alarm/") for row in turns for name in row):
        return {"note": "The metrics of this run hold no alarms.", "rows": []}
    limits = {name.removeprefix("alarms."): value for name, value in run.settings.items() if name.startswith("alarms.")}
    found = periods(run.rows, ConfigDict(limits))
    latest = turns[-1]["step"]
    if not found:
        return {"note": f"No alarm rang in {latest} turns.", "rows": []}
    going_on = sum(period.last is None for period in found)
    note = f"In {latest} turns {len(found)} rang, of which {going_on} had not ended at the last one."
    return {"note": note, "rows": [_row(period, latest) for period in found]}


def _row(period: Period, latest: int) -> dict:
    last = latest if period.last is None else period.last
    turns = f"{period.first}" if last == period.first else f"{period.first} to {last}"
    what = period.alarm  # None where the limits were others when it rang
    return {
        "name": period.name,
        "turns": turns + (" (not ended)" if period.last is None else ""),
        "range": [period.first, last],
        "seen": what.seen if what else "it rang with the limits of that time",
        "limit": what.limit if what else "",
        "advice": what.advice if what else "",
    }
