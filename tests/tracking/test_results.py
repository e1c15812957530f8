"""What a finished run leaves behind: the summary last, as the sign of its end, and nothing by halves."""

import json
import re

import pytest

from support.ablation_cases import OWN_ARMS, evaluation, finished_rows, run_rows
from tango_jax.config import default_config
from tango_jax.loop.describe import describe_results
from tango_jax.records import Problem, Solution, Verification
from tango_jax.runtime.atomic import write_json_atomic
from tango_jax.runtime.console import Console
from tango_jax.tracking import plots, results
from tango_jax.tracking.evaluations import setup_of, write_table
from tango_jax.tracking.metrics import MetricsWriter
from tango_jax.tracking.stored_runs import compare, stored_curves

ROWS = [{"step": step, "phase": "eval", "generator_step": step, "generator/accuracy": 0.5} for step in (0, 6)]


def write(workdir) -> None:
    results.write_results(default_config(), workdir, ROWS, [], [], 0, 1.0)


def test_a_run_that_could_not_draw_its_curves_is_not_finished(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(plots, "plot_curves", full)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path)
    assert not results.is_finished(tmp_path)
    write(tmp_path)
    assert results.is_finished(tmp_path)
    assert all((tmp_path / name).exists() for name in ("transcripts.md", "curves.png"))
    assert json.loads((tmp_path / "summary.json").read_text())["generator"]["accuracy_final"] == 0.5


def test_a_run_is_compared_with_stored_runs_of_its_start_and_seed(tmp_path, capsys):
    config = default_config()
    config.arm, config.seed, config.task.data_seed, config.compare_with = "tango", 1, 3, str(tmp_path / "stored.csv")
    stored = [evaluation(step, accuracy, arm=arm, seed=seed, turn=step) for arm, seed, ends in (
        ("grpo", 1, 0.9), ("gold_steps", 1, 0.4), ("grpo", 0, 1.0), ("tango", 1, 1.0), ("fixed_generator", 1, 0.0)
    ) for step, accuracy in ((0, 0.0), (10, ends))]
    write_table(stored, config.compare_with)
    rows = [{"step": 0, "phase": "eval", "generator_step": 0, "generator/accuracy": 0.0},
            {"step": 1, "phase": "generator", "generator_step": 1, "generator/tokens_sampled": 500,
             "verifier/tokens_sampled": 1500, "time/turn_s": 1.0},
            {"step": 10, "phase": "eval", "generator_step": 10, "generator/accuracy": 1.0}]
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for row in rows:
            writer.append(row)
    summary = results.write_results(config, tmp_path, rows, [], [], 0, 1.0)
    describe_results(Console(), config, tmp_path, summary)
    printed = capsys.readouterr().out
    assert "counts as missed" not in printed
    stops = config.copy_and_resolve_references()
    stops.verifier.stop_at_first_error = True
    describe_results(Console(), stops, tmp_path, summary | {"verifier": {"step_f1_initial": 0.1, "step_f1_final": 0.2}})
    assert "step F1 counts as missed the steps that a verifier leaves out" in capsys.readouterr().out
    assert "0 compilations after warm-up since it was last started, 1 s in all starts that saved a turn" in printed
    assert re.findall(r"  (\w+) \((?:this run|stored)\) +(.*?) sampled tokens", printed) == [
        ("tango", "8.0 generator steps, 2 thousand"),  # 0.8 of the way to 10
        ("grpo", "8.9 generator steps, 1 thousand"),  # 100 tokens a step: 0.889 thousand
        ("gold_steps", "not within 10 generator steps, 1 thousand"),
    ]
    assert "sampled tokens leave out" not in printed
    write_table([row._replace(setup=setup_of(config), scored_tokens=5) for row in stored], config.compare_with)
    told = "sampled tokens leave out those that a verifier reads, as in grpo (stored) and gold_steps (stored)"
    assert told in compare(config, tmp_path)
    write_table([row._replace(setup=setup_of(config)) for row in stored], config.compare_with)
    assert len(compare(config, tmp_path)) == 4
    start = {"generator": "a" * 64, "verifier": "b" * 64, "problems": "p"}
    write_json_atomic(tmp_path / "summary.json", summary | {"provenance": {"start": start}})
    write_table([row._replace(generator_start="a" * 12) for row in stored], config.compare_with)
    assert len(compare(config, tmp_path)) == 4
    write_table([row._replace(generator_start="c" * 12, accuracy=max(0.25, row.accuracy)) for row in stored],
                config.compare_with)
    *_, last = compare(config, tmp_path)  # stage 1 ended in another start
    assert last.startswith("these are not paired: they began with different weights")
    write_table([row._replace(problems="q") for row in stored], config.compare_with)
    assert compare(config, tmp_path) == ["this run is not compared with those in stored.csv: it has other problems or "
                                         "prompts: their files differ, or others were left out because of their "
                                         "length"]
    write_table([row._replace(method="another") for row in stored], config.compare_with)
    assert compare(config, tmp_path)[-1].startswith("they also differ in other settings, such as a schedule")
    write_table([row._replace(setup=setup_of(config)) for row in stored], config.compare_with)
    config.generator.model.attention = "xla"  # which may change at any time
    assert len(compare(config, tmp_path)) == 4
    config.task.rl_words = (9, 9)
    [line] = compare(config, tmp_path)
    assert line.startswith("this run is not compared with those in stored.csv: it has other problems, ")
    config.task.rl_words = default_config().task.rl_words
    config.seed = 7
    assert compare(config, tmp_path) == [
        f"stored.csv has no run to compare this one with: of task {config.task.name}, task.data_seed 3 and seed 7 and "
        "another arm, made without a grid"]
    config.arm = "fixed_generator"
    assert compare(config, tmp_path) == [
        "this run is not compared with those in stored.csv: it does not train the generator"]
    config.arm = "tango"
    (tmp_path / "stored.csv").unlink()  # by then the results are saved
    [line] = compare(config, tmp_path)
    assert line.startswith("this run is not compared with stored ones: ") and "cannot be read" in line
    config.compare_with = ""
    assert compare(config, tmp_path) == []


