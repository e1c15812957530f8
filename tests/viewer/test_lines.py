"""Runs become lines, by arm and by the settings that differ, which label them; and what is drawn of the lines."""

import json
from pathlib import Path

import pytest

from support.report_cases import run_config, write_run
from tango_jax.config import ROLES, default_config, flatten
from tango_jax.report import main
from tango_jax.tracking.curves import MARKERS
from tango_jax.viewer import charts, comparison
from tango_jax.viewer.lines import lines_of, warnings
from tango_jax.viewer.runs import Run, find_runs


def run_of(name: str, accuracy: float = 0.5, **settings) -> Run:
    """A run of two evaluations and three turns; settings with __ for the dots of their keys."""
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    # As they are read from config.json: lists for tuples.
    stored = json.loads(json.dumps(flatten(default_config()) | changed, default=list))
    rows = [{"step": step, "phase": "eval", "generator_step": step, "generator/accuracy": accuracy * step / 4}
            for step in (0, 4)]
    rows += [{"step": step + 1, "phase": "generator", "generator_step": step, "generator/entropy": accuracy,
              "generator/kl": 0.1 * step} for step in range(3)]
    return Run(name, Path(name), stored, rows, True)


def labels(runs, as_seed=()) -> dict[str, list[str]]:
    return {line.label: [run.name for run in line.runs] for line in lines_of(runs, as_seed)}


def test_two_learning_rates_of_an_arm_are_two_lines():
    runs = [run_of("a", 0.2, seed=0), run_of("b", 0.8, seed=0, generator__optimizer__lr=1e-3),
            run_of("c", 0.4, seed=1), run_of("d", 0.9, seed=1, generator__optimizer__lr=1e-3)]
    assert labels(runs) == {"generator.optimizer.lr=1e-06": ["a", "c"], "generator.optimizer.lr=0.001": ["b", "d"]}
    drawn = comparison.comparison(lines_of(runs))
    named = {trace["name"]: trace["y"] for trace in drawn["scores"][0]["traces"] if "name" in trace}
    assert named == {"generator.optimizer.lr=1e-06": pytest.approx([0, 0.3]),
                     "generator.optimizer.lr=0.001": pytest.approx([0, 0.85])}
    assert drawn["table"]["head"] == ["runs", "seeds", "generator step", "accuracy", "generator.optimizer.lr"]
    assert drawn["table"]["rows"] == [["generator.optimizer.lr=1e-06", "0, 1", "4", "0.300 (0.20, 0.40)", "1e-06"],
                                      ["generator.optimizer.lr=0.001", "0, 1", "4", "0.850 (0.80, 0.90)", "0.001"]]
    looks = [(line.look.colour, line.look.dash, line.look.marker) for line in lines_of(runs)]
    assert len(set(looks)) == 2


def test_how_often_runs_are_evaluated_tells_them_apart_where_it_ends_them():
    for patience, lines in ((0, 1), (2, 2)):
        runs = [run_of(str(every), checkpoint__patience=patience, eval__every=every) for every in (5, 10)]
        assert len(labels(runs)) == lines
    ends = run_of("a", checkpoint__patience=2, checkpoint__keep_best="generator/accuracy", eval__every=5)
    assert set(labels([ends, run_of("b", eval__every=5)])) == {"keep_best=accuracy, patience=2",
                                                               "keep_best=none, patience=0"}


def test_curves_of_turns_are_overlaid():
    runs = [run_of("a", 0.2), run_of("b", 0.8, rl__gamma=0.5)]
    turns = {panel["title"]: panel for panel in comparison.comparison(lines_of(runs))["turns"]}
    assert set(turns) == {"Generator: entropy", "Generator: KL to the reference"}  # what these runs logged
    traces = {trace["name"]: trace for trace in turns["Generator: entropy"]["traces"]}
    assert traces["gamma=0.5"]["y"] == [0.8] * 3 and traces["gamma=0.8"]["x"] == [0, 1, 2]


