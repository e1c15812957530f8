"""The cells of a grid: their settings, names and stages 1, and what a mistake in a grid is told."""

import ast
import json
import re
from fnmatch import fnmatchcase

import pytest

from support.ablation_cases import run_rows
from support.paths import CONFIGS, ROOT
from support.policies import policies_of
from tango_jax.ablation.against import compare
from tango_jax.ablation.figures import learning
from tango_jax.ablation.grid import NOT_IN_STAGE_ONE, make_cells, stage_one_facts
from tango_jax.ablation.planned_runs import check_plan, make_plan
from tango_jax.cli.command_line import load_config, parse_command_line
from tango_jax.cli.config_file import stored_config, with_settings
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES, default_config, flatten
from tango_jax.loop.stage_one import run_stage_one
from tango_jax.method.own_arm import load_arm
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console
from tango_jax.runtime.trees import tree_fingerprint
from tango_jax.tasks.registry import make_task
from tango_jax.tracking.evaluations import read_tables, write_table
from tango_jax.tracking.provenance import begin
from tango_jax.tracking.run_config import keep_config, save_config

WORDS = {"1": {"task.rl_words": (1, 1), "task.test_words": [1, 1]}, "2": {"task.rl_words": (2, 2)}}


def tiny(grid: dict, *overrides: str):
    return load_config(str(CONFIGS / "tiny.py"), [f"ablation.grid={grid}", *overrides])


def test_without_a_grid_there_is_one_cell_with_the_settings_as_they_are():
    config = tiny({})
    [cell] = make_cells(config)
    assert (cell.name, cell.setting, cell.stage_one) == ("", "", "shared")
    assert cell.config == config


def test_cells_are_all_combinations_and_their_names_say_which():
    cells = make_cells(tiny({"words": WORDS, "task.data_seed": [3, 4], "rl.gamma": [1, 0.5]}))
    assert [cell.name for cell in cells] == [
        f"words={words},data_seed={seed},gamma={gamma}" for words in "12" for seed in "34" for gamma in ("1", "0.5")
    ]
    assert [cell.setting for cell in cells][:3] == ["words=1,gamma=1", "words=1,gamma=0.5", "words=1,gamma=1"]
    last = cells[3].config
    assert (last.task.rl_words, last.task.test_words, last.task.data_seed, last.rl.gamma) == ((1, 1), (1, 1), 4, 0.5)
    assert type(cells[0].config.rl.gamma) is float


def test_values_of_a_key_name_a_folder():
    cells = make_cells(tiny({"task.rl_words": [(1, 1), [1, 2]], "verifier.sft.steps": [6]}))
    assert [cell.name for cell in cells] == ["rl_words=1-1,verifier.sft.steps=6", "rl_words=1-2,verifier.sft.steps=6"]


def test_an_empty_label_adds_nothing_and_a_cell_may_have_its_own_arms_and_seeds():
    grid = {"alpha": {"": {}, "none": {"rl.alpha_schedule": "none", "ablation.arms": ["tango"],
                                       "ablation.seeds": (7,)}}}
    plain, other = make_cells(tiny(grid, "ablation.seeds=(0, 1)"))
    assert (plain.name, other.name, other.setting) == ("", "alpha=none", "alpha=none")
    assert plain.config.ablation.seeds == (0, 1) and len(plain.config.ablation.arms) > 1
    assert (other.config.ablation.arms, other.config.ablation.seeds) == (("tango",), (7,))


def test_cells_share_a_stage_one_where_nothing_that_it_depends_on_differs():
    grid = {"words": WORDS, "verifier": {"weak": {"verifier.sft.steps": 6}, "same": {}, "strong":
            {"verifier.sft.steps": 9}}, "task.data_seed": [0, 1]}
    stage_ones = {cell.name: cell.stage_one for cell in make_cells(tiny(grid))}
    assert set(stage_ones.values()) == {f"verifier={verifier},data_seed={seed}"
                                        for verifier in ("weak", "strong") for seed in "01"}
    assert stage_ones["words=2,verifier=same,data_seed=1"] == "verifier=weak,data_seed=1"


