"""The table of an experiment: what its rows are made of, and what becomes of them on disk."""

import pytest

from support.ablation_cases import evaluation, run_rows
from tango_jax.config import default_config
from tango_jax.tracking.evaluations import Evaluation, evaluations_of, read_tables, setup_of, write_table


def turn(step: int, phase: str, tokens: dict[str, int], seconds: float, **metrics) -> dict:
    counted = {f"{role}/tokens_sampled": count for role, count in tokens.items()}
    return {"step": step, "phase": phase, "time/turn_s": seconds} | counted | metrics


def scores(step: int, generator_step: int, accuracy: float) -> dict:
    return {"step": step, "phase": "eval", "generator_step": generator_step, "generator/accuracy": accuracy,
            "verifier/pool/step_f1": accuracy / 2, "verifier/pool/outcome_f1": accuracy / 4,
            "time/evaluate_s": 100.0}  # fmt: skip


def generator_turn(step: int, tokens: int, outcome: float, f1: float) -> dict:
    return turn(step, "generator", {"generator": tokens, "verifier": 2 * tokens}, 1.5, **{
        "generator/reward/outcome": outcome, "generator/groups_without_signal": 1 - outcome,
        "generator/alpha": 0.5 / step, "verifier/live_step_f1": f1})  # fmt: skip


METRICS = [
    scores(0, 0, 0.1),
    turn(1, "warmup", {"generator": 10, "verifier": 40}, 2.0),
    scores(1, 0, 0.1),
    generator_turn(2, 100, 0.25, 0.6),
    generator_turn(3, 200, 0.5, 0.7),
    scores(3, 2, 0.4),
    turn(4, "verifier", {"generator": 20, "verifier": 80}, 2.5),
    generator_turn(5, 300, 0.75, 0.8),
    scores(5, 3, 0.8),
]


def test_rows_of_a_run_by_hand():
    config = default_config()
    config.task.data_seed, config.seed, config.arm = 7, 2, "tango"
    rows = evaluations_of(METRICS, config, "words=4")
    assert {row[:5] for row in rows} == {("last_letter", "words=4", 7, "tango", 2)}
    assert [row.turn for row in rows] == [0, 1, 3, 5]
    assert [row.generator_step for row in rows] == [0, 0, 2, 3]
    assert [row.sampled_tokens for row in rows] == [0, 50, 50 + 300 + 600, 950 + 100 + 900]
    assert [row.seconds for row in rows] == [0.0, 2.0, 5.0, 9.0]
    assert [row.accuracy for row in rows] == [0.1, 0.1, 0.4, 0.8]
    assert [row.verifier_step_f1 for row in rows] == [0.05, 0.05, 0.2, 0.4]
    assert [row.verifier_outcome_f1 for row in rows] == [0.025, 0.025, 0.1, 0.2]
    # Of the generator's turn that follows, after the last evaluation of that before it.
    assert [row.sampled_accuracy for row in rows] == [0.25, 0.25, 0.75, 0.75]
    assert [row.groups_without_signal for row in rows] == [0.75, 0.75, 0.25, 0.25]
    assert [row.alpha for row in rows] == [0.25, 0.25, 0.1, 0.1]
    assert [row.verifier_live_step_f1 for row in rows] == [None, 0.6, 0.8, 0.8]  # the warm-up changes it first


def test_a_run_without_verifier_pool_or_generator_turns_has_empty_columns():
    metrics = [{"step": 0, "phase": "eval", "generator_step": 0, "generator/accuracy": 0.5}]
    [row] = evaluations_of(metrics, default_config(), "")
    assert row[-7:-1] == (None,) * 6 and (row.accuracy, row.sampled_tokens, row.seconds) == (0.5, 0, 0.0)


def test_a_table_is_read_as_it_was_written(tmp_path):
    rows = [evaluation(10, 0.123456, setting="words=4,verifier=strong", alpha=0.5),
            evaluation(20, 1.0, task="a,b.py:c"),
            evaluation(30, 0.0, verifier_step_f1=None, verifier_outcome_f1=None)]  # fmt: skip
    write_table(rows, tmp_path / "a.csv")
    assert read_tables([tmp_path / "a.csv"]) == rows
    assert (tmp_path / "a.csv").read_text().startswith(
        "task,setting,start,arm,seed,turn,generator_step,sampled_tokens,seconds,accuracy,verifier_step_f1,"
        "verifier_outcome_f1,"
    )


def test_tables_are_read_together(tmp_path):
    write_table(run_rows("grpo", (0.1, 0.2)), tmp_path / "a.csv")
    write_table(run_rows("grpo", (0.1, 0.2), seed=1), tmp_path / "b.csv")
    assert len(read_tables([tmp_path / "a.csv", tmp_path / "b.csv"])) == 4
    with pytest.raises(ValueError, match=r"a\.csv, line 2 is the same evaluation as .*a\.csv, line 2 .*leave one out"):
        read_tables([tmp_path / "a.csv", tmp_path / "a.csv"])


def test_runs_of_other_problems_are_not_read_as_more_seeds(tmp_path):
    config = default_config()
    config.task.rl_words = (9, 9)
    config.seed, config.task.data_seed, config.arm, config.generator.loss.algorithm = 5, 6, "grpo", "rloo"
    setups = [setup_of(config), setup_of(default_config())]
    config.task.rl_words = default_config().task.rl_words
    assert setups[0] != setups[1] == setup_of(config)  # seed, start, arm and loss are none of it
    for name, seed, setup in (("a", 0, setups[0]), ("b", 1, setups[1]), ("c", 2, "")):
        write_table([evaluation(0, 0.5, seed=seed, setup=setup)], tmp_path / f"{name}.csv")
    assert len(read_tables([tmp_path / "a.csv", tmp_path / "c.csv"])) == 2  # of a version without it
    with pytest.raises(ValueError, match=r"b.csv, line 2 and .*a.csv, line 2 are both of task last_letter and setting"):
        read_tables([tmp_path / "a.csv", tmp_path / "b.csv"])


def test_columns_that_came_later_may_be_missing(tmp_path):
    write_table([evaluation(10, 0.5)], tmp_path / "a.csv")
    lines = (tmp_path / "a.csv").read_text().splitlines()
    (tmp_path / "a.csv").write_text("\n".join(line.rsplit(",", 4)[0] for line in lines))
    assert read_tables([tmp_path / "a.csv"]) == [evaluation(10, 0.5)]


@pytest.mark.parametrize("text, message", [
    ("", r"a\.csv lacks the columns task, setting, start"),
    ("task,arm\n1,2\n", r"a\.csv lacks the columns setting, start, seed,"),
    (",".join(Evaluation._fields) + "\n", r"a\.csv has no rows"),
    (",".join(Evaluation._fields) + "\nt,,1,grpo,x\n", r"a\.csv, line 2: seed='x' is no whole number: correct it"),
    (",".join(Evaluation._fields) + "\nt,,1,grpo,0,1,1,1,1,much\n", r"line 2: accuracy='much' is no number"),
    (",".join(Evaluation._fields) + "\nt,,1,grpo,0,1,1,1,1\n", r"line 2: accuracy='' is no number"),
])  # fmt: skip
def test_a_mistaken_table_is_named(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tables([tmp_path / "a.csv"])


def test_a_table_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.csv cannot be read \(No such file or directory\): name the CSV file"):
        read_tables([tmp_path / "none.csv"])
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.csv cannot be read \(it is no text\)"):
        read_tables([tmp_path / "a.csv"])