def test_a_verifier_that_does_not_write_has_no_length():
    """Its rows have the length of what is read. Its entropy is drawn, and the caption says what it is of."""
    runs = [run_of("a"), run_of("b", arm="scored")]
    for run, sampled in zip(runs, (30, 0), strict=True):
        run.rows.extend({"step": step, "phase": "warmup", "generator_step": 0, "verifier/length_mean": 6.0,
                         "verifier/entropy": 0.5, "verifier/tokens_sampled": sampled} for step in (1, 2))
    turns = {panel["title"]: panel for panel in comparison.comparison(lines_of(runs))["turns"]}
    drawn = {title: len(turns[title]["traces"]) for title in ("Verifier: response length", "Verifier: entropy")}
    assert drawn == {"Verifier: response length": 1, "Verifier: entropy": 2}
    assert "verifier that does not write" in turns["Verifier: entropy"]["caption"]
    single = {panel["title"]: panel for panel in charts.training(runs[1])}
    assert "Response length" not in single and "verifier that does not write" in single["Entropy"]["caption"]


@pytest.mark.parametrize("stops, shown", [
    ((False, False), {"step F1": ["0.800", "0.500"]}), ((True, True), {"step F1": ["0.800", "0.500"]}),
    ((False, True), {"first-error F1": ["0.600", "0.700"]})])
def test_step_f1_is_compared_among_verifiers_that_judge_as_many_steps(stops, shown):
    """One that stops at the first error leaves out steps, which count as missed. A run without the score says nothing.
    """
    runs = [run_of(f"run {number}", rl__gamma=float(number), verifier__stop_at_first_error=stop)
            for number, stop in enumerate(stops)]
    for run, step_f1, first_error_f1 in zip(runs, (0.8, 0.5), (0.6, 0.7), strict=True):
        for row in run.rows[:2]:
            row.update({"verifier/pool/step_f1": step_f1, "verifier/pool/first_error_f1": first_error_f1})
    lines = lines_of([*runs, run_of("unscored", rl__gamma=9.0, verifier__stop_at_first_error=not stops[0])])
    table, panels = comparison.table(lines), comparison.comparison(lines)["scores"]
    for name, values in shown.items():
        assert set(table["head"]) & {"step F1", "first-error F1"} == {name}
        assert [row[table["head"].index(name)] for row in table["rows"]] == [*values, ""]
        panel = next(panel for panel in panels if panel["title"].endswith("F1"))
        assert panel["title"] == f"Verifier: {name}"
        assert {trace["y"][-1] for trace in panel["traces"]} == set(map(float, values))
        for said in (table, panel):
            assert ("verifier.stop_at_first_error" in said["caption"]) == (len(set(stops)) > 1)


def test_each_own_reward_has_a_curve():
    runs = [run_of("a"), run_of("b", arm="grpo")]
    for run, names in zip(runs, (("brevity", "care"), ("brevity",)), strict=True):
        run.rows.extend({"step": step, "phase": "generator", "generator_step": step,
                         **{f"generator/reward/own/{name}": 0.5 * step for name in names}} for step in (1, 2))
    runs[0].rows.append({"step": 3, "phase": "verifier", "generator_step": 2, "verifier/reward/own/care": 3.0})
    turns = {panel["title"]: panel for panel in comparison.comparison(lines_of(runs))["turns"]}
    drawn = {title: len(panel["traces"]) for title, panel in turns.items() if "own reward" in title}
    assert drawn == {"Generator: own reward brevity": 2, "Generator: own reward care": 1,
                     "Verifier: own reward care": 1}
    single = {panel["title"]: panel for panel in charts.training(runs[0])}
    shown = [trace for trace in single["Own rewards"]["traces"] if trace.get("showlegend", True)]
    assert [(trace["name"], trace["x"]) for trace in shown] == [
        ("generator: brevity", [1, 2]), ("generator: care", [1, 2]), ("verifier: care", [3])]
    assert "Own rewards" not in {panel["title"] for panel in charts.training(run_of("c"))}