def test_adapters_share_a_stage_one_that_trains_all_parameters():
    def adapters(rank: int, is_full: bool) -> dict:
        return {f"{role}.{key}": value for role in ROLES
                for key, value in (("model.lora.rank", rank), ("sft.full", is_full))}

    def stage_ones(is_full: bool) -> list[str | None]:
        labels = {"full": {}, "2": adapters(2, is_full), "1": adapters(1, True)}
        return [cell.stage_one for cell in make_cells(tiny({"rank": labels}))]

    assert stage_ones(is_full=True) == ["shared"] * 3
    assert stage_ones(is_full=False) == ["rank=full", "rank=2", "rank=full"]


@pytest.mark.parametrize("grid, folder", [({}, ""), ({"task.data_seed": [3]}, "stage_one/shared")])
def test_one_policy_has_a_stage_one_of_its_own(tmp_path, grid, folder):
    (two,), one = (make_plan(tiny(grid, f"ablation.arms={arms}", "ablation.seeds=(0,)"), tmp_path).runs
                   for arms in (("tango",), ("self_verify", "no_labels")))
    name = folder.rpartition("/")[2] or "shared"
    assert two.stage_one.folder == tmp_path / folder and not load_arm(two.stage_one.config.arm).is_one_policy
    assert {run.stage_one.folder for run in one} == {tmp_path / "stage_one" / f"{name},one_policy"}
    assert all(load_arm(run.stage_one.config.arm).is_one_policy for run in one)
    assert {run.config.generator.init_from for run in one} == {str(one[0].stage_one.folder)}


@pytest.mark.parametrize("grid", [{}, {"task.data_seed": [3]}])
@pytest.mark.parametrize("arm", ["self_verify", "taught_verifier"])
def test_stage_one_is_of_the_arms_of_the_experiment(tmp_path, grid, arm):
    """And not of `arm`, which `train` would run."""
    settings = [f"arm={arm}", "ablation.seeds=(0,)"]
    run, _ = make_plan(tiny(grid, *settings, "ablation.arms=('tango', 'grpo')"), tmp_path).runs
    assert run.stage_one.config.arm == "tango" and run.stage_one.folder == tmp_path / "stage_one/shared"
    [run] = make_plan(tiny(grid, *settings, f"ablation.arms=('{arm}',)"), tmp_path).runs
    assert run.stage_one.config.arm == arm


@pytest.mark.parametrize("grid", [{}, {"task.data_seed": [3]}])
def test_stage_one_runs_with_an_arm_that_suits_the_settings(tmp_path, grid):
    """`arm` is tango, whose step rewards cannot follow the signal under dynamic sampling."""
    settings = ["ablation.seeds=(0,)", "rl.alpha_schedule=signal", "rl.dynamic_sampling=1"]
    plan = make_plan(tiny(grid, *settings, "ablation.arms=('grpo',)"), tmp_path)
    [run] = plan.runs
    assert run.stage_one.config.arm == "grpo"
    assert run.stage_one.folder == tmp_path / ("stage_one/shared" if grid else "")
    begin(run.stage_one.config, run.stage_one.folder, Console(enabled=False))
    keep_config(run.stage_one.config, run.stage_one.folder / "config.json")  # with its first row
    check_plan(plan)  # as the next start does
    runs = make_plan(tiny(grid, *settings[:1], "ablation.arms=('grpo', 'tango')"), tmp_path).runs
    assert {run.stage_one.config.arm for run in runs} == {"tango"}  # `arm`, where the experiment has it


@pytest.mark.long
def test_one_policy_whose_verifier_has_no_stage_one_starts_from_the_generators(tmp_path):
    [run] = make_plan(tiny({}, "ablation.arms=('self_verify',)", "ablation.seeds=(0,)", "verifier.sft.steps=0",
                           "generator.sft.steps=1"), tmp_path).runs
    validate(run.config)  # as the process of a run does
    made = trained(run.stage_one.config, run.stage_one.folder)
    assert trained(run.config, run.folder) == made and made["generator"] == made["verifier"]
    assert not (run.folder / "sft").exists()


