"""The report of `bench --check` as Markdown, to be pasted into an issue.

In: the report as it stands (device_check.py), finished or not. Out: text. Stage: after every row of a step.
"""

from collections.abc import Sequence
from typing import Any

from tango_jax.runtime.console import format_seconds
from tango_jax.runtime.model_text import on_one_line

TITLE = "tango_jax: a first check of a device"


def markdown(report: dict) -> str:
    """The whole file."""
    parts = [f"# {TITLE}", _summary(report), _steps(report["steps"])]
    by_kind = {kind: [step for step in report["steps"] if step["kind"] == kind]
               for kind in ("devices", "parity", "quickstart", "models")}  # fmt: skip
    for kind, section in (("devices", _devices), ("parity", _parity), ("quickstart", _quickstart), ("models", _models)):
        rows = [row for step in by_kind[kind] for row in step["rows"]]
        if rows:
            parts.append(section(rows))
    return "\n\n".join(parts) + "\n"


def outcome(step: dict) -> str:
    """How a step stands, in a few words."""
    rows, found = step["rows"], [step["status"]]
    compared, errors = [row for row in rows if "within" in row], [row for row in rows if "error" in row]
    if compared:
        outside = sum(not row["within"] for row in compared)
        found.append(f"{len(compared)} comparisons, {outside} outside of what is allowed")
    if errors:
        found.append(f"{len(errors)} failed: {errors[0]['error']}")
    if left := [row for row in rows if "left_out" in row]:
        found.append(f"{len(left)} left out")
    if step["error"]:
        found.append(step["error"])
    return "; ".join(found)


def _summary(report: dict) -> str:
    size = report["size"] or "not known yet"
    return (f"Begun {report['began']}, {format_seconds(report['seconds'])} in all; sizes: {size}. Seconds are medians. "
            "Predicted is what the plan's arithmetic says (`tango_jax/planning/README.md`), of a CPU from its measured "
            "rates.")  # fmt: skip


def _steps(steps: list[dict]) -> str:
    return table(("step", "s", "outcome"), [(step["title"], f"{step['seconds']:.0f}", outcome(step))
                                            for step in steps])  # fmt: skip


def _devices(rows: list[dict]) -> str:
    facts = rows[0]["facts"]

    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {item}" for name, item in value.items())
        return str(value)

    return "## Devices and versions\n\n" + table(
        ("what", "which"), [(name, shown(value)) for name, value in facts.items() if value not in (None, "", {})])


def _parity(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        if "within" not in row:
            cells.append((row["what"], "", "", "", "", row.get("error") or f"left out: it {row['left_out']}"))
            continue
        allowed = [f"{name} {row[f'allowed_{name}']:g}" for name in ("largest", "mean")
                   if row[f"allowed_{name}"] is not None]  # fmt: skip
        cells.append((row["what"], number(row["largest"]), number(row["mean"]), row["unit"], ", ".join(allowed),
                      "yes" if row["within"] else f"NO ({row['allowed_by']})"))  # fmt: skip
    return "## Parity\n\n" + table(("what", "largest difference", "mean", "in", "allowed", "within"), cells)


def _quickstart(rows: list[dict]) -> str:
    cells = [(row["phase"], number(row["seconds"]), number(row.get("predicted_s"))) for row in rows if "phase" in row]
    notes = [row["note"] for row in rows if "note" in row]
    return "\n\n".join(["## The quickstart, shortened", table(("phase", "s", "predicted"), cells), *notes])


def _models(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        if "phase" not in row:
            continue
        what = (row["model"], f"{row['layers'] or 'all'}", f"rank {row['rank']}" if row["rank"] else "all",
                str(row["rows"] or ""), row["phase"])  # fmt: skip
        if "seconds" not in row:
            cells.append((*what, *[""] * 7, row.get("error") or f"left out: {row['left_out']}"))
            continue
        predicted = row["predicted_s"]
        ratio = "" if predicted is None else number(row["seconds"] / predicted)
        speed = f"{row['tokens_per_s']:,.0f}" if row["tokens"] else ""
        share = f"{row['share_of_matmul']:.1%}" if row["flops"] else ""
        cells.append((*what, number(row["seconds"]), number(predicted), ratio, speed, share,
                      f"{row['share_of_copy']:.1%}", f"{row['memory_gib']:.1f}", f"compiled in {row['compile_s']:.0f} s"
                      ))  # fmt: skip
    head = ("model", "layers", "trained", "rows", "phase", "s", "predicted", "ratio", "tokens/s", "of matmul rate",
            "of copy rate", "GiB", "")  # fmt: skip
    rates = [row["machine"] for row in rows if "machine" in row]
    measured = "; ".join(dict.fromkeys(
        f"{rate['matmul'] / 1e12:.3g} TFLOP/s (head {rate['head'] / 1e12:.3g}), {rate['copy'] / 1e9:.3g} GB/s"
        for rate in rates
    ))  # fmt: skip
    return f"## Models\n\nMeasured matmul and copy rates before each: {measured}.\n\n{table(head, cells)}"


def number(value: float | None) -> str:
    """Three significant digits; empty for None."""
    return "" if value is None else f"{value:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; what stands in its cells can end neither cell nor line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(on_one_line(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)