def test_arms_are_labelled_by_their_names_and_settings_only_where_they_differ():
    runs = [run_of("a", arm="grpo"), run_of("b"), run_of("c", seed=1)]
    assert labels(runs) == {"Tango (trained together)": ["b", "c"], "GRPO (no verifier)": ["a"]}
    runs.append(run_of("d", rl__alpha_initial=0.5, task__rl_words=(4, 4)))
    assert list(labels(runs)) == ["Tango (trained together), alpha_initial=0.1, rl_words=2-6",
                                  "Tango (trained together), alpha_initial=0.5, rl_words=4-4",
                                  "GRPO (no verifier), alpha_initial=0.1, rl_words=2-6"]


def test_an_arm_of_one_policy_is_not_told_apart_by_its_adapter():
    own, shared = {"verifier__adapter": ""}, {"verifier__adapter": "generator"}
    runs = [run_of("a", arm="self_verify", **shared), run_of("b", arm="grpo", **own)]
    assert set(labels(runs)) == {"one policy, self-verified", "GRPO (no verifier)"}
    runs.append(run_of("c", **shared))
    assert "Tango (trained together), verifier.adapter=generator" in labels(runs)


def test_an_adapter_separates_by_what_it_is_and_not_by_its_spelling():
    one = [run_of(name, arm="self_verify", seed=seed, verifier__adapter=adapter)
           for seed, (name, adapter) in enumerate([("a", ""), ("b", "generator")])]
    assert list(labels(one).values()) == [["a", "b"]]
    for role in ("generator", "verifier"):
        moved = [run_of(name, seed=seed, **{f"{role}__adapter": f"/{name}/peft"}) for seed, name in enumerate("ab")]
        assert list(labels(moved).values()) == [["a", "b"]]
        assert list(labels([*moved, run_of("c")])) == [f"{role}.adapter=peft", f"{role}.adapter=none"]


def with_files(run: Run, **digests: str) -> Run:
    """The run with files of its user, by the setting that names them."""
    files = {key.replace("_", " "): {"sha256": digest} for key, digest in digests.items()}
    return run._replace(provenance={"attempts": [{"source": "s"}], "files": files})


def test_the_file_of_an_arm_is_no_part_of_the_label_of_another_arm():
    own = run_of("a", arm="my.py:mine")
    assert set(labels([with_files(own, arm="1" * 64), run_of("b")])) == {"mine", "Tango (trained together)"}
    edited = [with_files(own, arm="1" * 64), with_files(own, arm="2" * 64), run_of("b")]
    assert set(labels(edited)) == {"mine, arm file=11111111", "mine, arm file=22222222", "Tango (trained together)"}


def test_settings_that_cannot_change_a_result_separate_nothing():
    runs = [run_of("a"), run_of("b", seed=1, generator__mesh__fsdp=4, alarms__kl=1.0, rollouts__every=1,
                                generator__init_from="runs/sft", checkpoint__every=3, compile_cache="")]
    assert list(labels(runs).values()) == [["a", "b"]]


def test_data_seed_separates_unless_it_is_to_count_as_a_seed():
    runs = [run_of("a"), run_of("b", task__data_seed=1)]
    assert list(labels(runs)) == ["data_seed=0", "data_seed=1"]
    assert list(labels(runs, ["task.data_seed"]).values()) == [["a", "b"]]
    lines = lines_of(runs, ["task.data_seed"])
    assert warnings(lines, ["task.data_seed"]) == []
    shown = comparison.table(lines, ["task.data_seed"])
    assert shown["head"][1] == "seeds/task.data_seed" and shown["rows"][0][1] == "0/0, 0/1"


def test_the_table_says_that_rows_of_other_lengths_do_not_compare():
    def evaluated(name: str, steps: int, **changed):
        row = {"step": steps, "phase": "eval", "generator_step": steps, "generator/accuracy": 0.5}
        return run_of(name, **changed)._replace(rows=[row])

    said = "The rows end at different generator steps: compare the curves where they overlap, not the rows."
    captions = [comparison.table(lines_of([evaluated("a", 18, arm="grpo"), evaluated("b", steps)]))["caption"]
                for steps in (18, 24)]
    assert [said in caption for caption in captions] == [False, True]