def test_arms_whose_stage_one_differs_are_no_pairs(tmp_path):
    settings = {"task.data_seed": [3]}, "ablation.arms=('tango', 'grpo', 'self_verify')", "ablation.seeds=(0,)"
    with pytest.raises(ValueError, match=r"cell data_seed=3: ablation\.arms: tango and self_verify start from"):
        make_plan(tiny(*settings), tmp_path)
    # Where all arms are one policy, they start alike, with the stage 1 of the settings themselves.
    runs = make_plan(tiny(*settings, "verifier.adapter=generator"), tmp_path).runs
    assert {run.stage_one.folder for run in runs} == {tmp_path / "stage_one/shared"}


def test_nor_are_arms_that_take_different_parts_of_another_runs_stage_one(tmp_path):
    settings = ["ablation.arms=('tango', 'self_verify')", *(f"{role}.init_from={tmp_path}" for role in ROLES)]
    with pytest.raises(ValueError, match=r"ablation\.arms: tango and self_verify start from different weights"):
        make_plan(tiny({}, *settings), tmp_path / "new")


@pytest.mark.parametrize("is_one_policy", [False, True])
def test_nor_are_arms_that_take_different_weights_of_another_run(is_one_policy, tmp_path):
    save_config(tiny({}, *["verifier.adapter=generator"] * is_one_policy), tmp_path / "config.json")
    settings = [f"{role}.{what}" for role in ROLES for what in (f"checkpoint={tmp_path}", "sft.steps=0")]
    config = tiny({}, "ablation.arms=('tango', 'self_verify')", *settings)
    if is_one_policy:
        assert len(make_plan(config, tmp_path / "new").runs) == 6
    else:
        with pytest.raises(ValueError, match=r"ablation\.arms: tango and self_verify start from different weights"):
            make_plan(config, tmp_path / "new")


def test_prompts_of_a_role_without_stage_one_set_no_arm_apart(tmp_path):
    arms = "ablation.arms=('tango', 'taught_verifier')"
    with pytest.raises(ValueError, match="tango and taught_verifier learn different texts"):
        make_plan(tiny({}, arms), tmp_path)
    make_plan(tiny({}, arms, "verifier.sft.steps=0"), tmp_path)


def test_a_verifier_that_is_not_used_sets_no_arm_apart(tmp_path):
    plan = make_plan(tiny({}, "ablation.arms=('grpo', 'taught_verifier')"), tmp_path)
    stages = {run.arm: run.stage_one.folder for run in plan.runs}
    assert stages == {"grpo": tmp_path, "taught_verifier": tmp_path / "stage_one" / "shared,informed"}
    arms = "ablation.arms=('grpo', 'self_verify')"
    with pytest.raises(ValueError, match="grpo and self_verify start from different weights"):
        make_plan(tiny({}, arms), tmp_path)
    make_plan(tiny({}, arms, "verifier.sft.steps=0"), tmp_path)  # one policy has the generator's stage 1 alone, too


def test_the_axis_that_a_refusal_advises_has_every_arm(tmp_path):
    with pytest.raises(ValueError, match=r"""'tango': \{'ablation.arms': \('tango', 'grpo'\)\}, 'taught_verifier': """):
        make_plan(tiny({}, "ablation.arms=('tango', 'grpo', 'taught_verifier')"), tmp_path)


def test_one_policy_from_scratch_starts_its_verifier_elsewhere(tmp_path):
    """From the generator's random weights; two policies have two draws."""
    settings = [f"{role}.sft.steps=0" for role in ROLES]
    with pytest.raises(ValueError, match="tango and self_verify start from different weights"):
        make_plan(tiny({}, "ablation.arms=('tango', 'self_verify')", *settings), tmp_path)


