"""The files of an evaluation: takes results; writes a Markdown page, a CSV file, rows and, with samples, a figure.

The page gives percentages, with published figures for comparison; the CSV file gives shares between 0 and 1, one figure
per line.
"""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from tango_jax.evaluation.measures import AVERAGE, Metric, SetResult, averages, value_of
from tango_jax.evaluation.published import MATHEMATICS, OUT_OF_DOMAIN, PROCESSBENCH, SOURCE, rows_for
from tango_jax.evaluation.sets import EvalSet, SolveSet
from tango_jax.evaluation.settings import Settings
from tango_jax.evaluation.shards import JudgedRow, SolvedRow
from tango_jax.evaluation.verifier import first_wrong
from tango_jax.method.arms import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, Look
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.console import Console
from tango_jax.runtime.model_text import markdown_cell, markdown_code
from tango_jax.tracking.curves import Series
from tango_jax.tracking.intervals import Estimate
from tango_jax.tracking.plots import add_legend, draw_line, make_grid, save_figure

LABELS = {
    "pass": "pass@k: an oracle picks (upper bound)",
    "majority": "maj@k: majority vote",
    "best_of_by_verdict": "best of k by the verdict",
    "best_of_by_steps": "best of k by the share of approved steps",
    "vote_by_verdict": "votes weighted by the verdict",
    "vote_by_steps": "votes weighted by the share of approved steps",
}
TITLES = {"math500": "MATH-500", "aime24": "AIME 2024", "aime25": "AIME 2025", "amc23": "AMC 2023", "gsm8k": "GSM8K",
          "olympiadbench": "OlympiadBench", "bgqa": "BGQA", "cruxeval": "CRUXEval", "strategyqa": "StrategyQA",
          "tablebench": "TableBench", "processbench_gsm8k": "GSM8K", "processbench_math": "MATH",
          "processbench_olympiadbench": "OlympiadBench", "processbench_omnimath": "Omni-MATH"}  # fmt: skip
FIRST_WRONG = ("f1", "accuracy_erroneous", "accuracy_correct", "rate_misaligned")
VERDICTS_AND_STEPS = (
    "verifier_outcome_f1", "verifier_outcome_balanced_accuracy", "verifier_step_f1", "verifier_step_balanced_accuracy",
    "verifier_rate_correct", "verifier_rate_invalid", "verifier_rate_misaligned", "verifier_format",
)  # fmt: skip
VERIFIER = (*FIRST_WRONG, *VERDICTS_AND_STEPS)
SUMMARY = {"greedy": "greedy", "pass": "pass@n", "majority": "maj@n", "best_of_by_verdict": "best of n, verdict",
           "f1": "first-error F1", "verifier_outcome_f1": "outcome F1", "verifier_step_f1": "step F1"}  # fmt: skip
# Colour, line and marker each tell the rules apart.
LOOKS = {
    "pass": ("oracle", Look(GREY, ":", "x")),
    "majority": ("majority vote", Look(BLUE, "--", "square")),
    "best_of_by_verdict": ("best of k by verdict", Look(VERMILION, "-", "circle")),
    "best_of_by_steps": ("best of k by steps", Look(ORANGE, "-", "triangle-up")),
    "vote_by_verdict": ("vote weighted by verdict", Look(GREEN, "-.", "diamond")),
    "vote_by_steps": ("vote weighted by steps", Look(PURPLE, "-.", "triangle-down")),
}
PANEL_INCHES, MAX_COLUMNS = (3.6, 3.2), 4
TABLES = ("tables.md", "tables.csv")
CSV_COLUMNS = ("set", "metric", "k", "count", "value", "low", "high", "from")


