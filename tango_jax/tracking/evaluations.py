"""The table of an experiment: one row for every evaluation of every run, as CSV.

Figures, statistics and summaries are made from these rows alone, so a committed file reproduces them. Tables of several
experiments can be read together.
"""

import csv
import hashlib
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import ROLES, default_config, flatten
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.checks import local_path, shortened
from tango_jax.runtime.model_text import on_one_line

TURNS = ("warmup", "generator", "verifier")  # phases of rows that are no evaluations


class Evaluation(NamedTuple):
    """One evaluation of one run. Scores are shares; None: the run does not have them."""

    task: str
    setting: str  # the cell of the grid, without its start; empty: there was no grid
    start: int  # task.data_seed: what stage 1 learned from, and the test problems
    arm: str
    seed: int
    turn: int  # turns of both roles made before it, warm-up included
    generator_step: int  # generator turns made before it; of an arm without any, those that others would have made
    sampled_tokens: int  # that both roles had sampled in training by then, those of resampled groups included
    seconds: float  # of training by then, without evaluations
    accuracy: float  # greedy, on held-out problems
    verifier_step_f1: float | None  # greedy, on the fixed pool
    verifier_outcome_f1: float | None
    # Of the generator's turn that follows the evaluation, or, after the last one, of that:
    sampled_accuracy: float | None = None  # share of the sampled solutions that were right, on training problems
    verifier_live_step_f1: float | None = None  # sampled judgements of these solutions; not before a warm-up to come
    groups_without_signal: float | None = None
    alpha: float | None = None  # weight of the step rewards
    setup: str = ""  # `setup_of` the run; empty: made by a version without it


_TEXTS = ("task", "setting", "arm", "setup")
_SETUP = ("task.", *(f"{role}.{group}" for role in ROLES for group in ("model.", "sft.", "template")),
          "rl.prompts_per_step", "rl.samples_per_prompt")  # fmt: skip
_NOT_SETUP = ("task.data_seed",)  # is the start
_COUNTS = ("start", "seed", "turn", "generator_step", "sampled_tokens")
_OPTIONAL = tuple(Evaluation._field_defaults)
_MAY_BE_EMPTY = ("verifier_step_f1", "verifier_outcome_f1", *_OPTIONAL)


def evaluations_of(metrics: Sequence[Mapping], config: ConfigDict, setting: str) -> list[Evaluation]:
    """The rows of one run.

    Args:
        metrics: all rows of its metrics.jsonl, in their order.
        config: its settings.
        setting: the name of its cell, without its start.
    """
    found, tokens, seconds = [], 0, 0.0
    for index, row in enumerate(metrics):
        if row["phase"] in TURNS:
            tokens += sum(row.get(f"{role}/tokens_sampled") or 0 for role in ("generator", "verifier"))
            seconds += row["time/turn_s"]
            continue
        turn = _turn_beside(metrics, index)
        is_warmup_ahead = any(later["phase"] == "warmup" for later in metrics[index:])
        found.append(Evaluation(
            config.task.name, setting, config.task.data_seed, config.arm, config.seed, row["step"],
            row["generator_step"], int(tokens), seconds, row["generator/accuracy"], row.get("verifier/pool/step_f1"),
            row.get("verifier/pool/outcome_f1"), turn.get("generator/reward/outcome"),
            None if is_warmup_ahead else turn.get("verifier/live_step_f1"),
            turn.get("generator/groups_without_signal"), turn.get("generator/alpha"), setup_of(config),
        ))  # fmt: skip
    return found


def setup_of(config: ConfigDict) -> str:
    """A digest of the settings that problems, stage 1 and the size of a turn depend on, of those that are not defaults.
    Runs with different ones are no runs of one experiment; start, seed, arm and losses may differ in one."""
    defaults = flatten(default_config())
    changed = {key: value for key, value in sorted(flatten(config).items())
               if key.startswith(_SETUP) and key not in _NOT_SETUP and value != defaults.get(key)}  # fmt: skip
    return hashlib.sha256(repr(changed).encode()).hexdigest()[:12]


def _turn_beside(metrics: Sequence[Mapping], index: int) -> Mapping:
    """The generator's turn after the evaluation at this index, whose solutions come from the generator evaluated."""
    later = (row for row in metrics[index:] if row["phase"] == "generator")
    earlier = (row for row in reversed(metrics[:index]) if row["phase"] == "generator")
    return next(later, None) or next(earlier, {})


def write_table(rows: Iterable[Evaluation], path: str | os.PathLike) -> None:
    """Write rows as CSV, numbers to six digits."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Evaluation._fields)
    writer.writerows([_cell(value) for value in row] for row in rows)
    write_atomically(path, text.getvalue())


def _cell(value: Any) -> Any:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def read_tables(paths: Sequence[str | os.PathLike], name: str = "--figures") -> list[Evaluation]:
    """The rows of one or several tables; `name` is what the user calls them, for messages.

    Raises:
        ValueError: a file does not exist, has no rows, lacks a column or holds what is no number; or an evaluation
            stands in the tables twice, or runs of one setting were made with other problems or another stage 1.
    """
    rows, places, setups = [], {}, {}
    for path in paths:
        for line, row in _read_table(local_path(name, path)):
            key = (row.task, row.setting, row.start, row.arm, row.seed, row.turn)
            place = f"{path}, line {line}"
            if key in places:
                raise ValueError(f"{place} is the same evaluation as {places[key]} (setting {row.setting!r}, start "
                                 f"{row.start}, arm {row.arm}, seed {row.seed}, turn {row.turn}): leave one out")
            places[key] = place
            setup, first = setups.setdefault((row.task, row.setting), (row.setup, place)) if row.setup else ("", "")
            if row.setup != setup:
                raise ValueError(f"{place} and {first} are both of task {row.task} and setting {row.setting!r}, but "
                                 "the runs had other problems, another stage 1 or turns of another size: draw them "
                                 "apart")
            rows.append(row)
    return rows


def _read_table(path: Path) -> list[tuple[int, Evaluation]]:
    """(line, row) of every row of a table."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ValueError(f"{path} cannot be read ({reason}): name the CSV file of an experiment") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = reader.fieldnames or []
    if missing := [name for name in Evaluation._fields if name not in columns and name not in _OPTIONAL]:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}: name the ablation.csv of an experiment")
    rows = [(reader.line_num, _row(row, f"{path}, line {reader.line_num}")) for row in reader]
    if not rows:
        raise ValueError(f"{path} has no rows: name the ablation.csv of an experiment with a finished run")
    return rows


def _row(row: Mapping[str, str | None], place: str) -> Evaluation:
    return Evaluation(*(_value(name, row.get(name) or "", place) for name in Evaluation._fields))


def _value(name: str, text: str, place: str) -> Any:
    if name in _TEXTS:
        return text
    if not text and name in _MAY_BE_EMPTY:
        return None
    try:
        return int(text) if name in _COUNTS else float(text)
    except ValueError as error:
        raise ValueError(f"{place}: {name}={on_one_line(shortened(text))} is no "
                         f"{'whole number' if name in _COUNTS else 'number'}: correct it") from error