def test_settings_are_checked_for_the_arms_of_the_experiment(tmp_path):
    """`arm` is tango, whose step rewards cannot follow the signal under dynamic sampling."""
    settings = ["rl.alpha_schedule=signal", "rl.dynamic_sampling=1"]
    make_plan(tiny({}, "ablation.arms=('grpo',)", *settings), tmp_path)
    argv = [f"--config={CONFIGS / 'tiny.py'}", "--config.ablation.arms=('grpo',)", f"--workdir={tmp_path / 'run'}"]
    parse_command_line("ablate", "", [*argv, *(f"--config.{setting}" for setting in settings)], "runs/x")
    with pytest.raises(ValueError, match="alpha_schedule=signal follows"):
        make_plan(tiny({}, "ablation.arms=('grpo', 'tango')", *settings), tmp_path)


def test_arms_that_do_not_train_the_role_of_the_best_are_refused_before_any_run(tmp_path):
    arms = {"ablation.arms": ("tango", "fixed_generator"), "ablation.grid": {}}
    plain = load_config("last_letter_mini", arms)
    make_plan(plain, tmp_path)
    plain.checkpoint.keep_best = "generator/accuracy"
    with pytest.raises(ValueError, match="measures the generator, which arm=fixed_generator does not train: leave"):
        make_plan(plain, tmp_path)
    plain.ablation.arms = ("tango", "grpo")
    make_plan(plain, tmp_path)


def test_the_verifiers_stage_one_of_one_policy_has_the_generators_prompts(tmp_path):
    """And a run takes it for both roles."""
    settings = ["ablation.seeds=(0,)", "generator.sft.steps=0"]
    [run] = make_plan(tiny({}, "ablation.arms=('second_try',)", *settings), tmp_path).runs
    assert run.stage_one.folder.name == "shared,one_policy,second_try" and run.stage_one.roles == ["verifier"]
    validate(run.config)
    with pytest.raises(ValueError, match="self_verify and second_try start from different weights"):
        make_plan(tiny({}, "ablation.arms=('self_verify', 'second_try')", *settings), tmp_path)


def test_arms_that_share_a_stage_one_are_pairs(tmp_path):
    """A user's prompt has no examples in it; and of another run's, all arms of two policies take the same."""
    own = ROOT / "tests/support/own_turns.py"
    runs = make_plan(tiny({"task.data_seed": [3]}, f"ablation.arms=('grpo', '{own}:rewriting')"), tmp_path).runs
    assert {run.stage_one.folder for run in runs} == {tmp_path / "stage_one/shared"}
    make_plan(tiny({}, "ablation.arms=('tango', 'taught_verifier')", *(f"{role}.init_from={tmp_path}"
                                                                       for role in ROLES)), tmp_path / "new")


def test_arms_whose_stage_one_differs_are_compared_as_the_refusal_says(tmp_path):
    arms = "ablation.arms=('tango', 'grpo', 'self_verify')", "ablation.seeds=(0,)"
    with pytest.raises(ValueError, match="add the axis") as refused:
        make_plan(tiny({}, *arms), tmp_path)
    runs = make_plan(tiny(ast.literal_eval(re.search(r"\{.*\}", str(refused.value))[0]), *arms), tmp_path).runs
    assert sorted(run.name for run in runs) == ["stage_one=self_verify/self_verify/seed_0",
        "stage_one=tango/grpo/seed_0", "stage_one=tango/tango/seed_0"]
    start = {run.name: run.stage_one.folder.name for run in runs}
    assert len(set(start.values())) == 2
    rows = [row for run in runs for row in run_rows(run.arm, (0.0, 0.5), setting=run.cell.setting, setup="same",
                                                    generator_start=start[run.name])]
    write_table(rows, tmp_path / "a.csv")
    table, _ = compare(learning(read_tables([tmp_path / "a.csv"])), "grpo")
    assert "| self_verify, stage_one=self_verify † |" in table and "| tango, stage_one=tango |" in table


def test_problems_that_need_other_symbols_need_another_stage_one():
    """The tokenizer of last_letter has a symbol for each place of a word, up to the longest problem of any split."""
    fits, longer = {"task.rl_words": (1, 2)}, {"task.rl_words": (1, 3)}
    lengths = [f"{role}.max_{kind}=90" for role in ("generator", "verifier") for kind in ("prompt", "response")]
    cells = make_cells(tiny({"words": {"2": fits, "3": longer}}, *lengths))
    assert [cell.stage_one for cell in cells] == ["words=2", "words=3"]