def write_rows(
    settings: Settings, eval_set: EvalSet, rows: Sequence[SolvedRow], judged: Sequence[JudgedRow]
) -> None:
    """One line per solution with its verifications, for people and for other programs."""
    by_claim: dict[tuple[int, int], list[dict]] = {}
    for row in judged:
        fields = {key: value for key, value in dataclasses.asdict(row).items() if key not in ("number", "sample")}
        by_claim.setdefault((row.number, row.sample), []).append(fields | {"first_wrong": first_wrong(row)})
    if isinstance(eval_set, SolveSet):
        lines = [dataclasses.asdict(row) for row in rows]
    else:
        lines = [
            {"number": claim.number, "sample": claim.sample, "problem_id": claim.solution.problem.id,
             "question": claim.solution.problem.question, "steps": claim.solution.steps,
             "is_correct": claim.solution.is_correct, "gold_steps": claim.solution.gold_steps,
             "gold_first_wrong": claim.first_wrong}
            for claim in eval_set.claims
        ]  # fmt: skip
    for line in lines:
        line["verifications"] = by_claim.get((line["number"], line["sample"]), [])
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomically(settings.out / "rows" / f"{eval_set.name}.jsonl", text)


def write_tables(settings: Settings, results: Sequence[SetResult], console: Console) -> None:
    means = averages(results)
    texts = (markdown(settings, results, means), csv_text(results, means))
    for name, text in zip(TABLES, texts, strict=True):
        write_atomically(settings.out / name, text)
    has_figure = plot_samples(results, settings.out / "samples.png")
    console.table("percent, with 95 % intervals", ("set", *SUMMARY.values()), [_summary_row(one) for one in results])
    console.log("files:")
    for path in (*(settings.out / name for name in TABLES), *[settings.out / "samples.png"] * has_figure,
                 settings.out / "rows"):  # fmt: skip
        console.log(f"  {path}")


def _summary_row(result: SetResult) -> list[str]:
    """Return each figure of SUMMARY for one set, with the largest number of samples."""
    found = {metric.name: metric.estimate for metric in result.metrics}  # metrics ascend in k
    return [result.name, *(percent(found.get(name)) for name in SUMMARY)]


def markdown(settings: Settings, results: Sequence[SetResult], averages: Sequence[Metric]) -> str:
    """Return the whole page."""
    solved = [result for result in results if result.role == "generator"]
    judged = [result for result in results if result.role == "verifier"]
    parts = ["# Evaluation", _introduction(settings, results)]
    if any(value_of(result, "greedy") for result in solved):
        parts.append("## Generator, greedy: accuracy of one attempt (pass@1)")
        others = tuple(r.name for r in solved if r.name not in (*MATHEMATICS, *OUT_OF_DOMAIN))
        for group, title in ((MATHEMATICS, "mathematics"), (OUT_OF_DOMAIN, "out_of_domain"), (others, "")):
            parts += _comparison(group, f"{title}_{AVERAGE}", "greedy", solved, averages)
    for result in solved:
        parts += _samples(result)
    if any(metric.name in VERIFIER for result in results for metric in result.metrics):
        parts.append("## Verifier")
        parts += _comparison(PROCESSBENCH, f"processbench_{AVERAGE}", "f1", judged, averages)
    parts += _verifier_details(results)
    parts += _set_table(results)
    return "\n\n".join(parts) + "\n"


