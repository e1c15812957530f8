"""Speed and resource use of a run, from its metrics: seconds, tokens per second and memory by phase."""

import numpy as np

from tango_jax.method.arms import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from tango_jax.tracking.curves import Series, series
from tango_jax.tracking.metrics import TURN_PHASES
from tango_jax.viewer.panels import bars, line, noisy, panel, with_content
from tango_jax.viewer.runs import Run

LOOKS = {  # colour and pattern of the bars, for the phases that every run has
    "sample": (VERMILION, ""),
    "verify": (BLUE, "/"),
    "grade": (PURPLE, "x"),
    "update": (GREEN, "\\"),
    "dump": (GREY, "-"),
    "evaluate": (ORANGE, "."),
}
NESTED = ("reshard",)  # included in the times of sample and verify
KINDS = {"host": (BLUE, "-", "circle"), "device": (VERMILION, "--", "square")}  # of memory


def speed(run: Run) -> list[dict]:
    """Seconds and memory by phase, and tokens per second."""
    rows = run.rows

    def of(name: str) -> Series:
        return series(rows, (*TURN_PHASES, "eval") if "evaluate" in name else TURN_PHASES, "step", name)

    stacked = [phase for phase in phases_of(rows) if phase not in NESTED]
    times = [t for phase in stacked for t in bars(phase, of(f"time/{phase}_s"), *LOOKS.get(phase, (SKY, "+")))]
    memory = [t for kind, look in KINDS.items() for t in line(kind, _peak(rows, kind), *look)]
    turn = "turn (both roles)"
    return with_content(
        [
            panel("Seconds per turn", "By phase; an evaluation is shown at the turn before it.", times, turn, "s",
                  barmode="stack", bargap=0.05),
            panel("Speed of sampling", "Tokens sampled by both roles per second of sampling.",
                  noisy("tokens/s", of("throughput/sampled_tokens_per_s"), GREEN), turn, "tokens/s"),
            panel("Peak memory", "Highest use so far; the table below shows which phase raised it.", memory, turn,
                  "GiB"),
        ]
    )  # fmt: skip


def phases_of(rows: list[dict]) -> list[str]:
    """Names of the timed phases: the usual ones first, then any others; without the total of the turn."""
    found = {name[5:-2] for row in rows for name in row if name.startswith("time/") and name.endswith("_s")} - {"turn"}
    return [phase for phase in LOOKS if phase in found] + sorted(found - LOOKS.keys())


def speed_table(run: Run) -> dict | None:
    """Mean seconds by phase and kind of turn. The last column is the total, since phases may be nested."""
    kinds = {"generator turn": {"generator"}, "verifier turn": {"warmup", "verifier"}, "evaluation": {"eval"}}
    rows, timed = [], phases_of(run.rows)
    for kind, phases in kinds.items():
        # Skip the first turn of each kind, which may include one-time work.
        chosen = [row for row in run.rows if row["phase"] in phases][1:]
        if chosen:
            means = [sum(row.get(f"time/{phase}_s", 0.0) for row in chosen) / len(chosen) for phase in timed]
            whole = sum(row.get("time/turn_s", row.get("time/evaluate_s", 0.0)) for row in chosen) / len(chosen)
            rows.append([kind, *(f"{mean:.3f}" if mean else "" for mean in means), f"{whole:.3f}"])
    caption = "Mean seconds by phase, without the first turn."
    caption += " Reshard is included in sample and verify." * ("reshard" in timed)
    caption += " Evaluate is the total time of an evaluation." * ("evaluate" in timed)
    caption += " Checkpoint is the save before, which the total leaves out." * ("checkpoint" in timed)
    return {"caption": caption, "head": ["mean seconds", *timed, "all"], "rows": rows} if rows else None


def _peak(rows: list[dict], kind: str) -> Series:
    """The highest memory use so far, turn by turn; the peak of a process that resumed the run starts lower."""
    points, peak = {}, 0.0
    for row in rows:
        found = [value for _, value in _memory(row, kind)]
        if found:
            peak = points[row["step"]] = max(peak, *found)
    x = sorted(points)
    return Series(np.array(x, float), np.array([points[step] for step in x], float))


def _memory(row: dict, kind: str) -> list[tuple[str, float]]:
    """(phase, peak when it ended) of a row, in the order of the phases."""
    ends = [(name.removeprefix("memory/").removesuffix(f"_{kind}_gib"), value) for name, value in row.items()
            if name.startswith("memory/") and name.endswith(f"_{kind}_gib")]  # fmt: skip
    return [(phase, value) for phase, value in ends if value is not None and phase not in NESTED]


def memory_table(run: Run) -> dict | None:
    """By how much each phase raised the memory peak, over the whole run."""
    table, timed = [], phases_of(run.rows)
    for kind in KINDS:
        raised, peak, at_first = dict.fromkeys(timed, 0.0), None, 0.0
        for phase, value in (item for row in run.rows for item in _memory(row, kind)):
            if peak is None:
                at_first = peak = value
            elif value > peak:  # not after a resume, see _peak
                raised[phase] += value - peak
                peak = value
        if peak is not None:
            cells = [f"{raised[phase]:.3f}" if raised[phase] else "" for phase in timed]
            table.append([kind, f"{at_first:.3f}", *cells, f"{peak:.3f}"])
    head = ["GiB", "when first measured", *timed, "peak"]
    caption = "How much each phase raised the peak memory use."
    return {"caption": caption, "head": head, "rows": table} if table else None