def test_roles_that_start_elsewhere_have_no_stage_one():
    grid = {"start": {name: {"generator.init_from": name, "verifier.init_from": name, "task.data_seed": seed}
                      for name, seed in (("a", 1), ("b", 2))}}
    cells = make_cells(tiny(grid))
    assert [cell.name for cell in cells] == ["start=a", "start=b"]
    assert {(cell.stage_one, cell.setting) for cell in cells} == {(None, "")}


@pytest.mark.long
def test_what_stage_one_is_said_not_to_depend_on_does_not_change_it(tmp_path):
    """All of it is changed at once; the trained parameters are the same bit for bit."""
    base = with_settings(tiny({}), {f"{role}.mesh.fsdp": 1 for role in ("generator", "verifier")})
    changed = {key: other_value(key, value) for key, value in flatten(base).items()
               if any(fnmatchcase(key, pattern) for pattern in NOT_IN_STAGE_ONE) and not is_of_the_machine(key)}
    other = with_settings(base, {key: value for key, value in changed.items() if value is not None})
    validate(other)
    assert stage_one_facts(other) == stage_one_facts(base)
    assert sum(flatten(other)[key] != flatten(base)[key] for key in changed) > 40
    assert trained(base, tmp_path / "base") == trained(other, tmp_path / "other")


def is_of_the_machine(key: str) -> bool:
    return key.startswith(("loggers.", "ablation.", "compile_cache")) or ".mesh." in key


def other_value(key: str, value):
    """Another value of a setting that is as good; None: leave it."""
    named = {"arm": "grpo", "rl.alpha_schedule": "linear", "rl.prompts_per_step": 8, "rl.samples_per_prompt": 4,
             "task.rl_words": (1, 1), "task.rl_letters": (3, 3), "task.test_words": (2, 2), "task.test_letters": (2, 2),
             "generate.samples": 2, "alarms.steps_high": 2.0}
    if key in named:
        return named[key]
    if key.endswith(("algorithm", "aggregation", "kl_kind")):
        return {"algorithm": "rloo", "aggregation": "seq_mean", "kl_kind": "k1"}[key.rsplit(".")[-1]]
    if isinstance(value, bool):
        return not value
    if isinstance(value, float) and 0 < value < 1:
        return value * 0.9375
    endings = (".pack_length", ".epochs", "_steps", "_per_micro_batch", "eval.pool", "checkpoint.keep", "transcripts")
    if isinstance(value, int) and key.endswith(endings) and value:
        return 2 * value
    return (2, 8) if key.endswith("row_buckets") else None


