"""The table of an experiment: what its rows are made of, and what becomes of them on disk."""

import json

import pytest

from support.ablation_cases import evaluation, run_rows
from tango_jax.config import ROLES, default_config, flatten
from tango_jax.method.own_arm import stored_arm
from tango_jax.tracking.evaluations import (
    Evaluation,
    Sources,
    beside_the_arm,
    digests_of,
    evaluations_of,
    method_of,
    read_tables,
    setup_of,
    sources_of,
    write_table,
)
from tango_jax.tracking.learning_curve import Curve, differing


def turn(step: int, phase: str, tokens: dict[str, int], seconds: float, **metrics) -> dict:
    counted = {f"{role}/tokens_sampled": count for role, count in tokens.items()}
    return {"step": step, "phase": phase, "time/turn_s": seconds} | counted | metrics


def scores(step: int, generator_step: int, accuracy: float) -> dict:
    return {"step": step, "phase": "eval", "generator_step": generator_step, "generator/accuracy": accuracy,
            "verifier/pool/step_f1": accuracy / 2, "verifier/pool/outcome_f1": accuracy / 4,
            "time/evaluate_s": 100.0}


def generator_turn(step: int, tokens: int, outcome: float, f1: float) -> dict:
    return turn(step, "generator", {"generator": tokens, "verifier": 2 * tokens}, 1.5, **{
        "generator/reward/outcome": outcome, "generator/groups_without_signal": 1 - outcome,
        "generator/alpha": 0.5 / step, "verifier/live_step_f1": f1})


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
    assert (row.sampled_accuracy, row.verifier_live_step_f1, row.alpha, row.verifier_step_f1) == (None,) * 4
    assert (row.problems, row.generator_start) == ("", "") and row.setup and row.method
    assert (row.accuracy, row.sampled_tokens, row.seconds) == (0.5, 0, 0.0)


@pytest.mark.parametrize("arm, values, approved", [
    ("tango", {}, 0.7), ("tango", {"verifier.stop_at_first_error": True}, None),
    ("tango", {"rl.step_reward": "probability"}, None), ("gold_steps", {"verifier.stop_at_first_error": True}, 0.7),
    ("gold_steps", {"rl.step_reward": "probability"}, 0.7),
])
def test_the_approved_share_is_kept_where_all_steps_have_marks(arm, values, approved):
    """A verifier's settings say nothing of a task's step labels, also of a copy of the arm."""
    metrics = [scores(0, 0, 0.1), turn(1, "generator", {}, 1.0, **{"generator/steps_approved": 0.7})]
    config = default_config()
    config.update_from_flattened_dict({"arm": arm} | values)
    [row] = evaluations_of(metrics, config, "")
    config.arm = "my.py:mine"
    record = json.dumps(stored_arm(arm) | {"name": "mine"})
    [copied] = evaluations_of(metrics, config, "", Sources(arm_record=record))
    assert row.steps_approved == copied.steps_approved == approved


def test_a_table_is_read_as_it_was_written(tmp_path):
    rows = [evaluation(10, 0.123456, setting="words=4,verifier=strong", alpha=0.5),
            evaluation(20, 1.0, task="a,b.py:c"),
            evaluation(30, 0.0, verifier_step_f1=None, verifier_outcome_f1=None)]
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


def with_values(**values):
    config = default_config()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in values.items()})
    return config


@pytest.mark.parametrize("key, value", [
    ("task.rl_words", (9, 9)), ("task.grader", "my.py:grade"), ("eval.problems", 5), ("rl.samples_per_prompt", 7),
    ("generator.checkpoint", "models/SmolLM2"), ("generator.use_chat", True), ("verifier.max_prompt", 77),
    ("generator.max_response", 55), ("verifier.sft.steps", 3), ("generator.model.compute_dtype", "bfloat16"),
    ("verifier.template", "last_letter"), ("generator.model.width", 64),
])
def test_what_must_be_equal_side_by_side_is_in_the_setup(key, value):
    config, default = with_values(**{key: value}), default_config()
    assert setup_of(config) != setup_of(default) and method_of(config) == method_of(default)


