"""Accuracies and F1 scores published for RL Tango, in percent.

Source: arXiv 2505.15034, tables 1 and 4 (200 generator steps), 2 (300 steps; partly quoted) and 3 (ProcessBench F1),
zero-shot and greedy. The paper gives no sizes for BGQA, StrategyQA and TableBench. EurusPRM-7B of table 3 is left out:
its printed average contradicts its figures.
"""

from typing import NamedTuple

SOURCE = "arXiv 2505.15034"
MATHEMATICS = ("math500", "aime24", "aime25", "amc23", "olympiadbench")
OUT_OF_DOMAIN = ("bgqa", "cruxeval", "strategyqa", "tablebench")
PROCESSBENCH = ("processbench_gsm8k", "processbench_math", "processbench_olympiadbench", "processbench_omnimath")
# Problems of the whole set. Parts are not compared.
SIZES = {
    "math500": 500, "aime24": 30, "aime25": 30, "amc23": 40, "olympiadbench": 675, "bgqa": 15_000, "cruxeval": 800,
    "strategyqa": 2_290,
    "processbench_gsm8k": 400, "processbench_math": 1_000, "processbench_olympiadbench": 1_000,
    "processbench_omnimath": 1_000,
}
MIN_SIZES = {"tablebench": 400}  # its rows were corrected since: no exact number


class Published(NamedTuple):
    model: str
    table: int
    scores: dict[str, float]  # by set, in percent


def _row(model: str, table: int, *percent: float) -> Published:
    sets = {5: MATHEMATICS, 9: (*MATHEMATICS, *OUT_OF_DOMAIN), 4: PROCESSBENCH}[len(percent)]
    return Published(model, table, dict(zip(sets, percent, strict=True)))


PUBLISHED = (
    _row("Qwen2.5-7B-Instruct", 2, 75.5, 10.0, 6.7, 52.5, 35.5, 53.0, 58.1, 91.3, 43.2),
    _row("Qwen2.5-Math-7B-Instruct", 2, 83.6, 16.7, 10.0, 62.5, 41.6, 51.3, 28.0, 85.3, 36.2),
    _row("Eurus-2-7B-PRIME", 2, 80.4, 26.7, 13.3, 60.0, 43.7),
    _row("Tango-7B-SFT", 1, 66.6, 3.3, 3.3, 27.5, 28.1, 46.6, 44.3, 85.9, 34.4),
    _row("GRPO", 1, 74.6, 13.3, 10.0, 50.0, 36.9, 55.3, 48.8, 88.1, 38.2),
    _row("GRPO with Tango", 1, 81.4, 20.0, 20.0, 65.0, 43.9, 60.5, 51.4, 90.0, 42.3),
    _row("RLOO", 1, 74.0, 13.3, 10.0, 52.5, 36.0, 55.0, 48.5, 87.5, 38.6),
    _row("RLOO with Tango", 1, 80.8, 23.3, 16.7, 67.5, 45.3, 60.9, 52.9, 90.4, 43.0),
    _row("REINFORCE++", 1, 73.2, 13.3, 10.0, 52.5, 36.7, 53.2, 47.8, 87.3, 39.8),
    _row("REINFORCE++ with Tango", 1, 81.6, 20.0, 23.3, 65.0, 44.6, 61.1, 52.0, 89.0, 44.2),
    _row("Tango-Qwen-7B", 2, 82.4, 26.7, 23.3, 70.0, 45.3, 62.3, 54.0, 91.4, 43.6),
    _row("Llama-3.1-8B-Instruct", 4, 46.4, 3.3, 3.3, 22.5, 13.6),
    _row("Tango-Llama3.1-8B-SFT", 4, 49.4, 3.3, 3.3, 25.0, 15.0),
    _row("Llama, GRPO", 4, 56.2, 10.0, 3.3, 35.0, 20.9),
    _row("Llama, GRPO with Tango", 4, 60.5, 13.3, 6.7, 40.0, 23.6),
    _row("Llama-3.1-8B-Instruct as critic", 3, 10.9, 5.1, 2.8, 1.6),
    _row("Qwen2.5-7B-Instruct as critic", 3, 36.5, 36.6, 29.7, 27.4),
    _row("Qwen2.5-Math-72B-Instruct as critic", 3, 65.8, 52.1, 32.5, 31.7),
    _row("Skywork-PRM-7B", 3, 70.8, 53.6, 22.9, 21.0),
    _row("Tango-Qwen-7B verifier", 3, 53.1, 48.2, 37.8, 36.3),
)


def has_published(set_name: str) -> bool:
    return set_name in SIZES or set_name in MIN_SIZES


def comparable(set_name: str, count: int, is_whole: bool) -> bool:
    """Whether published figures are about the same problems, judged by the size of the set."""
    has_size = count >= MIN_SIZES[set_name] if set_name in MIN_SIZES else count == SIZES.get(set_name)
    return is_whole and has_size


def rows_for(sets: tuple[str, ...]) -> list[Published]:
    return [row for row in PUBLISHED if sets and all(name in row.scores for name in sets)]