def trained(config, folder) -> dict[str, str]:
    policies = policies_of(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    params = run_stage_one(policies, config, task, folder, Console(enabled=False), hosts.Preemption())
    return {role: tree_fingerprint(tree) for role, tree in params.items()}


MISTAKES = [
    ({"task.rl_wordz": [(1, 1)]}, r"\['task\.rl_wordz'\]: unknown config key; did you mean task\.rl_words\?"),
    ({"words": [1]}, r"\['words'\]: unknown config key.*an axis with another name maps labels to settings"),
    ({"rl": [1]}, r"\['rl'\]: unknown config key"),
    ({"rl.gamma": 0.5}, r"\['rl\.gamma'\]=0\.5 must be a list of values"),
    ({"rl.gamma": []}, r"\['rl\.gamma'\] is empty: give it values, or take it out"),
    ({"rl.gamma": [0.5, 0.5]}, r"names a value twice: take it out"),
    ({"generator.init_from": ["a/b"]}, r"value 'a/b' cannot name a folder; give it a label"),
    ({"words": {}}, r"\['words'\] is empty"),
    ({"a/b": {"x": {}}}, r"\['a/b'\]: the name of an axis consists of letters"),
    ({"words": {"a=b": {}}}, r"label 'a=b' must be a text of letters"),
    ({"words": {4: {}}}, r"label 4 must be a text"),
    ({"words": {"4": (4, 4)}}, r"\['words'\]\['4'\]=\(4, 4\) must be a mapping from config keys to values"),
    ({"words": {"": {"rl.gamma": 0.5}}}, r"\['words'\]\[''\]=.* must be empty: .* give these settings a name"),
    ({"words": {"4": {"task.rl_word": (4, 4)}}}, r"cell words=4: unknown config key 'task\.rl_word'; did you mean"),
    ({"words": {"4": {4: 4}}}, r"cell words=4: unknown config key 4"),
    ({"rl.gamma": ["high"]}, r"cell gamma=high: rl\.gamma='high' must be of type float, like its default 0\.8"),
    ({"arm": ["grpo"]}, r"\['arm'\] sets 'arm': name the arms in ablation\.arms"),
    ({"ablation.workers": [1, 2]}, r"sets 'ablation\.workers': a cell may set only ablation"),
    ({"rl.gamma": [0.5], "gamma": {"a": {}}}, r"two axes named gamma: rename one"),
    ({"rl.gamma": [0.5], "x": {"a": {"rl.gamma": 0.5}}}, r"\['x'\] sets 'rl\.gamma', and so does the axis 'gamma'"),
    ({"seed": [0, 1]}, r"the cells seed=0 and seed=1 have the same setting and the same start, task\.data_seed=0"),
    ({"words": {"x" * 250: {}}}, r"has 256 characters, and a folder's name may have 200"),
]


@pytest.mark.parametrize("grid, message", MISTAKES, ids=[re.sub(r"\W+", "_", str(grid))[:50] for grid, _ in MISTAKES])
def test_a_mistake_in_a_grid_is_named(grid, message):
    config = tiny({})
    config.ablation.grid = grid
    with pytest.raises(ValueError, match=message) as error:
        make_cells(config)
    assert str(error.value).startswith("ablation.grid") and "\n" not in str(error.value)


@pytest.mark.parametrize("grid, message", [
    ({"task.rl_words": [(1, 2), (2, 1)]}, r"ablation\.grid, cell rl_words=2-1: task\.rl_words=\(2, 1\) must"),
    ({"x": {"a": {"ablation.arms": ("grpo", "none")}}}, r"cell x=a: ablation\.arms='none' is not one of tango"),
    ({"x": {"a": {"ablation.seeds": (0, 0)}}}, r"cell x=a: ablation\.seeds=\(0, 0\) names one twice"),
    ({"rl.gamma": [0.5, -1]}, r"cell gamma=-1: rl\.gamma=-1\.0 must"),
])
def test_every_cell_is_validated_and_the_mistaken_one_named(tmp_path, grid, message):
    with pytest.raises(ValueError, match=message):
        make_plan(tiny(grid), tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_the_plan_completes_all_cells_of_a_seed_first(tmp_path):
    grid = {"words": WORDS | {"3": {"ablation.seeds": (5,), "ablation.arms": ("grpo",)}}}
    plan = make_plan(tiny(grid, "ablation.arms=('tango','grpo')", "ablation.seeds=(5, 6)"), tmp_path)
    assert [run.name for run in plan.runs] == [
        "words=1/tango/seed_5", "words=1/grpo/seed_5", "words=2/tango/seed_5", "words=2/grpo/seed_5",
        "words=3/grpo/seed_5",
        "words=1/tango/seed_6", "words=1/grpo/seed_6", "words=2/tango/seed_6", "words=2/grpo/seed_6",
    ]
    run = plan.runs[1]
    assert run.folder == tmp_path / "words=1" / "grpo" / "seed_5"
    assert (run.config.arm, run.config.seed, run.config.task.rl_words) == ("grpo", 5, (1, 1))
    assert run.config.generator.init_from == run.config.verifier.init_from == str(tmp_path / "stage_one" / "shared")
    assert run.config.ablation == default_config().ablation  # a run knows nothing of the others


def test_without_a_grid_folders_are_those_of_arms_and_seeds(tmp_path):
    plan = make_plan(tiny({}, "ablation.arms=('grpo',)", "ablation.seeds=(4,)"), tmp_path)
    assert [(run.folder, run.name) for run in plan.runs] == [(tmp_path / "grpo" / "seed_4", "grpo/seed_4")]
    assert plan.runs[0].stage_one.folder == tmp_path


def begun_stage_one(tmp_path, config) -> None:
    folder = tmp_path / "stage_one" / "shared"
    (folder / "sft" / "generator").mkdir(parents=True)
    (folder / "sft" / "generator" / "metrics.jsonl").write_text("{}\n")
    keep_config(config, folder / "config.json")


def test_a_stage_one_goes_on_with_its_settings_whichever_cell_is_first(tmp_path):
    begun_stage_one(tmp_path, make_plan(tiny({"words": WORDS}), tmp_path).runs[0].stage_one.config)
    later = make_plan(tiny({"words": dict(reversed(WORDS.items()))}), tmp_path)
    assert later.runs[0].config.task.rl_words == (2, 2)
    assert later.runs[0].stage_one.config.task.rl_words == (1, 1)


def test_a_stage_one_that_was_begun_with_other_settings_is_refused(tmp_path):
    begun_stage_one(tmp_path, make_plan(tiny({"words": WORDS}), tmp_path).runs[0].stage_one.config)
    with pytest.raises(ValueError, match=r"shared holds a stage 1 with other .* \(generator\.sft\.steps: 6 -> 7\)"):
        make_plan(tiny({"words": WORDS}, "generator.sft.steps=7"), tmp_path)


def test_the_settings_of_a_run_serve_as_a_config(tmp_path):
    config = tiny({"words": WORDS}, "seed=4")
    keep_config(config, tmp_path / "a:b" / "config.json")
    loaded = load_config(str(tmp_path / "a:b" / "config.json"), ["rl.gamma=0.5"])
    assert (loaded.seed, loaded.rl.gamma, loaded.generator.row_buckets) == (4, 0.5, (4, 8))
    assert [cell.name for cell in make_cells(loaded)] == ["words=1", "words=2"]


@pytest.mark.parametrize("text, message", [
    ("{", r"config\.json cannot be read \("), ("[1]", r"config\.json holds \[1\], not the settings of a run"),
    ('{"sed": 1}', r"config\.json has settings that this version does not know \(sed=1\): use the version"),
    ('{"seed": "1"}', r"config\.json: seed='1' must be of type int"),
])
def test_settings_that_cannot_be_read_are_named(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        stored_config(str(tmp_path / "config.json"))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="none.json' is not a Python file that exists"):
        load_config(str(tmp_path / "none.json"))


@pytest.mark.parametrize("adapters", [("generator.adapter", "verifier.adapter"), ("generator.adapter",)])
def test_runs_take_the_stage_one_of_their_adapters(tmp_path, adapters):
    """Each is its own command with several workers, which refuses an adapter that nothing would read."""
    peft = tmp_path / "peft"
    peft.mkdir()
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    (peft / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": modules}))
    own = ("checkpoint=a/b", "model.lora.rank=4", "model.lora.alpha=8")
    settings = [*(f"{role}.{setting}" for role in ROLES for setting in own), *(f"{key}={peft}" for key in adapters)]
    if len(adapters) == 1:
        settings += ["verifier.adapter=generator"]
    config = tiny({}, "ablation.arms=('tango',)", "ablation.seeds=(0,)", *settings)
    [planned] = make_plan(config, tmp_path / "runs").runs
    keep_config(config, tmp_path / "runs/config.json")
    validate(planned.config)
    keep_config(planned.config, planned.folder / "config.json")
    asked = [f"--from={tmp_path / 'runs'}", f"--workdir={tmp_path / 'fork'}"]
    fork, _ = parse_command_line("train", "doc", asked, "runs/NAME")
    assert [fork[key.split(".")[0]].adapter for key in adapters] == [str(peft)] * len(adapters)
    planned.config.generator.adapter = str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"generator\.adapter=\S+other needs .*init_from or one that began with it"):
        validate(planned.config)