def test_equal_seeds_are_warned_of():
    runs = [run_of("a"), run_of("b"), run_of("c", seed=1), run_of("d", arm="grpo")]
    (warning,) = warnings(lines_of(runs))
    assert warning.startswith("a and b have equal settings and the same seed (0): the line Tango (trained together)")


def test_other_starts_are_warned_of_unless_a_seed_accounts_for_them():
    key = "generator.init_from"
    runs = [run_of("a", generator__init_from="runs/first"), run_of("b", seed=1, generator__init_from="/x/runs/first")]
    assert warnings(lines_of(runs)) == []  # one folder, as a relative and as an absolute path
    runs += [run_of("c", seed=2, generator__init_from="runs/second"), run_of("d", seed=3)]
    (warning,) = warnings(lines_of(runs))
    assert warning.startswith("the runs of the line Tango (trained together) differ in generator.init_from, so its")
    assert "(runs/first in a and b; runs/second in c; empty in d)" in warning and warning.endswith(f"--as_seed={key}")
    assert warnings(lines_of(runs, [key]), [key]) == []
    # The same seed from another start is another draw, but not another seed of the same line.
    (warning,) = warnings(lines_of([run_of("a"), run_of("b", generator__init_from="runs/first")]))
    assert "differ in generator.init_from" in warning


def test_lines_of_different_starts_are_no_pairs():
    def begun(name: str, arm: str, **digests: str):
        return run_of(name, arm=arm, generator__sft__steps=5)._replace(start=digests)

    one = begun("a", "tango", generator="11", problems="1")
    unknown = begun("c", "self_verify")
    assert warnings(lines_of([one, begun("b", "grpo", generator="11", problems="1"), unknown])) == []
    (warning,) = warnings(lines_of([one, begun("b", "self_verify", generator="22", problems="1")]))
    assert warning.startswith("runs of the same start and seed began with other weights of the generator (a; b), and")
    (warning,) = warnings(lines_of([one, begun("b", "grpo", generator="11", problems="2")]))
    assert "other problems or prompts (a; b)" in warning
    verified = begun("a", "tango", generator="11", verifier="1")
    (warning,) = warnings(lines_of([verified, begun("b", "taught_verifier", generator="11", verifier="2")]))
    assert "other weights of the verifier (a; b)" in warning
    assert warnings(lines_of([verified, begun("b", "grpo", generator="11", verifier="2")])) == []  # it samples none
    other_seed = begun("b", "grpo", generator="22")
    assert warnings(lines_of([one, other_seed._replace(settings=other_seed.settings | {"seed": 1})])) == []


def test_fresh_adapters_on_a_stage_one_of_all_parameters_are_one_start():
    def begun(name: str, arm: str, generator: str, is_full: bool):
        run = run_of(name, arm=arm, generator__sft__steps=5, generator__sft__full=is_full)
        return run._replace(start={"generator": generator, "generator_base": "1"})

    for is_full in (True, False):
        told = warnings(lines_of([begun("a", "grpo", "2", is_full), begun("b", "self_verify", "3", is_full)]))
        assert len(told) == (not is_full)


def test_other_source_code_of_the_package_is_warned_of():
    made = {"attempts": [{"source": "aaa"}], "files": {}}
    runs = [run_of("a")._replace(provenance=made), run_of("b", seed=1)._replace(provenance=made), run_of("c", seed=2)]
    assert warnings(lines_of(runs)) == []
    runs[1] = runs[1]._replace(provenance={"attempts": [{"source": "aaa"}, {"source": "bbb"}], "files": {}})
    (warning,) = warnings(lines_of(runs))
    assert "different source code of tango_jax (aaa in a and b; bbb in b)" in warning
    # Of two lines, too: arms of different code do not compare.
    other = run_of("d", arm="grpo")._replace(provenance={"attempts": [{"source": "ccc"}], "files": {}})
    (warning,) = warnings(lines_of([runs[0], other]))
    assert "different source code of tango_jax (aaa in a; ccc in d)" in warning


