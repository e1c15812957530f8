"""Settings that follow from a problem file, a model and a machine: configs/own_problems.py."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from support.own_problems import ROOMY_CPU, write_problems
from support.paths import ROWS
from support.reward_models import write_qwen_folder
from support.tiny_checkpoints import MODEL, save_run, write_tiny_folder, write_tiny_gguf
from tango_jax.ablation.planned_runs import make_plan
from tango_jax.cli.command_line import load_config, parse_command_line
from tango_jax.cli.config_file import load_shipped
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES, default_config, flatten
from tango_jax.loop.init_from import trained_on_before
from tango_jax.planning import own_problems
from tango_jax.planning.costs import num_parameters
from tango_jax.planning.job import sized_job
from tango_jax.planning.machines import GIB, Machine
from tango_jax.planning.memory import resident
from tango_jax.planning.own_problems import fit
from tango_jax.planning.sources import OpenSettings, plan_source
from tango_jax.rl.policy import make_policy
from tango_jax.runtime.checks import SettingsError
from tango_jax.tasks.registry import make_task
from tango_jax.tasks.self_text import as_fields
from tango_jax.tasks.worked_examples import read_examples
from tango_jax.tracking.run_config import save_config
from tango_jax.weights.presets import preset_model
from tango_jax.weights.source import NUMERICS, fields_of
from tango_jax.weights.workdir import start_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(autouse=True)
def small_cpu(monkeypatch):
    monkeypatch.setattr(own_problems, "this_machine", lambda config: ROOMY_CPU)


def own(folder, problems, *overrides: str):
    return load_config("own_problems", overrides, model=str(folder), problems=str(problems))


def test_three_flags_make_a_whole_configuration(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    config, workdir = parse_command_line(
        "train", "doc", ["--config=own_problems", f"--model={folder}", "--problems", str(problems)], "runs/NAME"
    )
    assert workdir == Path("runs/own_problems")
    tokenizers = {role: start_source(config, role).tokenizer for role in ROLES}
    task = make_task(config, tokenizers)
    assert (task.grade_kind, task.num_test, task.sft_roles) == ("math", 20, ROLES)
    assert "180 training and 20 validation problems; 0 left out because of their length" in task.notes[0]
    for role in ROLES:
        assert config[role].checkpoint == str(folder) and config[role].use_chat and config[role].sft.steps == 32
        assert config[role].max_prompt + config[role].max_response <= MODEL.max_position
    # A prompt with a whole solution fits the verifier.
    assert config.verifier.max_prompt > config.generator.max_prompt + config.generator.max_response
    rl = config.rl
    assert (rl.prompts_per_step, rl.samples_per_prompt, rl.generator_steps) == (4, 4, 20)
    assert (config.task.validation, config.eval.problems) == (20, 20)
    notes = config.notes.splitlines()
    assert notes[0].startswith(f"problems: 180 for training and 20 held out, of 200 in {problems}, read as ")
    assert len(notes) == 7 and config.task.stage_one == "self"
    assert "first looks at up to 32 samples" in notes[5]
    assert "self.problems=64 x self.samples=4 = 256 samples" in notes[5]
    assert "first looks at up to 24 samples" in own(folder, problems, "self.problems=24").notes
    assert f"max_prompt={config.generator.max_prompt}" in notes[1]
    assert "rl.generator_steps=20 (45 draw every problem once) after rl.warmup_steps=2" in notes[4]
    twice, judged = own(folder, problems, "arm=second_try"), own(folder, problems, "arm=meta_judged")
    both = twice.generator.max_response + twice.verifier.max_response  # of which a later prompt is about
    assert twice.generator.max_prompt == config.generator.max_prompt + both + 64
    assert judged.verifier.max_prompt >= config.verifier.max_prompt and judged.generator == config.generator
    resampling = own(folder, problems, "rl.dynamic_sampling=2")
    assert "rl.generator_steps=20 (15 may draw every problem once) after" in resampling.notes


@pytest.mark.parametrize("setting, models_saved", [
    ("arm=tango", 2), ("arm=self_verify", 1), ("verifier.adapter=generator", 1)])
def test_a_checkpoint_holds_one_policy_once(folder, tmp_path, setting, models_saved):
    config = own(folder, write_problems(tmp_path / "problems.jsonl", 40), setting)
    model = preset_model("HuggingFaceTB/SmolLM3-3B")
    size = models_saved * 12 * num_parameters(model) / 1e9  # float32 parameters and two moments
    said = own_problems.describe_turns([sized_job(config, dict.fromkeys(ROLES, model), ROOMY_CPU)], 36)
    assert f"a checkpoint of {size:.1f} GB every" in said


def test_what_the_user_sets_stays_and_the_rest_follows_from_it(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 40)
    config = own(folder, problems)
    short = own(folder, problems, "generator.max_response=64", "rl.prompts_per_step=2", "generator.use_chat=false",
                "verifier.row_buckets=(4,)", "task.validation=7", "notes=mine")
    assert (short.generator.max_response, short.rl.prompts_per_step, short.generator.use_chat) == (64, 2, False)
    assert short.verifier.row_buckets == (4,) and short.task.validation == 7 and short.verifier.use_chat
    assert short.generator.cache_buckets == () and config.generator.cache_buckets == (128,)
    assert short.verifier.max_prompt < config.verifier.max_prompt
    assert short.generator.row_buckets[-1] == 8 and config.generator.row_buckets[-1] == 16
    assert short.rl.generator_steps > config.rl.generator_steps
    assert short.notes.startswith("mine\nproblems: 33 for training and 7 held out")
    for each in (config, short):
        validate(each)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_plain_rows_in_every_kind_of_file(folder, tmp_path, suffix):
    rows = [json.loads(line) for line in write_problems(tmp_path / "rows", 12).read_text().splitlines()]
    path = tmp_path / f"problems.{suffix}"
    if suffix == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows)))
    config = own(folder, path)
    validate(config)
    assert config.notes.startswith("problems: 11 for training and 1 held out, of 12 in")


def test_worked_answers_make_room_for_themselves(folder):
    plain = own(folder, ROWS / "math500.jsonl")
    worked = own(folder, ROWS / "gsm8k.jsonl")
    assert plain.generator.max_response == 256 < worked.generator.max_response


def test_a_few_very_long_problems_are_left_out_instead_of_setting_the_limit(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 300)
    with problems.open("a") as file:
        file.write(json.dumps({"question": "and " * 1500, "answer": "1"}) + "\n")
    config = own(folder, problems)
    assert config.generator.max_prompt < 1000 and "which leaves 1 out" in config.notes
    make_task(config, {role: start_source(config, role).tokenizer for role in ROLES})


def test_problems_of_their_own_serve_for_evaluation(folder, tmp_path):
    train, test = write_problems(tmp_path / "a.jsonl", 12), write_problems(tmp_path / "b.jsonl", 5, "{a} times {b}?")
    config = own(folder, train, f"task.test={test}")
    task = make_task(config, {role: start_source(config, role).tokenizer for role in ROLES})
    assert task.num_test == config.eval.problems == 5 and "12 training and 0 validation" in task.notes[0]
    said = f"problems: 12 for training, of 12 in {train}, and 5 for evaluation, of 5 in {test}, read as math: "
    assert config.notes.startswith(said)
    with pytest.raises(SettingsError, match="^task.test: .*none.jsonl does not exist"):
        own(folder, train, f"task.test={tmp_path / 'none.jsonl'}")


def test_questions_of_a_test_file_are_not_counted_for_training(folder, tmp_path):
    train = write_problems(tmp_path / "a.jsonl", 12)
    test = write_problems(tmp_path / "b.jsonl", 5)  # the first five of the twelve
    config = own(folder, train, f"task.test={test}")
    assert config.notes.startswith(f"problems: 7 for training, of 12 in {train}, and 5 for evaluation, of 5 in {test}")
    task = make_task(config, {role: start_source(config, role).tokenizer for role in ROLES})
    assert "7 training and 0 validation" in task.notes[0]
    with pytest.raises(SettingsError, match="0 are left for training and 12 for evaluation .* others to evaluate on"):
        own(folder, train, f"task.test={train}")


def test_the_verifier_may_be_another_model_and_either_may_lack_a_chat_template(folder, tmp_path):
    gguf = write_tiny_gguf(tmp_path / "model.gguf")
    raw = write_tiny_folder(tmp_path / "raw")
    settings = json.loads((raw / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (raw / "tokenizer_config.json").write_text(json.dumps(settings))
    (raw / "chat_template.jinja").unlink(missing_ok=True)
    problems = write_problems(tmp_path / "problems.jsonl")
    config = own(gguf, problems, f"verifier.checkpoint={raw}")
    assert (config.generator.use_chat, config.verifier.use_chat) == (True, False)
    assert "the generator's prompts are chat turns and the verifier's prompts are raw text" in config.notes
    started = default_config()
    for role in ROLES:
        started[role].checkpoint, started[role].use_chat = str(folder), role == "verifier"
    save_run(tmp_path / "run", started)
    config = own(tmp_path / "run", problems)
    assert (config.generator.use_chat, config.verifier.use_chat) == (False, True)


def test_a_config_of_ones_own_starts_from_it(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problems = write_problems(tmp_path / "problems.jsonl")
    Path("mine.py").write_text(
        "from tango_jax.cli.config_file import load_shipped\n"
        "def get_config(argument=''):\n"
        f"    config = load_shipped('own_problems', model={str(folder)!r}, problems={str(problems)!r})\n"
        "    config.rl.generator_steps = 3\n"
        "    return config\n"
    )
    config = load_config("mine.py")
    expected = load_shipped("own_problems", model=str(folder), problems=str(problems))
    assert flatten(config) == flatten(expected) | {"rl.generator_steps": 3}


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("model, text, messages", [
    ("none.gguf", None, [r"task.train: data file", "checkpoint none.gguf does not exist"]),
    ("", '{"question": "1?", "answer": 1}', ["--model has no value: write --model=VALUE"]),
    ("MODEL", "", ["no rows found"]),
    ("MODEL", '{"question": "1?", "anwser": 1}',
     ["line 1: 'answer' is missing", "keys wanted of a row in the format math"]),
    ("MODEL", '{"question": "1?", "answer": 1}', ["1 different questions, 0 are left for training", "give more"]),
])
def test_mistakes_are_found_together_before_anything_is_done(folder, tmp_path, model, text, messages, capsys):
    problems = tmp_path / "problems.jsonl"
    if text is not None:
        problems.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        parse_command_line("train", "doc", ["--config=own_problems", f"--model={model.replace('MODEL', str(folder))}",
                                            f"--problems={problems}"], "runs/NAME")
    said = capsys.readouterr().err
    told = [line for line in said.splitlines() if not line.endswith(" ...")]  # what is being done
    assert stopped.value.code == 2 and all(line.startswith("error: ") for line in told)
    assert all(message in said for message in messages), said


def test_what_takes_long_is_said_before_it_begins(folder, tmp_path, monkeypatch, capsys):
    """Each line is out when the work that it names begins."""
    heard = []

    def listening(work_fn):
        def listens(*arguments, **named):
            heard.append(capsys.readouterr().err.splitlines()[-1:])
            return work_fn(*arguments, **named)

        return listens

    for name in ("open_sources", "prompt_lengths", "choose_adapters"):
        monkeypatch.setattr(own_problems, name, listening(getattr(own_problems, name)))
    own(folder, write_problems(tmp_path / "problems.jsonl", 30))
    assert heard == [[f"reading the sizes and the tokenizer of {folder} ..."],
                     ["counting the tokens of 30 problems ..."],
                     ["choosing batches for 1 x cpu of 64.0 GiB ..."]]


def test_both_flags_are_needed(capsys):
    with pytest.raises(SystemExit):
        parse_command_line("train", "doc", ["--config=own_problems", "--modle=x"], "runs/NAME")
    first, second = capsys.readouterr().err.splitlines()
    assert "unknown argument '--modle=x'; did you mean --model?" in first
    assert "own_problems.py needs --model=VALUE and --problems=VALUE: give them; --model is a Hugging Face" in second


def test_problems_that_no_position_is_left_for(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", question="{a} + {b} and " + "so on " * 3000)
    with pytest.raises(SettingsError) as error:
        own(folder, problems)
    assert len(error.value.messages) == 2
    assert all(f"of the 4096 positions of {folder} for a response" in line for line in error.value.messages)


def test_limits_that_leave_no_problem_are_named_with_what_they_need(folder, tmp_path):
    train = write_problems(tmp_path / "a.jsonl")
    test = write_problems(tmp_path / "b.jsonl", 5, "{a} times " + "three times " * 200 + "{b}?")
    limits = ["generator.max_prompt=100", "verifier.max_prompt=400"]
    with pytest.raises(SettingsError) as error:
        own(folder, train, *limits)
    expected = [(role, limit, use) for use in ("training", "evaluation")
                for role, limit in (("generator", 100), ("verifier", 400))]
    for message, (role, limit, use) in zip(error.value.messages, expected, strict=True):
        assert message.startswith(f"{role}.max_prompt={limit} leaves no problem of {train} for {use}: the {role}'s sho")
        shortest = int(re.search(r"shortest prompt has (\d+) tokens", message)[1])
        assert shortest > limit and f"; raise {role}.max_prompt, or give shorter problems" in message
    with pytest.raises(SettingsError, match=f"^generator.max_prompt=.* leaves no problem of {test} for evaluation: "):
        own(folder, train, f"task.test={test}", "generator.max_prompt=640")


def test_no_number_of_rows_is_one_message(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl")
    with pytest.raises(SettingsError) as error:
        own(folder, problems, "generator.row_buckets=()")
    assert error.value.messages == ("generator.row_buckets=() names no number of rows to decode: name at least one, or "
                                    "leave the setting out to fit it to the memory",)


# -------------------------------------------------------------------------------------------------------------- machine


def fitted(folder, problems, machine: Machine, *overrides: str):
    """Fitted to a machine that is not here."""
    config = load_config("own_problems", overrides, model=str(folder), problems=str(problems))
    config = config.copy_and_resolve_references()
    fit(config, {override.partition("=")[0] for override in overrides}, machine)
    return config


def test_an_accelerator_gets_larger_batches_longer_answers_and_bfloat16(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    config = fitted(folder, problems, Machine("gpu", 8, 80 * GIB, capability=8.0))
    assert config.generator.model.compute_dtype == config.verifier.model.compute_dtype == "bfloat16"
    assert config.generator.model.head_precision == config.verifier.model.head_precision == "bfloat16_x3"
    older = fitted(folder, problems, Machine("gpu", 8, 80 * GIB, capability=7.5))  # XLA refuses the three products
    assert older.generator.model.head_precision == older.verifier.model.head_precision == "highest"
    assert (config.rl.prompts_per_step, config.rl.samples_per_prompt) == (32, 8)
    assert config.generator.max_response == 1024 and config.generator.row_buckets[-1] == 256
    assert "8 x gpu of 80.0 GiB" in config.notes
    validate(config)


@pytest.mark.long
def test_less_memory_means_fewer_rows_and_too_little_is_an_error(folder, tmp_path, monkeypatch):
    """The sizes of SmolLM2-135M; its weights are not read."""
    problems = write_problems(tmp_path / "problems.jsonl", 200)

    def sizes(settings, mistakes, is_planned):
        tiny = {role: start_source(settings.config, role) for role in ROLES}
        name = "HuggingFaceTB/SmolLM2-135M-Instruct"
        presets = {
            role: preset_model(name, **{key: value for key, value in fields_of(settings.config[role]).items()
                                        if key in NUMERICS})
            for role in ROLES
        }
        return {role: dataclasses.replace(source, model_config=presets[role]) for role, source in tiny.items()}

    monkeypatch.setattr(own_problems, "open_sources", sizes)
    large, small = (fitted(folder, problems, Machine("cpu", 1, gib * GIB)) for gib in (16, 9))
    assert large.generator.row_buckets == (8, 16) and large.generator.logp_chunk == 128
    assert small.verifier.row_buckets[-1] < large.verifier.row_buckets[-1]
    assert small.verifier.row_buckets[-1] % small.rl.samples_per_prompt == 0
    model = preset_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert num_parameters(model) == pytest.approx(134_515_008, rel=0.001)
    models = dict.fromkeys(ROLES, model)
    held = resident(sized_job(large, models, Machine("cpu", 1, 0)), "").peak
    assert held == pytest.approx(32 * 134_515_008, rel=0.001)
    for config in (large, small):
        validate(config)
    message = r"take 4\.0 GiB of each device, which has 3\.0 GiB: choose a smaller model"
    in_full = [f"{role}.model.lora.rank=0" for role in ROLES]
    with pytest.raises(SettingsError, match=message):
        fitted(folder, problems, Machine("cpu", 1, 3 * GIB), *in_full)
    adapted = fitted(folder, problems, Machine("cpu", 1, 3 * GIB))
    assert adapted.generator.model.lora.rank == adapted.verifier.model.lora.rank == 32
    fitted(folder, problems, Machine("cpu", 1, 3 * GIB), "generator.loss.kl_coef=0.0", "verifier.loss.kl_coef=0.0",
           "generator.mesh.offload=True")


def test_a_mesh_that_the_machine_cannot_have_is_one_message(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 20)
    with pytest.raises(SettingsError) as error:
        fitted(folder, problems, Machine("gpu", 8, 80 * GIB), "generator.mesh.fsdp=3")
    (message,) = error.value.messages
    assert message.startswith("generator: mesh axes data=1, fsdp=3, tensor=1")


def test_a_budget_of_cached_tokens_is_kept_to(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    config = fitted(folder, problems, Machine("gpu", 8, 80 * GIB), "generator.cache_tokens=6000")
    longest = config.generator.max_prompt + config.generator.max_response
    # The smallest batch has room, of 8 groups of devices.
    assert config.generator.row_buckets[0] / 8 * longest <= 6000
    assert config.verifier.row_buckets[-1] == 256
    validate(config)


def test_rows_are_shared_by_the_devices_of_a_process(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 20)
    rows = ("generator.row_buckets=(4096,)", "generator.rows_per_micro_batch=1", "verifier.rows_per_micro_batch=1")
    planned = [float(re.search(r"about ([\d.]+) GiB are planned", fitted(folder, problems, machine, *rows).notes)[1])
               for machine in (Machine("gpu", 8, 80 * GIB), Machine("gpu", 8, 80 * GIB, local=1))]
    assert planned[1] > 4 * planned[0]


def test_the_policies_can_be_built(folder, tmp_path):
    config = own(folder, write_problems(tmp_path / "problems.jsonl"))
    for role in ROLES:
        policy = make_policy(role, config[role], start_source(config, role))
        assert policy.sampler.config.row_buckets[-1] % config.rl.samples_per_prompt == 0
        assert np.all(np.diff(policy.sampler.config.prompt_buckets) > 0)


def test_a_reward_model_may_be_the_fixed_verifier(folder, tmp_path):
    problems, prm = write_problems(tmp_path / "problems.jsonl"), write_qwen_folder(tmp_path / "prm")
    config = own(folder, problems, f"verifier.checkpoint={prm}", "arm=fixed_verifier", "rl.warmup_steps=0")
    validate(config)
    assert (config.verifier.template, config.verifier.use_chat) == ("qwen_prm", False)
    assert config.verifier.max_prompt > config.generator.max_response
    policy = make_policy("verifier", config.verifier, start_source(config, "verifier"))
    assert policy.model_config.score_head == "mlp"
    small = Machine("gpu", devices=1, memory=0.0008 * GIB)
    config = fitted(folder, problems, small, f"verifier.checkpoint={prm}", "arm=fixed_verifier")
    assert (config.generator.model.lora.rank > 0, config.verifier.model.lora.rank) == (True, 0)


def test_a_reward_model_has_no_moments_and_writes_nothing(folder, tmp_path):
    problems, prm = write_problems(tmp_path / "problems.jsonl", 200), write_qwen_folder(tmp_path / "prm")
    config = own(folder, problems, f"verifier.checkpoint={prm}", "arm=fixed_verifier", "generator.max_response=640")
    assert config.verifier.max_response == 1
    assert config.verifier.max_prompt == 800  # 68 + 640 + 64 rounded, of 1024 positions
    notes = config.notes.splitlines()
    assert "max_response=640" in notes[1] and "max_response" not in notes[2]
    assert "rows of the generator are decoded, and 4 of the generator are trained on; for" in notes[3]
    assert "samples of the generator. If" in notes[5] and "(generator.sft.steps=32)" in notes[5]
    models = {role: plan_source(config, role).model_config for role in ROLES}
    job = sized_job(config, models, ROOMY_CPU)
    held = {role: sum(leaf.size for leaf in jax.tree.leaves(job.policies[role].state.params)) for role in ROLES}
    assert job.checkpoint_bytes == pytest.approx(12 * held["generator"] + 4 * held["verifier"], abs=64)  # and counters
    small = Machine("gpu", devices=1, memory=0.0008 * GIB)
    said = fitted(folder, problems, small, f"verifier.checkpoint={prm}", "arm=fixed_verifier").notes
    assert "training all parameters of the generator does not fit" in said


def test_the_notes_are_of_what_the_arm_does(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    grpo, scored = own(folder, problems, "arm=grpo").notes, own(folder, problems, "arm=scored").notes
    assert "of the generator. If" in grpo and "4 of the generator are trained on" in grpo
    assert "at a time, 16 rows of the generator are decoded, and 4 of the generator and 4 of the verifier are" in scored
    fixed = own(folder, problems, "arm=fixed_generator").notes
    assert "rl.generator_steps=20 after rl.warmup_steps=2" in fixed and "every problem once" not in fixed
    more = own(folder, problems, "self.problems=500").notes  # 180 of the 200 are for training
    assert "self.problems=500 (180 are there) x self.samples=4 = 720 samples" in more


@pytest.mark.parametrize("arms, arm, steps, told, decoded", [
    ("('scored','grpo')", "tango", 0, "after rl.warmup_steps=2", "16 rows of the generator are decoded"),
    ("('tango','grpo')", "grpo", 32, "after rl.warmup_steps=2", "and 16 rows of the verifier are decoded"),
    ("('fixed_generator',)", "tango", 32, "rl.generator_steps=20 after", "; at a time, 16 rows of the generator"),
    ("('grpo',)", "tango", 0, "after no warm-up", "and 4 of the generator are trained on"),
    # The verifiers of both start as they are: the second one does not write.
    ("('tango','scored')", "tango", 0, "after rl.warmup_steps=2", "and 16 rows of the verifier are decoded"),
])
def test_settings_suit_every_arm_of_an_experiment(folder, tmp_path, arms, arm, steps, told, decoded):
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    config = own(folder, problems, f"ablation.arms={arms}", f"arm={arm}")
    assert (config.arm, config.verifier.sft.steps) == (arm, steps)
    assert told in config.notes and decoded in config.notes
    make_plan(config, tmp_path / "runs")


def test_an_experiment_has_room_for_each_of_its_arms(folder, tmp_path):
    """One trains the generator alone, the other one the verifier alone."""
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    grpo, fixed, both = (fitted(folder, problems, Machine("gpu", 1, 0.2 * GIB), given) for given in (
        "arm=grpo", "arm=fixed_generator", "ablation.arms=('grpo','fixed_generator')"))
    rows = [[config[role].rows_per_micro_batch for role in ROLES] for config in (grpo, fixed, both)]
    assert rows == [[2, 8], [8, 1], [2, 1]]  # 8 where a role is not trained
    assert "2 of the generator and 1 of the verifier are trained on" in both.notes
    assert "draw every problem once) after rl.warmup_steps" in both.notes


@pytest.mark.parametrize("command, steps", [("ablate", 32), ("train", 0)])
def test_an_experiment_has_its_own_arms_and_not_the_arm_of_a_run(folder, tmp_path, command, steps):
    """Most of its default arms have a verifier."""
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    given = ["--config=own_problems", f"--model={folder}", f"--problems={problems}", "--config.arm=grpo"]
    config, _ = parse_command_line(command, "doc", given, "runs/NAME")
    assert (config.arm, config.verifier.sft.steps) == ("grpo", steps)


@pytest.mark.parametrize("arm, steps", [("second_try", 32), ("scored", 0)])
def test_settings_suit_the_arms_of_cells(folder, tmp_path, arm, steps):
    """Second tries need longer prompts, and a verifier; scored arms none that is taught to write."""
    problems, grid = write_problems(tmp_path / "problems.jsonl", 200), {"x": {"a": {"ablation.arms": (arm,)}, "b": {}}}
    config = own(folder, problems, "ablation.arms=('grpo',)", f"ablation.grid={grid}")
    assert config.verifier.sft.steps == steps
    names = {run.name for run in make_plan(config, tmp_path / "runs").runs if run.seed == 0}
    assert names == {f"x=a/{arm}/seed_0", "x=b/grpo/seed_0"}
    grid = {"x": {"a": {"ablation.arms": (arm,)}, "b": {"ablation.arms": (arm,)}}}
    config = own(folder, problems, "ablation.arms=('tango',)", f"ablation.grid={grid}")
    assert config.verifier.sft.steps == steps  # no cell has tango


def test_each_role_of_stage_one_learns_at_the_rate_of_its_size():
    config, names = default_config(), ("HuggingFaceTB/SmolLM3-3B", "HuggingFaceTB/SmolLM2-135M-Instruct")
    for role, name in zip(ROLES, names, strict=True):
        config[role].checkpoint = name
    models = {role: preset_model(config[role].checkpoint) for role in ROLES}
    own_problems.set_stage_one(OpenSettings(config, ()), ROOMY_CPU.scale, models, 36)
    assert [config[role].sft.optimizer.lr for role in ROLES] == [1e-5, 5e-5]


@pytest.mark.parametrize("overrides, stage_one, steps", [
    (["task.stage_one="], "", (0, 0)),
    (["task.stage_one=self", "verifier.sft.steps=8"], "self", (32, 8)),
    (["generator.sft.steps=16", "verifier.sft.steps=8"], "self", (16, 8)),
    (["generator.sft.batch_size=4", "task.examples=EXAMPLES"], "self", (32, 32)),
    (["generator.sft.steps=0"], "self", (0, 32)),
    (["generator.sft.steps=0", "verifier.sft.steps=0"], "", (0, 0)),
    (["arm=grpo", "generator.sft.steps=0"], "", (0, 0)),
    (["generator.checkpoint=RUN", "verifier.checkpoint=RUN"], "", (0, 0)),
    (["arm=grpo"], "self", (32, 0)),
    (["arm=scored"], "self", (32, 0)),
    (["generator.init_from=RUN", "verifier.init_from=RUN"], "", (0, 0)),
    (["verifier.checkpoint=RUN"], "self", (32, 0)),
    (["generator.init_from=RUN"], "self", (0, 32)),
])
def test_a_stage_one_of_own_samples_is_asked_for_unless_settings_say_otherwise(
    folder, tmp_path, overrides, stage_one, steps
):
    problems = write_problems(tmp_path / "problems.jsonl", 40)
    started = default_config()
    started.generator.checkpoint = started.verifier.checkpoint = str(folder)
    save_run(tmp_path / "run", started)
    rows = [as_fields(row) for row in read_examples(started)]
    (tmp_path / "examples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    places = {"RUN": str(tmp_path / "run"), "EXAMPLES": str(tmp_path / "examples.jsonl")}
    config = own(folder, problems, *(re.sub("RUN|EXAMPLES", lambda found: places[found[0]], one) for one in overrides))
    assert config.task.stage_one == stage_one
    assert tuple(config[role].sft.steps for role in ROLES) == steps
    assert ("stage 1: the run first looks at" in config.notes) == (stage_one == "self")
    assert config["self"].problems == (36 if stage_one else 256)
    validate(config)


@pytest.mark.parametrize(("stage_one", "steps", "is_named"), [("self", (32, 32), True), ("", (0, 0), False)])
def test_a_fork_has_the_stage_one_of_its_run_and_says_what_it_does(folder, tmp_path, stage_one, steps, is_named):
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    made = own(folder, problems, f"task.stage_one={stage_one}")
    run = tmp_path / "run"
    run.mkdir()
    save_config(made, run / "config.json")
    assert ("stage 1: the run first looks" in made.notes) == is_named and "after rl.warmup_steps=" in made.notes
    asked = ["--config=own_problems", f"--model={folder}", "--problems", str(problems)]
    for arguments in (asked, []):  # the settings of own_problems, or of the run
        fork, _ = parse_command_line("train", "doc", [*arguments, f"--from={run}", f"--workdir={tmp_path / 'new'}"], "")
        assert (fork.fork_of, fork.rl.warmup_steps) == (str(run), 0)
        for role, count in zip(ROLES, steps, strict=True):
            assert (fork[role].sft.steps, fork[role].init_from) == (count, str(run) if is_named else "")
        assert "stage 1: the run first looks" not in fork.notes and "after rl.warmup_steps=" not in fork.notes
        assert ("after no warm-up" in fork.notes) == (arguments == asked)


def test_stage_one_of_a_role_that_takes_another_runs_is_not_announced(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    config = own(folder, problems, "generator.init_from=runs/other", "generator.sft.steps=6")
    line = next(line for line in config.notes.splitlines() if line.startswith("stage 1"))
    assert "samples of the verifier. If" in line and "generator.sft.steps" not in line


def test_a_run_that_goes_on_holds_out_what_the_run_before_held_out(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    before = own(folder, problems, "task.validation=7", "task.data_seed=5")
    save_run(tmp_path / "run", before)
    for overrides in (["generator.checkpoint=RUN"], ["verifier.init_from=RUN"]):
        made = own(folder, problems, *(one.replace("RUN", str(tmp_path / "run")) for one in overrides))
        assert (made.task.validation, made.task.data_seed) == (7, 5)
        assert trained_on_before(made, "") == []
    asked = [f"generator.checkpoint={tmp_path / 'run'}", "task.validation=9"]
    [told] = trained_on_before(own(folder, problems, *asked), "")
    assert "(task.validation is 7 there, 9 here), so it may have been trained on problems" in told
    save_run(tmp_path / "run", before, step=3, meta={"source_fingerprint": {"problems": "another file"}})
    [told] = trained_on_before(made, "this file")
    assert "(their files differ, or others were left out because of their length), so it may have been trained" in told
    other = write_problems(tmp_path / "others.jsonl", 200)
    assert own(folder, other, *asked[:1]).task.validation != 7


def test_problems_that_stage_one_holds_out_are_not_counted_for_training(folder, tmp_path):
    lines = "3 + 4 = <<3+4=7>>7\n7 + 1 = <<7+1=8>>8\n8 + 1 = <<8+1=9>>9\n#### 9"
    rows = [{"question": f"What is {k} + 1?", "answer": lines} for k in range(100)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = own(folder, tmp_path / "gsm8k.jsonl", "task.stage_one=gsm8k", "generator.sft.steps=2",
                 "verifier.sft.steps=2", "generator.max_response=400")
    task = make_task(config, {role: start_source(config, role).tokenizer for role in ROLES})
    assert config.notes.startswith("problems: 80 for training and 10 held out, of 100")
    assert "80 training and 10 validation problems" in task.notes[0]
    with pytest.raises(ValueError, match="0 are left for training and 60 for evaluation .task.validation=60.: give"):
        own(folder, tmp_path / "gsm8k.jsonl", "task.stage_one=gsm8k", "task.validation=60",
            "generator.max_response=400")