@pytest.mark.parametrize("key, value", [
    ("rl.alpha_initial", 0.3), ("rl.generator_steps", 7), ("generator.loss.algorithm", "rloo"),
    ("verifier.temperature", 0.7), ("generator.optimizer.lr", 0.1), ("generator.rewards", ("my.py:reward",)),
    ("verifier.reward_weights", (0.5,)),
    ("rl.warmup_steps", 3),
])
def test_what_makes_another_method_is_no_other_setup(key, value):
    config, default = with_values(**{key: value}), default_config()
    assert setup_of(config) == setup_of(default) and method_of(config) != method_of(default)


@pytest.mark.parametrize("key, value", [
    ("seed", 5), ("task.data_seed", 6), ("arm", "grpo"), ("generator.model.attention", "xla"),
    ("verifier.model.decode_attention", "auto"), ("generator.init_from", "runs/sft"), ("checkpoint.every", 3),
    ("verifier.row_buckets", (8,)), ("compare_with", "x.csv"), ("generator.mesh.tensor", 2),
    ("generator.model.remat", "none"), ("notes", "hello"), ("ablation.workers", 2), ("eval.every", 3),
    ("verifier.logp_chunk", 64), ("loggers.wandb", "x"),
])
def test_what_changes_no_result_but_for_rounding_is_in_no_digest(key, value):
    config, default = with_values(**{key: value}), default_config()
    assert (setup_of(config), method_of(config)) == (setup_of(default), method_of(default))


def test_with_patience_evaluations_and_their_metric_change_results():
    def digests(patience: int, metric: str, every: int) -> tuple[str, str]:
        config = with_values(checkpoint__patience=patience, checkpoint__keep_best=metric, eval__every=every)
        return setup_of(config), method_of(config)

    settings = [("verifier/pool/step_f1", 10), ("verifier/live/step_f1", 10), ("verifier/pool/step_f1", 5)]
    assert len({digests(0, *one) for one in settings}) == 1 and len({digests(2, *one) for one in settings}) == 3
    assert len({setup for setup, _ in (digests(patience, *one) for patience in (0, 2) for one in settings)}) == 1


def test_every_key_is_in_one_digest_or_in_none_on_purpose():
    """A key that is forgotten would let runs stand side by side that do not compare."""
    adapters = {f"{role}.model.lora.rank": 4 for role in ROLES}
    default = with_values(**adapters)
    unseen = [key for key, value in flatten(default).items()
              if all(digest_of(with_values(**adapters | {key: changed(value)})) == digest_of(default)
                     for digest_of in (setup_of, method_of))]
    assert {key.split(".", 1)[-1] if key.startswith(("generator.", "verifier.")) else key.split(".")[0]
            for key in unseen} == {
        "seed", "arm", "notes", "task", "generate", "checkpoint", "rollouts", "loggers",
        "compile_cache", "compare_with", "ablation", "eval", "init_from", "fork_of",
        "model.attention", "model.decode_attention", "model.remat", "model.unroll", "prompt_buckets", "cache_buckets",
        "row_buckets", "cache_tokens", "pack_length", "rows_per_micro_batch",
        "prompts_per_micro_batch", "logp_chunk", "sft.pack_length", "sft.rows_per_micro_batch",
        "sft.eval_every", "sft.eval_examples",
        "sft.max_heldout_loss", "sft.checkpoint_every", "mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.decode_tensor",
        "mesh.offload", "mesh.grad_reduce_dtype",
    }
    assert {key for key in unseen if key.startswith(("task.", "eval."))} == {
        "task.data_seed", "eval.every"}


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return (7, 9) if isinstance(value, tuple) else {"seed": [1]} if isinstance(value, dict) else f"{value}x"


def test_a_path_counts_by_its_last_part_and_a_model_by_its_checkpoint():
    def setup(**values):
        return setup_of(with_values(**values))

    assert setup(generator__checkpoint="a/SmolLM2") == setup(generator__checkpoint="b/SmolLM2@c0ffee")
    assert setup(generator__checkpoint="a/SmolLM2") != setup(generator__checkpoint="a/Qwen")
    sizes = {"generator__checkpoint": "a/SmolLM2", "generator__model__width": 64}  # read from the checkpoint
    assert setup(**sizes) == setup(generator__checkpoint="a/SmolLM2")
    one_line = "Solve 1/2: {problem}"
    assert setup(generator__template=one_line) != setup(generator__template="Solve 3/2: {problem}")


