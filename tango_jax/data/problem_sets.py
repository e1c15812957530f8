"""Problem sets of real tasks, in the order of their rows. `tasks/splits.py` splits and orders them for training."""

from pathlib import Path
from typing import NamedTuple

from tango_jax.data.row_formats import ROW_FORMATS, detect_format, has_system_turn, to_problem
from tango_jax.data.rows import read_rows
from tango_jax.records import Problem


class Benchmark(NamedTuple):
    """A dataset on the hub. A local file with the same rows works, too."""

    source: str
    row_format: str


BENCHMARKS = {
    "gsm8k": Benchmark("hub:openai/gsm8k:main/test", "gsm8k"),
    "gsm8k_train": Benchmark("hub:openai/gsm8k:main/train", "gsm8k"),
    "math500": Benchmark("hub:HuggingFaceH4/MATH-500/test", "math"),
    "aime24": Benchmark("hub:Maxwell-Jia/AIME_2024/train", "math"),
    "aime25": Benchmark("hub:yentinglin/aime_2025/train", "math"),
    "amc23": Benchmark("hub:math-ai/amc23/test", "math"),
    "olympiadbench": Benchmark("hub:knoveleng/OlympiadBench/train", "olympiadbench"),
    "bgqa": Benchmark("hub:tasksource/Boardgame-QA/test", "bgqa"),
    "cruxeval": Benchmark("hub:cruxeval-org/cruxeval/test", "cruxeval"),
    "strategyqa": Benchmark("hub:voidful/StrategyQA/strategyqa_train.json", "strategyqa"),
    "tablebench": Benchmark("hub:Multilingual-Multimodal-NLP/TableBench/TableBench.jsonl", "tablebench"),
    "eurus_train": Benchmark("hub:PRIME-RL/Eurus-2-RL-Data/train", "verl"),
    "eurus_validation": Benchmark("hub:PRIME-RL/Eurus-2-RL-Data/validation", "verl"),
}


class ProblemSet(NamedTuple):
    problems: tuple[Problem, ...]
    grade_kind: str  # tango_jax.grading.grade's `kind`
    num_other: int = 0  # rows of the source that are no problems of this kind, and repeats of others
    num_system: int = 0  # rows with a system turn, which is left out


def resolve(source: str | Path) -> tuple[str | Path, str | None]:
    """(hub id, row format) of a name in BENCHMARKS; other sources are returned with None."""
    benchmark = BENCHMARKS.get(str(source))
    return (source, None) if benchmark is None else (benchmark.source, benchmark.row_format)


def load_problems(source: str | Path, row_format: str | None = None) -> ProblemSet:
    """Loads a file, a hub id (`rows.HUB_FORM`) or a name in BENCHMARKS. Without a `row_format` the first row's keys
    decide. ValueError: no such source, or an invalid row."""
    source, known = resolve(source)
    rows = read_rows(source)
    row_format = row_format or known or detect_format(rows[0].fields)
    read = [(row, problem) for row in rows if (problem := to_problem(row, row_format)) is not None]
    problems = [problem for _, problem in read]
    if ROW_FORMATS[row_format].has_repeats:
        problems = list({(problem.question, problem.answer): problem for problem in reversed(problems)}.values())[::-1]
    if not problems:
        raise ValueError(f"{source}: none of its {len(rows)} rows is a problem in the format {row_format}")
    num_system = sum(has_system_turn(row.fields) for row, _ in read) if row_format == "verl" else 0
    return ProblemSet(tuple(problems), ROW_FORMATS[row_format].grade_kind, len(rows) - len(problems), num_system)


def detected_format(source: str) -> str:
    return detect_format(read_rows(source)[0].fields)


def question_key(question: str) -> str:
    """Equal for questions that differ only in whitespace."""
    return " ".join(question.split())