def test_one_checkpoint_with_other_weights_is_warned_of():
    def started(name: str, seed: int, digest: str):
        made = {"attempts": [{"source": "aaa", "weights": {"generator.checkpoint": digest}}], "files": {}}
        return run_of(name, seed=seed, generator__checkpoint="models/one")._replace(provenance=made)

    assert warnings(lines_of([started("a", 0, "11"), started("b", 1, "11")])) == []
    (warning,) = warnings(lines_of([started("a", 0, "11"), started("b", 1, "22")]))
    assert "name the same checkpoints, which held different weights (a; b)" in warning
    other = run_of("c", arm="grpo", generator__checkpoint="models/one")
    other = other._replace(provenance=started("b", 1, "22").provenance)
    (warning,) = warnings(lines_of([started("a", 0, "11"), other]))
    assert "which held different weights (a; c)" in warning


def test_the_roles_of_one_checkpoint_are_no_other_weights():
    """One policy takes the generator in it, and `grpo` does not use the verifier in it."""
    def started(name: str, arm: str, verifier: str):
        weights = {"generator.checkpoint": "1", "verifier.checkpoint": verifier}
        made = {"attempts": [{"source": "aaa", "weights": weights}], "files": {}}
        settings = {f"{role}__checkpoint": "runs/one" for role in ROLES}
        return run_of(name, arm=arm, **settings)._replace(provenance=made)

    same = [started("a", "tango", "2"), started("b", "self_verify", "1"), started("c", "grpo", "3")]
    assert warnings(lines_of(same)) == []
    (warning,) = warnings(lines_of([*same, started("d", "fixed_verifier", "4")]))
    assert "which held different weights (a; d)" in warning


def test_a_function_with_other_content_is_another_line():
    runs = [run_of(name, seed=seed, generator__rewards=("my.py:f",))._replace(
        provenance={"attempts": [{"source": "aaa"}], "files": {"generator.rewards (f)": {"sha256": digest * 16}}}
    ) for seed, (name, digest) in enumerate([("a", "0123"), ("b", "4567"), ("c", "0123")])]
    assert labels(runs) == {"rewards (f) file=01230123": ["a", "c"], "rewards (f) file=45674567": ["b"]}


def test_a_start_for_every_data_seed_is_not_warned_of():
    runs = [run_of(f"{start}/{seed}", seed=seed, task__data_seed=start, verifier__init_from=f"stage_one/{start}")
            for start in range(2) for seed in range(2)]
    assert warnings(lines_of(runs)) == []
    lines = lines_of(runs, ["task.data_seed"])
    assert len(lines) == 1 and warnings(lines, ["task.data_seed"]) == []


def test_grids_have_stages_one_of_equal_names():
    runs = [run_of(name, seed=seed, verifier__init_from=f"{name}/stage_one/shared")
            for seed, name in enumerate(("one", "two"))]
    [warning] = warnings(lines_of(runs))
    assert "stage" in warning


def test_a_long_label_is_cut_and_the_table_has_everything():
    changes = dict.fromkeys(("rl__gamma", "rl__alpha_initial", "rl__alpha_final", "rl__format_weight"), 0.25)
    lines = lines_of([run_of("a"), run_of("b", **changes)])
    assert [line.label for line in lines] == ["alpha_final=0.001, alpha_initial=0.1, format_weight=0",
                                              "alpha_final=0.25, alpha_initial=0.25, format_weight=0.25"]
    assert set(lines[1].settings) == {"alpha_final", "alpha_initial", "format_weight", "gamma"}
    # What tells lines apart stays, whatever its place in the alphabet.
    both = [run_of(f"{start}{changed}", task__data_seed=start, **(changes if changed else {}))
            for start in range(2) for changed in (False, True)]
    labels_of = [line.label for line in lines_of(both)]
    assert len(set(labels_of)) == 4 and all("data_seed=" in label for label in labels_of)