@pytest.mark.parametrize("key, value", [("rank", 8), ("alpha", 7.0), ("targets", ("q",)), ("base_dtype", "int8")])
def test_adapters_on_a_checkpoint_are_in_the_setup(key, value):
    on_a_checkpoint = {"generator__checkpoint": "models/SmolLM2"}
    adapters = on_a_checkpoint | {"generator__model__lora__rank": 4}
    changed = {f"generator__model__lora__{key}": value}
    setups = {setup_of(with_values(**values)) for values in (on_a_checkpoint, adapters, adapters | changed)}
    assert len(setups) == 3
    if key != "rank":  # without adapters it changes nothing
        assert setup_of(with_values(**on_a_checkpoint | changed)) == setup_of(with_values(**on_a_checkpoint))


def test_an_edited_function_makes_other_digests():
    config = with_values(generator__rewards=("my.py:reward",), task__grader="my.py:grade")
    files = [{"generator.rewards (reward)": reward, "task.grader": grader}
             for reward, grader in (("a", "a"), ("b", "a"), ("a", "b"))]
    assert [setup_of(config, each) == setup_of(config, files[0]) for each in files] == [True, True, False]
    assert [method_of(config, each) == method_of(config, files[0]) for each in files] == [True, False, True]


def test_the_files_of_an_arm_tell_its_versions_apart_and_not_arms():
    config, default = with_values(arm="my.py:mine"), default_config()
    first, second = ({"arm": "a", "arm, credit of generator": digest} for digest in "ab")
    methods = [method_of(config, first), method_of(config, second), method_of(default)]
    told = [beside_the_arm(evaluation(0, 0.0, arm="mine", method=method))["method"] for method in methods]
    assert len(set(methods)) == 3 and set(told) == {method_of(default)}
    assert setup_of(config, first) == setup_of(default)


def test_one_policy_by_an_arm_and_by_a_setting():
    """Baselines of an arm of one policy are made with verifier.adapter=generator, and only the arm differs."""
    def told(**values):
        return digests_of(evaluation(0, 0.0, arm=values["arm"], method=method_of(with_values(**values))))

    two, one = told(arm="grpo"), told(arm="grpo", verifier__adapter="generator")
    by_arm = told(arm="self_verify")
    assert {name for name in two if two[name] != one[name]} == {"policies"}
    assert all(by_arm[name] == one[name] == two[name] for name in by_arm)


@pytest.mark.parametrize("arm, one, other, is_same", [
    ("self_verify", "", "generator", True), ("tango", "", "generator", False), ("tango", "/a/peft", "/b/peft", True),
    ("tango", "/a/peft", "/a/other", False), ("tango", "generator", "/a/generator", False),
    ("tango", "", "/a/peft", False),
])
def test_an_adapter_counts_by_what_it_is_and_not_by_its_spelling(tmp_path, arm, one, other, is_same):
    configs = [with_values(arm=arm, verifier__adapter=adapter) for adapter in (one, other)]
    settings = method_of(with_values(arm=arm))
    written = [[method_of(config) for config in configs],
               [f"{settings}/{adapter}" if adapter else settings for adapter in (one, other)]]  # of earlier tables
    for methods in (*written, [written[0][0], written[1][1]]):
        rows = [evaluation(0, 0.5, arm=arm, seed=seed, method=method) for seed, method in enumerate(methods)]
        assert (beside_the_arm(rows[0]) == beside_the_arm(rows[1])) == is_same
        write_table(rows, tmp_path / "a.csv")
        if is_same:
            assert read_tables([tmp_path / "a.csv"]) == rows
        else:
            with pytest.raises(ValueError, match=f"of arm {arm} differ in more than the seed"):
                read_tables([tmp_path / "a.csv"])


def test_what_a_run_started_from_is_in_its_rows():
    start = {"generator": "a" * 64, "verifier": "b" * 64, "problems": "p", "templates": "t"}
    [first, *_] = evaluations_of(METRICS, default_config(), "", Sources(start, {}))
    assert (first.generator_start, first.verifier_start) == ("a" * 12, "b" * 12)
    [other, *_] = evaluations_of(METRICS, default_config(), "", Sources(start | {"templates": "u"}, {}))
    assert first.problems != other.problems != ""


