"""The files of an evaluation: a page in percent with published figures, a CSV file of shares, and the rows."""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

from tango_jax.evaluation.cost import Cost, is_within
from tango_jax.evaluation.cost_figure import draw_costs
from tango_jax.evaluation.measures import AVERAGE, VERIFIER, Metric, SetResult, averages, value_of
from tango_jax.evaluation.published import MATHEMATICS, OUT_OF_DOMAIN, PROCESSBENCH, SOURCE, has_published, rows_for
from tango_jax.evaluation.responses import first_wrong
from tango_jax.evaluation.sets import EvalSet, SolveSet
from tango_jax.evaluation.shards import JudgedRow, SolvedRow
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.console import Console
from tango_jax.runtime.model_text import markdown_cell
from tango_jax.tracking.intervals import Estimate
from tango_jax.tracking.plots import save_figure

LABELS = {
    "pass": "pass@k: an oracle picks (upper bound)",
    "majority": "maj@k: majority vote",
    "best_of_by_verdict": "best of k by the verdict",
    "best_of_by_probability": "best of k by the verdict's probability",
    "best_of_by_scored": "best of k by P(CORRECT) read in one pass",
    "best_of_by_steps": "best of k by the share of approved steps",
    "vote_by_verdict": "votes weighted by the verdict",
    "vote_by_probability": "votes weighted by the verdict's probability",
    "vote_by_scored": "votes weighted by P(CORRECT) read in one pass",
    "vote_by_steps": "votes weighted by the share of approved steps",
}
FIRST_WRONG = ("f1", "accuracy_erroneous", "accuracy_correct", "rate_misaligned")
SUMMARY = {"greedy": "greedy", "pass": "pass@n", "majority": "maj@n", "best_of_by_verdict": "best of n, verdict",
           "f1": "first-error F1", "verifier_outcome_f1": "outcome F1", "verifier_step_f1": "step F1"}
COSTS = {"prompt": "a problem's prompt", "sample": "a sample", "verification": "its verification",
         "scored": "its steps, read in one pass,"}
_NO_COST = Cost(math.nan, math.nan)
TABLES = ("tables.md", "tables.csv")
FIGURE = "cost.png"
CSV_COLUMNS = ("set", "metric", "k", "count", "value", "low", "high", *Cost._fields)


def write_rows(out: Path, eval_set: EvalSet, rows: Sequence[SolvedRow], judged: Sequence[JudgedRow]) -> None:
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
        ]
    for line in lines:
        line["verifications"] = by_claim.get((line["number"], line["sample"]), [])
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomically(out / "rows" / f"{eval_set.name}.jsonl", text)


def write_tables(out: Path, introduction: str, results: Sequence[SetResult], console: Console) -> None:
    means = averages(results)
    texts = (markdown(introduction, results, means), csv_text(results, means))
    for name, text in zip(TABLES, texts, strict=True):
        write_atomically(out / name, text)
    figure = draw_costs(results, LABELS)
    if figure:
        save_figure(figure, out / FIGURE)
    found = [(one.name, {metric.name: metric.estimate for metric in one.metrics}) for one in results]  # ascending k
    for _, estimates in found:  # ProcessBench calls its first-error F1 just f1
        estimates.setdefault("f1", estimates.get("verifier_first_error_f1"))
    rows = [(name, *(percent(estimates.get(metric)) for metric in SUMMARY)) for name, estimates in found]
    console.table("percent, with 95 % intervals", ("set", *SUMMARY.values()), rows)
    console.log("files:")
    for name in (*TABLES, *[FIGURE] * bool(figure), "rows"):
        console.log(f"  {out / name}")


def markdown(introduction: str, results: Sequence[SetResult], averages: Sequence[Metric]) -> str:
    solved = [result for result in results if result.role == "generator"]
    judged = [result for result in results if result.role == "verifier"]
    parts = ["# Evaluation", introduction]
    if any(value_of(result, "greedy") for result in solved):
        parts.append("## Generator, greedy: accuracy of one attempt (pass@1)")
        others = tuple(r.name for r in solved if r.name not in (*MATHEMATICS, *OUT_OF_DOMAIN))
        for group, title in ((MATHEMATICS, "mathematics"), (OUT_OF_DOMAIN, "out_of_domain"), (others, "")):
            parts += _comparison(group, f"{title}_{AVERAGE}", "greedy", solved, averages)
    for result in solved:
        parts += _samples(result)
    if details := _verifier_details(results):
        parts.append("## Verifier")
        parts += _comparison(PROCESSBENCH, f"processbench_{AVERAGE}", "f1", judged, averages)
        parts += details
    parts += _set_table(results)
    return "\n\n".join(parts) + "\n"