def test_names_cannot_hold_markup():
    runs = [run_of("a"), run_of("b", generator__checkpoint="models/<b>\u202ebold</b>")]
    assert labels(runs) == {"generator.checkpoint=none": ["a"], "generator.checkpoint=b›": ["b"]}
    runs = [run_of("a"), run_of("b", generator__checkpoint="<i>\u202e")]
    assert list(labels(runs))[1] == "generator.checkpoint=‹i›\\u202e"


def test_many_lines_have_looks_of_their_own():
    runs = [run_of(f"{alpha}/{gamma}", rl__alpha_initial=alpha / 10, rl__gamma=gamma)
            for alpha in range(1, 4) for gamma in (0.5, 0.6, 0.7)]
    lines = lines_of(runs)
    assert len({(line.look.colour, line.look.dash) for line in lines}) == 9
    assert {line.look.marker for line in lines} <= set(MARKERS)


def test_seeds_are_means_with_every_seed_beside_them(tmp_path):
    for arm, seed in (("grpo", 0), ("tango", 0), ("tango", 1)):
        write_run(tmp_path / arm / str(seed), run_config(arm, seed, groups=1), turns=9)
    drawn = comparison.comparison(lines_of(find_runs([tmp_path])))
    # The last evaluation is of turn index 8: 0.2 + 0.7 * 8 / 18 = 0.511.
    assert drawn["table"]["rows"] == [["Tango (trained together)", "0, 1", "6", *["0.511 (0.51, 0.51)"] * 3],
                                      ["GRPO (no verifier)", "0", "8", *["0.511"] * 3]]
    assert [panel["title"] for panel in drawn["scores"]] == [
        "Generator: accuracy", "Verifier: step F1", "Verifier: outcome F1"]
    named = [trace for trace in drawn["scores"][0]["traces"] if "name" in trace]
    assert [(trace["name"], trace["legendrank"]) for trace in named] == [
        ("GRPO (no verifier)", 1), ("Tango (trained together)", 0)]
    titles = {panel["title"] for panel in drawn["turns"]}
    assert {"Verifier: entropy", "Verdicts that are CORRECT", "Generator: response length"} <= titles


def test_the_command_warns_of_equal_seeds(tmp_path, capsys):
    for name in ("a", "b"):
        write_run(tmp_path / name, run_config(groups=1), turns=1)
    main([str(tmp_path), f"--out={tmp_path / 'report.html'}"])
    printed = capsys.readouterr()
    assert printed.err.startswith("warning: a and b have equal settings and the same seed (0)")
    assert "runs 2, " in printed.out


def test_an_unfinished_seed_is_compared_where_both_were_evaluated():
    """The first seed has two turns of warm-up and two steps; the second is still in its warm-up."""
    def run(name, evaluations, **settings):
        rows = [{"step": turn, "phase": "eval", "generator_step": step, "generator/accuracy": accuracy}
                for turn, step, accuracy in evaluations]
        return run_of(name, **settings)._replace(rows=rows)

    runs = [run("a", [(0, 0, 0.1), (1, 0, 0.2), (2, 0, 0.3), (4, 2, 0.7)]),
            run("b", [(0, 0, 0.2), (1, 0, 0.4)], seed=1)]
    drawn = comparison.comparison(lines_of(runs))
    assert drawn["table"]["head"] == ["runs", "seeds", "generator step", "accuracy"]
    assert drawn["table"]["rows"][0][2:] == ["0", "0.300 (0.20, 0.40)"]
    [mean] = [trace for trace in drawn["scores"][0]["traces"] if "name" in trace]
    assert (mean["x"], mean["y"]) == ([-2, -1], pytest.approx([0.15, 0.3]))
    runs.append(run("c", [], seed=2))
    (row,) = comparison.table(lines_of(runs))["rows"]
    assert row[1:] == ["0, 1, 2 (not evaluated yet)", "0", "0.300 (0.20, 0.40)"]