def test_adapters_count_with_their_base_once_something_has_trained_them():
    start = {"generator": "a", "generator_base": "b", "verifier": "c", "verifier_base": "b"}

    def starts(**values) -> list[str]:
        adapters = {f"{role}__model__lora__rank": 4 for role in ROLES}  # no stage 1 by default
        [row, *_] = evaluations_of(METRICS, with_values(**adapters | values), "", Sources(start, {}))
        return [row.generator_start, row.verifier_start]

    assert starts() == starts(verifier__adapter="generator") == ["b", "b"]
    trained = ({"generator__sft__steps": 5}, {"verifier__init_from": "runs/sft"}, {"verifier__adapter": "some/peft"},
               {"fork_of": "runs/a"})
    assert [starts(**values) for values in trained] == [["a", "c"]] * 4
    # On a stage 1 of all parameters they are fresh, which a run of an experiment takes from the experiment's folder.
    full = {"generator__sft__steps": 5, "generator__sft__full": True}
    assert starts(**full) == starts(**full, generator__init_from="runs/sft") == ["b", "b"]
    assert starts(**full, verifier__sft__steps=5) == starts(generator__init_from="runs/sft") == ["a", "c"]


@pytest.mark.parametrize("digests, others, message", [
    ({"setup": "1"}, {"seed": 1, "setup": "2"}, "had other problems, another model, stage 1 or prompt, or turns"),
    ({"method": "1"}, {"seed": 1, "method": "2"}, "of arm grpo differ in more than the seed"),
    ({"problems": "1"}, {"seed": 1, "problems": "2"}, "had other problems or prompts: their files differ, or others"),
    ({"generator_start": "1"}, {"arm": "tango", "generator_start": "2"},
     "of start 3 and seed 0 began with different weights of the generator"),
    ({"arm_record": json.dumps(stored_arm("grpo"))},
     {"seed": 1, "arm_record": json.dumps(stored_arm("grpo") | {"label": "another"})},
     "are of two different arms named grpo"),
    ({"weights": "1"}, {"seed": 1, "weights": "2"}, "started from different weights: the checkpoints or adapters that"),
    ({"arm": "fixed_verifier", "verifier_start": "1"}, {"arm": "tango", "verifier_start": "2"},
     "began with different weights of the verifier"),
])
def test_runs_that_do_not_compare_are_not_read_together(tmp_path, digests, others, message):
    write_table([evaluation(0, 0.5, **digests)], tmp_path / "a.csv")
    write_table([evaluation(0, 0.5, **others)], tmp_path / "b.csv")
    both = r"b.csv, line 2 and .*a.csv, line 2 are both of task last_letter and .*"
    with pytest.raises(ValueError, match=both + message):
        read_tables([tmp_path / "a.csv", tmp_path / "b.csv"])
    unknown = {name: "" for name in ("setup", "method", "problems", "generator_start", "verifier_start", "weights",
                                       "arm_record")}
    write_table([evaluation(0, 0.5, **(others | unknown))], tmp_path / "b.csv")  # of a table that did not record it
    assert len(read_tables([tmp_path / "a.csv", tmp_path / "b.csv"])) == 2


def test_an_arm_is_the_same_whatever_prompts_a_tasks_stage_one_teaches(tmp_path):
    for name, further in (("words", ["second_try"]), ("math", [])):
        (tmp_path / name).mkdir()
        arm = stored_arm("second_try") | {"name": "mine", "further_prompts": {"generator": further, "verifier": []}}
        (tmp_path / name / "provenance.json").write_text(json.dumps({"attempts": [{}], "files": {}, "arm": arm}))
        (tmp_path / name / "summary.json").write_text("{}")
        record = sources_of(tmp_path / name).arm_record
        write_table([evaluation(0, 0.5, task=name, arm="mine", arm_record=record)], tmp_path / f"{name}.csv")
    # Earlier versions stored these prompts, and lacked fields of today, in the tables as well.
    earlier = json.dumps({key: value for key, value in arm.items() if key != "is_scored"})
    write_table([evaluation(0, 0.5, task="earlier", arm="mine", arm_record=earlier)], tmp_path / "earlier.csv")
    assert len(read_tables([tmp_path / f"{name}.csv" for name in ("words", "math", "earlier")])) == 3