def csv_text(results: Sequence[SetResult], averages: Sequence[Metric]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for metric in [metric for result in results for metric in result.metrics] + list(averages):
        numbers = (*metric.estimate, *(metric.cost or _NO_COST))
        cells = ("" if math.isnan(number) else f"{number:.6g}" for number in numbers)
        writer.writerow([metric.set, metric.name, metric.k or "", metric.count, *cells])
    return stream.getvalue()


def percent(estimate: Estimate | None) -> str:
    """`34.2 [28.1, 40.3]`, or a dash."""
    if estimate is None or math.isnan(estimate.value):
        return "–"
    value = f"{100 * estimate.value:.1f}"
    return value if math.isnan(estimate.low) else f"{value} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. Cells with arbitrary text must be a `markdown_cell`."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _comparison(
    group: Sequence[str], average: str, headline: str, results: Sequence[SetResult], averages: Sequence[Metric]
) -> list[str]:
    chosen = {result.name: result for result in results if result.name in group and value_of(result, headline)}
    if not chosen:
        return []
    names = [name for name in group if name in chosen]
    mean = next((metric.estimate for metric in averages if metric.set == average), None)
    head = ["model", *names, *["Avg."] * (mean is not None)]
    rows = [["this evaluation", *(percent(value_of(chosen[name], headline)) for name in names),
             *[percent(mean)] * (mean is not None)]]
    shown = tuple(name for name in names if chosen[name].has_published)
    for row in rows_for(shown):
        cells = [f"{row.scores[name]:.1f}" if name in shown else "–" for name in names]
        published_mean = f"{sum(row.scores[name] for name in names) / len(names):.1f}" if shown == tuple(names) else "–"
        rows.append([f"{row.model} (table {row.table})", *cells, *[published_mean] * (mean is not None)])
    parts = [table(head, rows)]
    if len(rows) > 1:
        parts.append(f"Published: {SOURCE}, greedy, zero-shot; their own prompts and graders.")
    left_out = [name for name in names if name not in shown and has_published(name) and not chosen[name].grader]
    if left_out:
        parts.append(f"Not the whole set, so without published figures: {', '.join(left_out)}.")
    return parts


def _samples(result: SetResult) -> list[str]:
    ks = sorted({metric.k for metric in result.metrics if metric.name == "pass"})
    if not ks:
        return []
    names = [name for name in LABELS if value_of(result, name)]
    gains = {name: value_of(result, f"{name}_minus_majority") for name in names}
    has_gains = any(gains.values())
    head = ["accuracy with k samples", *(f"k = {k}" for k in ks), *[f"k = {ks[-1]}, minus majority"] * has_gains]
    rows = [[LABELS[name], *(percent(value_of(result, name, k)) for k in ks), *[percent(gains[name])] * has_gains]
            for name in names]
    parts = [f"## {result.name}, sampled: {result.count} problems", table(head, rows)]
    return parts + _at_equal_cost(result, ks)


def _at_equal_cost(result: SetResult, ks: Sequence[int]) -> list[str]:
    """What each rule reaches with as many samples as it can pay for, where majority takes k."""
    points = [metric for metric in result.metrics if metric.cost and metric.name in LABELS and metric.name != "pass"]
    rules = [rule for rule in LABELS if any(point.name == rule for point in points)]
    if len(rules) < 2 or len(ks) < 2:
        return []
    asked = next(metric.count for metric in result.metrics if metric.name == "prompt_flops")
    left_out = (f" Costs leave out the {result.count - asked} problems that are too long; accuracies count them as "
                "wrong.") * (asked < result.count)
    parts = [f"Mean costs, by arithmetic: {_costs_text(result)}.{left_out} At equal cost, with the most samples that a "
             "rule can pay for:"]
    for measure, unit, form in (("tokens", "sampled tokens", ".0f"), ("flops", "FLOPs", ".2e")):
        budgets = [getattr(point.cost, measure) for k in ks for point in points
                   if (point.name, point.k) == ("majority", k)]
        rows = []
        for rule in rules:
            cells = []
            for budget in budgets:
                paid = [point for point in points if point.name == rule and is_within(point.cost, measure, budget)]
                best = max(paid, key=lambda point: point.k, default=None)
                cells.append(f"{percent(best.estimate)}, k = {best.k}" if best else "–")
            gain = value_of(result, f"{rule}_minus_majority_at_equal_{measure}")
            rows.append([LABELS[rule], *cells, percent(gain)])
        spent = (f"k = {k}: {format(budget, form)}" for k, budget in zip(ks, budgets, strict=True))
        head = [f"accuracy for the {unit} of maj@k", *spent, f"k = {ks[-1]}, minus majority"]
        parts.append(table(head, rows))
    return parts


def _costs_text(result: SetResult) -> str:
    texts = []
    for name, label in COSTS.items():
        tokens, flops = (value_of(result, f"{name}_{measure}") for measure in Cost._fields)
        if flops:
            sampled = f"{tokens.value:.0f} sampled tokens, " if tokens else ""
            texts.append(f"{label} {sampled}{flops.value:.2e} FLOPs")
    return "; ".join(texts)


def _verifier_details(results: Sequence[SetResult]) -> list[str]:
    parts = []
    for title, names in (("### First wrong steps", FIRST_WRONG), ("### Verdicts and steps", VERIFIER)):
        chosen = [result for result in results if any(value_of(result, name) for name in names)]
        shown = [name for name in names if any(value_of(result, name) for result in chosen)]
        if chosen:
            head = ["set", *(name.removeprefix("verifier_").replace("_", " ") for name in shown)]
            parts += [title, table(head, [[result.name, *(percent(value_of(result, name)) for name in shown)]
                                          for result in chosen])]
    return parts


def _set_table(results: Sequence[SetResult]) -> list[str]:
    rows = []
    for result in results:
        tokens = value_of(result, "response_tokens")
        rows.append([
            result.name, markdown_cell(result.source), f"{result.count}{'' if result.is_whole else ' (a part)'}",
            percent(value_of(result, "format")), percent(value_of(result, "truncation_rate")),
            f"{tokens.value:.0f}" if tokens else "–",
        ])
    parts = ["## Sets", table(["set", "rows from", "rows", "format score", "truncated", "tokens"], rows)]
    notes = [f"- {result.name}: {note}" for result in results for note in result.notes]
    return [*parts, "\n".join(notes)] if notes else parts