def csv_text(results: Sequence[SetResult], averages: Sequence[Metric]) -> str:
    """Return every figure, then the published figures of the same sets."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for metric in [metric for result in results for metric in result.metrics] + list(averages):
        writer.writerow([metric.set, metric.name, metric.k or "", metric.count, *map(_digits, metric.estimate),
                         "measured"])
    for result in results:
        if result.has_published:
            headline = "f1" if result.name in PROCESSBENCH else "greedy"
            for row in rows_for((result.name,)):
                writer.writerow([result.name, headline, "", result.count, _digits(row.scores[result.name] / 100), "",
                                 "", f"{SOURCE}, table {row.table}: {row.model}"])
    return stream.getvalue()


def percent(estimate: Estimate | None) -> str:
    """Format an estimate as `34.2 [28.1, 40.3]`, or as a dash if there is none."""
    if estimate is None or math.isnan(estimate.value):
        return "–"
    value = f"{100 * estimate.value:.1f}"
    return value if math.isnan(estimate.low) else f"{value} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def title_of(set_name: str) -> str:
    return TITLES.get(set_name, set_name)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table whose first column is text; cells with arbitrary text must be a `markdown_cell`."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _introduction(settings: Settings, results: Sequence[SetResult]) -> str:
    models = (("solves", settings.checkpoint), ("judges", settings.verifier))
    lines = [f"- {role}: {markdown_code(name)}" for role, name in models if name is not None]
    for grader in dict.fromkeys(result.grader for result in results if result.grader):
        names = ", ".join(result.name for result in results if result.grader == grader)
        lines.append(f"- {markdown_code(grader)} decides what is right in {names}, whose figures compare with no "
                     "published ones")
    if settings.samples:
        lines.append(f"- {settings.samples} samples of each problem at temperature {settings.temperature:g}, top_p "
                     f"{settings.top_p:g}, seed {settings.seed}" + "; and one greedy" * (not settings.skip_greedy))
        if not settings.skip_greedy:
            lines.append("- figures of the verifier, format, lengths: of the greedy solutions; the samples have tables "
                         "by their number")
    if settings.votes > 1:
        lines.append(f"- {settings.votes} verifications of each solution at temperature "
                     f"{settings.verifier_temperature:g}")
    lines.append("- percent, with 95 % intervals over problems: Wilson's for shares of yes and no, bootstrap for the "
                 "rest; this evaluation chose nothing by looking at these sets")
    return "\n".join(lines)


def _comparison(
    group: Sequence[str], average: str, headline: str, results: Sequence[SetResult], averages: Sequence[Metric]
) -> list[str]:
    """Return one table with this evaluation's figures of the group's sets, and below them the published ones."""
    chosen = {result.name: result for result in results if result.name in group and value_of(result, headline)}
    if not chosen:
        return []
    names = [name for name in group if name in chosen]
    mean = next((metric.estimate for metric in averages if metric.set == average), None)
    head = ["model", *(title_of(name) for name in names), *["Avg."] * (mean is not None)]
    rows = [["this evaluation", *(percent(value_of(chosen[name], headline)) for name in names),
             *[percent(mean)] * (mean is not None)]]  # fmt: skip
    shown = tuple(name for name in names if chosen[name].has_published)
    for row in rows_for(shown):
        cells = [f"{row.scores[name]:.1f}" if name in shown else "–" for name in names]
        published_mean = f"{sum(row.scores[name] for name in names) / len(names):.1f}" if shown == tuple(names) else "–"
        rows.append([f"{row.model} (table {row.table})", *cells, *[published_mean] * (mean is not None)])
    parts = [table(head, rows)]
    if len(rows) > 1:
        parts.append(f"Published: {SOURCE}, greedy, zero-shot; their own prompts and graders.")
    left_out = [title_of(name) for name in names
                if name in TITLES and name not in shown and name != "gsm8k" and not chosen[name].grader]
    if left_out:
        parts.append(f"Not the whole set, so without published figures: {', '.join(left_out)}.")
    return parts


def _samples(result: SetResult) -> list[str]:
    """Return a table of every rule by the number of samples, with its gain over the majority of all samples."""
    ks = sorted({metric.k for metric in result.metrics if metric.name == "pass"})
    if not ks:
        return []
    names = [name for name in LABELS if value_of(result, name)]
    gains = {name: value_of(result, f"{name}_minus_majority") for name in names}
    has_gains = any(gains.values())
    head = ["accuracy with k samples", *(f"k = {k}" for k in ks), *[f"k = {ks[-1]}, minus majority"] * has_gains]
    rows = [[LABELS[name], *(percent(value_of(result, name, k)) for k in ks), *[percent(gains[name])] * has_gains]
            for name in names]  # fmt: skip
    parts = [f"## {title_of(result.name)}, sampled: {result.count} problems", table(head, rows)]
    if is_judged := value_of(result, "verification_tokens"):
        sample, judged = value_of(result, "sample_tokens").value, is_judged.value
        parts.append(f"A sample takes {sample:.0f} tokens and its verification {judged:.0f}, so that a rule with a "
                     f"verifier costs {1 + judged / sample:.1f} times as much as one without.")
    return parts


def _verifier_details(results: Sequence[SetResult]) -> list[str]:
    """Return all other figures of the verifier: one table per kind of set, with only the columns that some set has."""
    parts = []
    for title, names in (("### First wrong steps", FIRST_WRONG), ("### Verdicts and steps", VERDICTS_AND_STEPS)):
        chosen = [result for result in results if any(value_of(result, name) for name in names)]
        shown = [name for name in names if any(value_of(result, name) for result in chosen)]
        if chosen:
            head = ["set", *(name.removeprefix("verifier_").replace("_", " ") for name in shown)]
            parts += [title, table(head, [[result.name, *(percent(value_of(result, name)) for name in shown)]
                                          for result in chosen])]
    return parts


def _set_table(results: Sequence[SetResult]) -> list[str]:
    """Return a table with the source of each set and statistics of its solutions, and notes on the sets."""
    rows = []
    for result in results:
        tokens = value_of(result, "response_tokens")
        rows.append([
            result.name, markdown_cell(result.source), f"{result.count}{'' if result.is_whole else ' (a part)'}",
            percent(value_of(result, "format")), percent(value_of(result, "truncation_rate")),
            f"{tokens.value:.0f}" if tokens else "–",
        ])  # fmt: skip
    parts = ["## Sets", table(["set", "rows from", "rows", "format score", "truncated", "tokens"], rows)]
    notes = [f"- {result.name}: {note}" for result in results for note in result.notes]
    return [*parts, "\n".join(notes)] if notes else parts


def _digits(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


# The figure.


def plot_samples(results: Sequence[SetResult], path: Path) -> bool:
    """Plot accuracy against the tokens that both roles sample for a problem, a panel for each set that has several
    samples; write no file and return False if there are none."""
    curves = {result.name: _curves(result) for result in results}
    curves = {name: by_rule for name, by_rule in curves.items() if by_rule}
    if not curves:
        return False
    columns, (width, height) = min(MAX_COLUMNS, len(curves)), PANEL_INCHES
    figure, panels = make_grid(len(curves), columns, max(2, columns) * width, height, 0.9)
    for axes, (name, by_rule) in zip(panels, curves.items(), strict=True):
        _draw(axes, title_of(name), by_rule)
    handles, labels = panels[0].get_legend_handles_labels()
    add_legend(figure, dict(zip(labels, handles, strict=True)))
    save_figure(figure, path)
    return True


def _draw(axes: Axes, title: str, by_rule: dict[str, list[tuple[float, float, float, float]]]) -> None:
    for rule, points in by_rule.items():
        label, look = LOOKS[rule]
        tokens, values, lows, highs = np.array(points).T
        draw_line(axes, Series(tokens, values), look, label)
        if rule == "majority":  # one band: six of them would hide each other
            axes.fill_between(tokens, lows, highs, color=look.colour, alpha=0.12, linewidth=0,
                              label="its 95 % interval")
    every = sorted({tokens for points in by_rule.values() for tokens, *_ in points})
    ticks = [float(f"{tokens:.2g}") for tokens in np.geomspace(every[0], every[-1], 4)]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tokens:,.0f}" for tokens in ticks])
    axes.minorticks_off()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("tokens that both roles sample for a problem")
    axes.set_ylabel("accuracy, %")
    axes.grid(alpha=0.25)


def _curves(result: SetResult) -> dict[str, list[tuple[float, float, float, float]]]:
    """Return (tokens of k samples, percent, low, high) by rule, without rules that have fewer than two numbers of
    samples. A rule that asks the verifier also takes the tokens of k verifications."""
    tokens = {name: value_of(result, name) for name in ("sample_tokens", "verification_tokens")}
    alone, judged = (found.value if found else 0.0 for found in tokens.values())
    curves = {}
    for rule in LOOKS:
        cost = alone + judged * ("_by_" in rule)
        curves[rule] = [(m.k * cost, *(100 * part for part in m.estimate)) for m in result.metrics if m.name == rule]
    return {rule: points for rule, points in curves.items() if len(points) > 1}