def test_weights_are_compared_by_the_roles_that_both_arms_use(tmp_path):
    """Of one checkpoint, one policy takes the generator; and `grpo` names a verifier that it does not use."""
    def read(*runs):
        write_table([evaluation(0, 0.5, seed=seed, arm=arm, weights=weights, method=method)
                     for seed, (arm, weights, method) in enumerate(runs)], tmp_path / "a.csv")
        return read_tables([tmp_path / "a.csv"])

    grpo = ("grpo", "1/2/12", "m")
    rows = read(grpo, ("self_verify", "1/1/11", "m"), ("tango", "1/3/13", "m"))
    told = [digests_of(row) for row in rows]
    assert [one.get("generator_weights") for one in told] == ["1"] * 3
    assert [one.get("verifier_weights") for one in told] == [None, None, "3"]
    read(("tango", "1/2/12", "m"), ("fixed_verifier", "1/2/12", "m"), ("grpo", "1/4/14", "m/generator"))
    assert not differing(*(Curve((row,)) for row in rows[:2]))
    for runs, role in [((grpo, ("self_verify", "2/2/22", "m")), "generator"),
                       ((grpo, ("grpo", "1/3/13", "m")), "verifier"),
                       ((("tango", "1/2/12", "m"), ("fixed_verifier", "1/3/13", "m")), "verifier")]:
        with pytest.raises(ValueError, match=f"started from different weights of the {role}: the checkpoints"):
            read(*runs)
    read(grpo, ("tango", "5", "m"))  # of an earlier version, which has one digest for both roles


def test_a_task_in_another_folder_is_the_same_one_by_its_content(tmp_path):
    def table(name: str, *digests: str):
        found = [evaluations_of(METRICS, with_values(task__name=f"/{place}/task.py:make", seed=place), "",
                                Sources(files={"task.name": digest})) for place, digest in enumerate(digests)]
        write_table([row for rows in found for row in rows], tmp_path / name)
        return tmp_path / name

    assert {row.task for row in read_tables([table("a.csv", "1", "1")])} == {"task.py:make"}
    with pytest.raises(ValueError, match="of task task.py:make and setting '', but the runs had other problems"):
        read_tables([table("b.csv", "1", "2")])
    write_table([evaluation(0, 0.5, task="/a/task.py:make")], tmp_path / "c.csv")  # an earlier one
    assert [row.task for row in read_tables([tmp_path / "c.csv"])] == ["task.py:make"]


def test_runs_that_compare_are_read_together(tmp_path):
    """Another method in another arm, other weights of another seed, and a verifier that one arm does not ask."""
    rows = [evaluation(0, 0.5, method="1", generator_start="1", verifier_start="1"),
            evaluation(0, 0.5, arm="tango", method="2", generator_start="1", verifier_start="2"),
            evaluation(0, 0.5, seed=1, method="1", generator_start="2", verifier_start="3")]
    write_table(rows, tmp_path / "a.csv")
    assert read_tables([tmp_path / "a.csv"]) == rows


def test_columns_that_came_later_may_be_missing(tmp_path):
    write_table([evaluation(10, 0.5)], tmp_path / "a.csv")
    lines = (tmp_path / "a.csv").read_text().splitlines()
    (tmp_path / "a.csv").write_text("\n".join(line.rsplit(",", 4)[0] for line in lines))
    assert read_tables([tmp_path / "a.csv"]) == [evaluation(10, 0.5)]


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    write_table([evaluation(10, 0.5)], tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text(), encoding="utf-8-sig")
    assert read_tables([tmp_path / "a.csv"]) == [evaluation(10, 0.5)]


@pytest.mark.parametrize("text, message", [
    ("", r"a\.csv lacks the columns task, setting, start"),
    ("task,arm\n1,2\n", r"a\.csv lacks the columns setting, start, seed,"),
    (",".join(Evaluation._fields) + "\n", r"a\.csv has no rows"),
    (",".join(Evaluation._fields) + "\nt,,1,grpo,x\n", r"a\.csv, line 2: seed='x' is no whole number: correct it"),
    (",".join(Evaluation._fields) + "\nt,,1,grpo,0,1,1,1,1,much\n", r"line 2: accuracy='much' is no number"),
    (",".join(Evaluation._fields) + "\nt,,1,grpo,0,1,1,1,1\n", r"line 2: accuracy='' is no number"),
    (",".join(Evaluation._fields) + f"\n{'t' * 140_000},,1\n", r"line 2 cannot be read \(field larger than"),
    ("t" * 140_000 + ",arm\n", r"a\.csv, line 1 cannot be read \(field larger than field limit \(131072\)\): name the"),
])
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