def test_flops_stand_beside_the_tokens_of_a_run_where_all_have_them(tmp_path):
    """A verifier that does not write samples none: 0.8 of 3 * 10^12 FLOPs, against all of 2 * 10^12."""
    config = default_config()
    config.arm, config.task.data_seed, config.compare_with = "scored", 3, str(tmp_path / "stored.csv")
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.append({"step": 0, "phase": "eval", "generator_step": 0, "generator/accuracy": 0.0})
        writer.append({"step": 1, "phase": "generator", "generator_step": 1, "generator/tokens_sampled": 500,
                       "flops/rollout": 1e12, "flops/training": 2e12, "time/turn_s": 1.0})
        writer.append({"step": 1, "phase": "eval", "generator_step": 10, "generator/accuracy": 1.0})
    write_json_atomic(tmp_path / "summary.json", {})
    stored = run_rows("grpo", (0.0, 0.5))
    for flops, told in (((0.0, 2e12), ["2.40 TFLOPs", "2.00 TFLOPs"]), ((None, None), [])):
        write_table([row._replace(flops=one) for row, one in zip(stored, flops, strict=True)], config.compare_with)
        assert re.findall(r"[0-9.]+ TFLOPs", "\n".join(compare(config, tmp_path))) == told


@pytest.mark.parametrize("theirs, is_told", [("a" * 12, True), ("", False)])
def test_runs_from_other_checkpoints_are_no_pairs(tmp_path, theirs, is_told):
    """Equal scores are no proof of equal weights, and this table has no digests of the starts."""
    config = default_config()
    config.task.data_seed, config.compare_with = 3, str(tmp_path / "stored.csv")
    write_table(run_rows("grpo", (0.0, 0.5), weights=theirs), config.compare_with)
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in (0, 10):
            writer.append({"step": step, "phase": "eval", "generator_step": step, "generator/accuracy": step / 20,
                           "verifier/pool/step_f1": 0.5})
    write_json_atomic(tmp_path / "summary.json", {})
    attempt = {"weights": {"generator.checkpoint": "d"}}
    write_json_atomic(tmp_path / "provenance.json", {"attempts": [attempt], "files": {}})
    assert any(line.startswith("these are not paired: ") for line in compare(config, tmp_path)) == is_told


def test_a_stored_arm_that_does_not_train_the_generator_is_not_beside_a_run(tmp_path):
    (tmp_path / "own.py").write_text(OWN_ARMS)
    rows = [row for name in ("my_judge", "my_baseline")
            for row in finished_rows(tmp_path / name, f"{tmp_path}/own.py:{name}", (0.0, 0.5))]
    config = default_config()
    config.compare_with = str(tmp_path / "stored.csv")
    write_table(rows, config.compare_with)
    assert set(stored_curves(config)) == {"my_baseline"}


def pair(number: int, is_correct: bool, verdict: str, judgements: tuple = (True, False), steps: int = 2):
    problem = Problem(f"p{number}", "q", "1")
    solution = Solution(problem, "", ("a",) * steps, tuple(range(steps)), 1.0, is_correct, (True,) * steps)
    is_aligned = len(judgements) == steps > 0 and None not in judgements
    return solution, Verification("", judgements, verdict, 1.0, is_aligned, ("b",) * len(judgements))


def test_transcripts_say_how_they_were_chosen_and_what_holds_over_all():
    pairs = [pair(0, True, "CORRECT"), pair(1, True, "CORRECT"), pair(2, False, "CORRECT"), pair(3, False, "INCORRECT")]
    page = results.transcripts(*zip(*pairs, strict=True), 3)
    assert "These 3 of 4 problems were chosen to show most, not at random" in page
    assert "Of all problems, 2 answers are right, and 3 verdicts agree with the grade" in page
    assert [line for line in page.splitlines() if line.startswith("## ")] == ["## `p2`", "## `p3`", "## `p0`"]
    assert "| 2 | `a` | INCORRECT | CORRECT |" in page
    assert "## " not in results.transcripts([], [], 6)


@pytest.mark.parametrize("judgements, steps, reason", [
    ((True,) * 7, 6, "7 judgements for 6 steps: no step reward"),
    ((), 1, "0 judgements for 1 step: no step reward"),
    ((True, None, None), 3, "no judgement of step 2, 3: no step reward"),
])
def test_transcripts_say_why_there_is_no_step_reward(judgements, steps, reason):
    page = results.transcripts(*([part] for part in pair(0, True, "CORRECT", judgements, steps)), 1)
    assert page.count(f"| `a` | {reason} | CORRECT |") == steps
