"""Either policy of a run as a Hugging Face folder: bit by bit, with a tokenizer that transformers opens."""

import gc
import json
import math
import re
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from huggingface_hub import metadata_load

from support.evaluation_cases import settings_of
from support.hf_cases import Inputs
from support.hf_loading import TOLERANCE, add_adapters, assert_equal_trees, logits
from support.paths import ROOT
from support.small_hub import TOKEN
from support.tiny_checkpoints import full_disk, save_run, save_step, tiny_params, write_tiny_folder, write_tiny_gguf
from tango_jax import export
from tango_jax.cli.command_line import parse_command_line
from tango_jax.config import ROLES, default_config
from tango_jax.evaluation.settings import check_settings, save_settings
from tango_jax.judge import judge
from tango_jax.loop.init_from import check_init_from
from tango_jax.method.own_arm import stored_arm
from tango_jax.models.lora import init_adapters
from tango_jax.models.transformer import init_params
from tango_jax.records import Problem
from tango_jax.runtime import checkpoint
from tango_jax.runtime.trees import flatten_names, tree_fingerprint
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings, open_checkpoint_sampler
from tango_jax.tasks.registry import make_task
from tango_jax.text.templates import (
    FIRST_ERROR,
    TEMPLATES,
    VERIFIER_MATH,
    generator_prompt,
    templates_digest,
    verifier_prompt,
)
from tango_jax.tracking.metrics import MetricsWriter
from tango_jax.tracking.run_config import save_config
from tango_jax.weights.prompting import NO_EXAMPLE, Prompting, read_prompting
from tango_jax.weights.source import open_source
from tango_jax.weights.workdir import open_checkpoint, open_workdir, prompting_of, start_source, what_chose

TEXT = "Two words: <step>3 + 4</step> \u6570"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.mark.parametrize("start", ["folder", "gguf"])
def test_a_trained_policy_comes_back_bit_by_bit(start, folder, gguf, tmp_path, capsys):
    from transformers import AutoConfig, AutoTokenizer

    config = default_config()
    config.verifier.checkpoint = config.generator.checkpoint = str({"folder": folder, "gguf": gguf}[start])
    params = save_run(tmp_path / "run", config, step=3)
    with MetricsWriter(tmp_path / "run" / "metrics.jsonl") as writer:
        writer.write(0, "eval", {"verifier/pool/step_f1": 0.1})
        writer.write(3, "eval", {"verifier/pool/step_f1": 0.625, "generator/accuracy": 0.5, "time/evaluate_s": 1.0})
    out = tmp_path / "out"
    code = export.main([f"--workdir={tmp_path / 'run'}", "--role=verifier", f"--out={out}"])
    assert code == 0 and str(out) in capsys.readouterr().out
    exported = open_source(str(out))
    assert_equal_trees(exported.load_params(), params)
    assert exported.tokenizer.encode_fn(TEXT) == open_source(str(folder)).tokenizer.encode_fn(TEXT)
    assert exported.tokenizer.stop_ids == open_source(config.verifier.checkpoint).tokenizer.stop_ids
    assert AutoConfig.from_pretrained(out).model_type == "llama"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == exported.tokenizer.encode_fn(TEXT)
    assert "user\nHi" in tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    card = (out / "README.md").read_text()
    assert "| verifier/pool/step_f1 | 0.625 |" in card and "generator/accuracy" not in card
    assert "rl.gamma" not in card and "| step |" not in card  # nothing of how it was trained
    assert (out / "prompt_template.txt").read_text() == TEMPLATES["verifier", "math"] and VERIFIER_MATH[:80] in card
    stop_ids = list(exported.tokenizer.stop_ids)  # one as a number, as published checkpoints have it
    for name in ("generation_config.json", "config.json"):
        assert json.loads((out / name).read_text())["eos_token_id"] == (stop_ids if start == "gguf" else stop_ids[0])


@pytest.mark.parametrize("name", ["../runs/mine", "~/runs/mine", "../link"])
def test_a_run_may_be_named_from_elsewhere(folder, tmp_path, monkeypatch, name):
    """By its folder's name to `export`, and as a checkpoint or the start of a fork to others."""
    config = default_config()
    config.verifier.checkpoint = config.generator.checkpoint = str(folder)
    params = save_run(tmp_path / "runs/mine", config, step=3)
    save_run(tmp_path / "runs/mine", config, step=5, stage_one=True, meta={"heldout_loss": 0.1})
    (tmp_path / "link").symlink_to("runs/mine")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert export.main([f"--workdir={name}", "--out=out"]) == 0
    assert "These are the weights after turn 3." in Path("out/README.md").read_text()
    for opened in (open_source("out"), open_checkpoint(name, "verifier")):
        assert_equal_trees(opened.load_params(), params)
    config.generator.init_from, config.generator.sft.steps = name, 5
    check_init_from(config)
    made, workdir = parse_command_line("train", "doc", [f"--from={name}"], "runs/NAME")
    assert (made.fork_of, workdir) == (name, Path("runs/mine_fork"))


def test_the_card_shows_what_was_measured_of_these_weights(folder, tmp_path):
    """A run that was stopped at turn 9 has evaluated later weights than those of its newest checkpoint, turn 6."""
    config = default_config()
    config.verifier.checkpoint = config.generator.checkpoint = str(folder)
    save_run(tmp_path / "run", config, stage_one=True, step=30)
    with MetricsWriter(tmp_path / "run" / "sft" / "generator" / "metrics.jsonl") as writer:
        for step in (20, 30, 40):
            writer.write(step, "sft", {"generator/sft_heldout_loss": step / 100})
    with MetricsWriter(tmp_path / "run" / "metrics.jsonl") as writer:
        for turn in (0, 4, 8):
            writer.write(turn, "eval", {"generator/accuracy": turn / 10})
            writer.write(turn + 1, "generator", {"generator/accuracy": 0.99})
    card = (export.export(tmp_path / "run", "generator", tmp_path / "one") / "README.md").read_text()
    assert "These are the weights after step 30 of stage 1." in card
    assert "Of the weights after step 30 of stage 1:\n" in card
    assert "| generator/sft_heldout_loss | 0.3 |" in card and "generator/accuracy" not in card
    for step, evaluated, accuracy in ((2, "before the first turn", 0.0), (6, "after turn 4", 0.4)):
        save_run(tmp_path / "run", config, step=step)
        card = (export.export(tmp_path / "run", "generator", tmp_path / str(step)) / "README.md").read_text()
        assert f"These are the weights after turn {step}." in card
        assert f"Of the weights {evaluated}:\n" in card and f"| generator/accuracy | {accuracy} |" in card


def test_the_card_tells_of_the_steps_that_a_verifier_that_stops_leaves_out(folder, tmp_path):
    config = default_config()
    config.verifier.checkpoint = config.generator.checkpoint = str(folder)
    config.verifier.stop_at_first_error, config.verifier.template = True, FIRST_ERROR
    save_run(tmp_path / "run", config, step=1)
    with MetricsWriter(tmp_path / "run/metrics.jsonl") as writer:
        writer.write(1, "eval", {"generator/accuracy": 0.5, "verifier/pool/step_f1": 0.4})
    cards = [(export.export(tmp_path / "run", role, tmp_path / role) / "README.md").read_text() for role in ROLES]
    assert ["the weights after turn 1; step F1 counts as missed" in card for card in cards] == [False, True]


def test_the_card_is_about_the_checkpoint_that_was_read(folder, tmp_path):
    """The newest is damaged."""
    config = default_config()
    config.generator.checkpoint = str(folder)
    for step in (3, 9):
        save_run(tmp_path / "run", config, step=step)
    for path in (tmp_path / "run" / "checkpoints" / "9" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[::-1])
    export.export(tmp_path / "run", "generator", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "turn 3" in card and "turn 9" not in card


def test_the_card_names_the_arm_and_whether_it_trains_the_role(folder, tmp_path):
    config = default_config()
    config.verifier.checkpoint = config.generator.checkpoint = str(folder)
    stored = {"attempts": [{}], "files": {}, "arm": stored_arm("grpo")}
    for role, steps, stage in (("generator", 0, "after reinforcement learning"),
                               ("verifier", 2, "after stage 1 (SFT)"), ("verifier", 0, "not trained by it")):
        workdir, config[role].sft.steps = tmp_path / f"{role}_{steps}", steps
        save_run(workdir, config, step=3, updates=(3, 0))
        (workdir / "provenance.json").write_text(json.dumps(stored))
        card = (export.export(workdir, role, tmp_path / f"{role}_{steps}_out") / "README.md").read_text()
        assert f"# {role.capitalize()} of a run of GRPO (no verifier), {stage}\n" in card


def test_the_card_of_a_verifier_that_does_not_write_has_no_code_that_lets_it(folder, tmp_path):
    config = default_config()
    config.verifier.checkpoint = config.generator.checkpoint = str(folder)
    save_run(tmp_path / "run", config, step=3)
    stored = {"attempts": [{}], "files": {}, "arm": stored_arm("scored")}
    (tmp_path / "run" / "provenance.json").write_text(json.dumps(stored))
    cards = {role: (export.export(tmp_path / "run", role, tmp_path / role) / "README.md").read_text()
             for role in ("generator", "verifier")}
    said = "As a verifier it does not write: its marks are read in one pass (`python -m tango_jax.judge --scored`)."
    assert said in cards["verifier"]
    assert "```python" not in cards["verifier"] and VERIFIER_MATH[:80] in cards["verifier"]
    assert "```python" in cards["generator"] and "does not write" not in cards["generator"]
    for role in cards:
        assert prompting_of(str(tmp_path / role), role).is_scored == (role == "verifier")


@pytest.mark.parametrize("kind", ["run", "export"])
def test_a_verifier_that_was_trained_to_be_read_is_read_wherever_it_comes_from(kind, folder, tmp_path, monkeypatch):
    """Also where the file of its arm is gone, and evaluations keep what was read apart from what was written."""
    (tmp_path / "own.py").write_text(
        "import dataclasses\nfrom tango_jax.method.arms import ARMS\n"
        "mine = dataclasses.replace(ARMS['scored'], label='mine')\n")
    config = default_config()
    config.arm = f"{tmp_path}/own.py:mine"
    config.verifier.checkpoint = config.generator.checkpoint = str(folder)
    config.verifier.max_prompt = config.verifier.max_response = 200
    save_run(tmp_path / "run", config, step=3)
    stored = {"attempts": [{}], "files": {}, "arm": stored_arm(config.arm)}
    (tmp_path / "run" / "provenance.json").write_text(json.dumps(stored))
    (tmp_path / "own.py").unlink()
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "run"
    if kind == "export":
        place = export.export(place, "verifier", tmp_path / "out")
    settings = settings_of(tmp_path / "eval", f"--verifier={place}", sets="processbench", checkpoint=None)
    save_settings(settings)
    (tmp_path / "plain.txt").write_text("{problem} {solution} {num_steps}")
    row = {"problem": "What is 3 + 4?", "steps": ["3 + 4 = 7", "so 7"]}
    assert read_fully(row, place, template="plain.txt")
    file = tmp_path / ("run/provenance.json" if kind == "run" else "out/prompting.json")
    file.write_text(file.read_text().replace('"is_scored": true', '"is_scored": false'))
    assert not read_fully(row, place, template="plain.txt", max_new=4)
    with pytest.raises(ValueError, match=r"eval holds another evaluation \(scored: True -> None\)"):
        check_settings(settings)


def read_fully(row: dict, verifier: Path, **options) -> bool:
    """Whether nothing was written, and every step has a probability."""
    [result] = judge([row], str(verifier), **options)
    [found] = result["verifications"]
    return found["text"] == "" and len(found["p_steps"]) == len(row["steps"])


def test_the_card_says_whether_the_role_had_a_turn(folder, tmp_path):
    config = default_config()
    config.verifier.checkpoint = config.generator.checkpoint = str(folder)
    save_run(tmp_path / "run", config, step=1, updates=(0, 1))
    with open(tmp_path / "run" / "metrics.jsonl", "w") as file:
        file.writelines(json.dumps({"step": step, "phase": phase}) + "\n"
                        for step, phase in ((0, "eval"), (1, "warmup"), (2, "generator")))  # the last is not saved
    for role, stage in (("generator", "not trained by it"), ("verifier", "after reinforcement learning")):
        card = (export.export(tmp_path / "run", role, tmp_path / role) / "README.md").read_text()
        assert f"# {role.capitalize()} of a run of RL Tango, {stage}\n" in card


@pytest.mark.parametrize("arm, updates, stages", [
    ("grpo", (9, 4), ("after reinforcement learning", "after reinforcement learning")),
    ("tango", (0, 0), ("after stage 1 (SFT)", "after stage 1 (SFT)")),
    ("fixed_verifier", (9, 0), ("after reinforcement learning", "after stage 1 (SFT)")),
])
def test_the_card_of_a_fork_is_about_its_weights(arm, updates, stages, folder, tmp_path):
    """Of a fork before its first turn: what the run before it trained, whatever the fork's arm would."""
    config = default_config()
    config.arm, config.fork_of = arm, str(tmp_path / "before")
    for role in ("generator", "verifier"):
        config[role].checkpoint, config[role].sft.steps, config[role].init_from = str(folder), 2, config.fork_of
    save_run(tmp_path / "run", config, step=0, updates=updates)
    stored = {"attempts": [{}], "files": {}, "arm": stored_arm(arm), "fork": {"run": config.fork_of, "turn": 7}}
    (tmp_path / "run" / "provenance.json").write_text(json.dumps(stored))
    for role, stage in zip(("generator", "verifier"), stages, strict=True):
        assert export_title(tmp_path / "run", role).endswith(f", {stage}")
        assert "weights before the first turn of a fork of before after its turn 7." in (
            tmp_path / f"run_{role}" / "README.md").read_text()


def export_title(workdir: Path, role: str) -> str:
    card = (export.export(workdir, role, workdir.with_name(f"{workdir.name}_{role}")) / "README.md").read_text()
    return next(line for line in card.splitlines() if line.startswith("# "))


@pytest.mark.parametrize("start, untrained, stages", [
    ("fresh", ("generator", "verifier"), ("not trained by it", "not trained by it")),
    ("fresh", ("verifier",), ("after stage 1 (SFT)", "not trained by it")),
    ("generator", ("verifier",), ("after stage 1 (SFT)", "after stage 1 (SFT)")),
])
def test_the_card_knows_a_stage_one_that_trained_nothing(start, untrained, stages, folder, tmp_path):
    """With task.stage_one=self, of a role that needed none, or of whose samples none could be kept."""
    config = default_config()
    config.verifier.sft.start = start
    for role in ("generator", "verifier"):
        config[role].checkpoint, config[role].sft.steps = str(folder), 2
    config.task.name, config.task.train, config.task.stage_one = "math", "sums.jsonl", "self"
    save_run(tmp_path / "run", config, step=3, updates=(0, 0))
    for role in ("generator", "verifier"):
        meta = {"untrained": True} if role in untrained else {}
        save_step(tmp_path / f"run/sft/{role}/checkpoints", 2 * (not meta), {"params": tiny_params()}, meta)
    for role, stage in zip(("generator", "verifier"), stages, strict=True):
        assert export_title(tmp_path / "run", role).endswith(f", {stage}")
        card = (tmp_path / f"run_{role}" / "README.md").read_text()
        assert "- Problems: sums.jsonl" in card and ("; stage 1 imitates" in card) == (stage != "not trained by it")


def test_the_card_of_a_stage_one_that_trained_nothing_names_no_step_of_it(folder, tmp_path):
    config = default_config()
    config.generator.checkpoint, config.generator.sft.steps = str(folder), 2
    save_run(tmp_path / "run", config, stage_one=True, step=0, meta={"untrained": True})
    card = (export.export(tmp_path / "run", "generator", tmp_path / "out") / "README.md").read_text()
    assert "not trained by it" in card and "These are the weights before the first turn." in card


def test_a_model_from_scratch_is_exported_with_its_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    config = default_config()
    own = start_source(config, "generator")
    workdir = tmp_path / "run"
    workdir.mkdir()
    save_config(config, workdir / "config.json")
    params = init_params(own.model_config, jax.random.key(0))
    save_step(workdir / "sft/generator/checkpoints", 4, {"params": params}, {})
    out = export.export(workdir, "generator", tmp_path / "out")
    exported = open_source(str(out))
    assert_equal_trees(exported.load_params(), params)
    text = "abc#1 de#2\n<step>#1 ends in c</step>"
    assert exported.tokenizer.encode_prompt(text) == own.tokenizer.encode_prompt(text)
    assert exported.tokenizer.stop_ids == own.tokenizer.stop_ids
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode(text) == own.tokenizer.encode_prompt(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert "stage 1 (SFT)" in (out / "README.md").read_text()
    bfloat16 = open_source(str(export.export(workdir, "generator", tmp_path / "small", "bfloat16")))
    assert_equal_trees(bfloat16.load_params(), jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params))


@pytest.mark.parametrize("rank", [0, 2])
def test_one_array_at_a_time_of_one_role_is_held(rank, folder, tmp_path, monkeypatch):
    """Neither moments nor the other role are read, and what was written is freed before the next is read."""
    config = default_config()
    config.generator.checkpoint = config.verifier.checkpoint = str(folder)
    config.verifier.model.lora.rank = config.generator.model.lora.rank = rank
    model = start_source(config, "verifier").model_config
    params = init_adapters(model, jax.random.key(3)) if rank else tiny_params()
    save_config(config, tmp_path / "run" / "config.json")
    state = {role: {"params": params, "step": np.array(3, np.int32), "opt_state": {"mu": params, "nu": params}}
             for role in ("generator", "verifier")}
    save_step(tmp_path / "run" / "checkpoints", 1, state, {})
    read_fn, names, arrays, alive = checkpoint.read_stored, [], [], []
    most = 1 if rank else 0  # both adapters of a matrix are merged together

    def read(step_folder, name, leaf):
        array, deadline = read_fn(step_folder, name, leaf), time.monotonic() + 60
        # A computation that still runs holds its arguments for a moment, and the frame of an error that jax has
        # caught until the next collection.
        while (count := sum(one() is not None for one in arrays)) > most and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        alive.append(count)
        names.append(name)
        arrays.append(weakref.ref(array))
        return array

    monkeypatch.setattr(checkpoint, "read_stored", read)
    out = export.export(tmp_path / "run", "verifier", tmp_path / "out")
    assert sorted(names) == [f"verifier/params/{name}" for name in sorted(flatten_names(params))]
    assert max(alive) == most
    names.clear()
    most = math.inf  # below, whole roles are loaded
    open_workdir(tmp_path / "run", "generator").load_params()
    assert {name.split("/")[1] for name in names} == {"params"} and {name[:10] for name in names} == {"generator/"}
    expected = open_workdir(tmp_path / "run", "verifier").load_params()
    assert_equal_trees(open_source(str(out), param_dtype=str(expected["embed"].dtype)).load_params(), expected)


def test_mistakes_end_in_one_line(folder, tmp_path, capsys):
    config = default_config()
    config.generator.checkpoint = config.verifier.checkpoint = str(folder)
    save_run(tmp_path / "run", config)
    out = f"--out={tmp_path / 'out'}"
    for arguments, message in [
        ([f"--workdir={tmp_path}", out], f"{tmp_path}/config.json cannot be read"),
        ([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path}"], "exists already and is not an empty folder"),
        (["--workdir=", out], "--workdir is empty: give a path"),
        ([f"--workdir={tmp_path / 'run'}", "--out="], "--out is empty: give a path"),
        ([f"--workdir={tmp_path / 'run'}", f"--out={__file__}/x"], "is not a folder; name a folder"),
        ([f"--workdir={tmp_path / 'run'}", out, "--rolle=verifier"], "unknown argument '--rolle=verifier'"),
        ([f"--workdir={tmp_path / 'run'}", out, f"--config={ROOT / 'configs/tiny.py'}"], "a run with other settings"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            export.main(arguments)
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert open_workdir(tmp_path / "run", "generator").name == str(tmp_path / "run")


@pytest.fixture
def run_to_push(folder, tmp_path) -> list[str]:
    """The arguments that export a run of the tiny folder."""
    config = default_config()
    config.generator.checkpoint = config.verifier.checkpoint = str(folder)
    save_run(tmp_path / "run", config, step=3)
    return [f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]


@pytest.mark.parametrize("repo, visibility", [("me/model", "private"), ("team/public", "public")])
def test_an_export_is_pushed_to_a_private_repository_if_it_is_new(hub, run_to_push, tmp_path, monkeypatch, capsys, repo,
                                                                  visibility):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.visibility["team/public"] = "public"
    assert export.main([*run_to_push, f"--push={repo}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{hub.endpoint}/{repo}"
    assert hub.visibility[repo] == visibility
    out = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.commits[repo, "a" * 40] == out and "README.md" in out
    monkeypatch.chdir(tmp_path)
    assert_equal_trees(open_source(repo).load_params(), open_source(str(tmp_path / "out")).load_params())


@pytest.mark.parametrize("repo, token, state, message", [
    ("model", TOKEN, {}, "--push=model is no repository of the Hugging Face hub: write OWNER/NAME"),
    ("me/a b", TOKEN, {}, "--push=me/a b is no repository"), ("", TOKEN, {}, "--push= is no repository"),
    ("me/a/b", TOKEN, {}, "--push=me/a/b is no repository"),
    ("me/model", None, {}, "--push=me/model needs a token: make one that may write at https://huggingface.co/settings"),
    ("me/model", "hf_wrong", {}, "--push=me/model: the hub refuses the token: make one"),
    ("you/model", TOKEN, {}, "--push=you/model: the token belongs to me, who may write to me, team: name one of these"),
    ("me/model", TOKEN, {"may_write": False}, "--push=me/model: the token of me may only read: make one"),
])
def test_what_cannot_be_pushed_is_one_line_before_the_export(hub, run_to_push, tmp_path, monkeypatch, capsys, repo,
                                                             token, state, message):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    for name, value in state.items():
        setattr(hub, name, value)
    with pytest.raises(SystemExit) as stopped:
        export.main([*run_to_push, f"--push={repo}"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not (tmp_path / "out").exists() and hub.posted == []


def test_a_push_that_fails_leaves_the_export_and_says_how_to_go_on(hub, run_to_push, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refuses_uploads = True
    with pytest.raises(SystemExit):
        export.main([*run_to_push, "--push=me/model"])
    out = tmp_path / "out"
    assert f"{out} is complete, and `hf upload me/model {out}` uploads it" in capsys.readouterr().err
    open_source(str(out))


@pytest.mark.parametrize("task, problems, datasets", [
    ({"name": "last_letter"}, "of the task last_letter", ()),
    ({"name": "/home/me/sums.py:make_task"}, "of the task sums.py:make_task", ()),
    ({"train": "/home/me/a.jsonl", "stage_one": "self"},
     "a.jsonl; stage 1 imitates the model's own samples that are right", ()),
    ({"train": "gsm8k_train", "stage_one": "gsm8k"},
     "hub:openai/gsm8k:main/train; stage 1 imitates their worked answers", ("openai/gsm8k",)),
    ({"train": "a.jsonl", "stage_one": "hub:team/taught/train"},
     "a.jsonl; stage 1 imitates hub:team/taught/train", ("team/taught",)),
])
def test_the_problems_on_a_card(folder, task, problems, datasets, tmp_path):
    config = default_config()
    config.generator.checkpoint, config.task.name = str(folder), "math"
    config.task.update(task)
    save_config(config, tmp_path / "config.json")
    source = start_source(config, "generator")
    found = export.training_of(config, {"attempts": [{"command": "python"}]}, source, [str(tmp_path)])
    assert (found.problems, found.datasets, found.command) == (problems, datasets, "")


OTHER = {"task.name": "math", "task.train": "gsm8k_train", "task.stage_one": "gsm8k"}


@pytest.mark.parametrize("other, problems, datasets", [
    (OTHER, "sums.jsonl; stage 1 imitates the worked answers of hub:openai/gsm8k:main/train", ["openai/gsm8k"]),
    (OTHER | {"task.stage_one": "self"}, "sums.jsonl; stage 1 imitates the model's own samples that are right", None),
    ({"task.name": "last_letter"}, "sums.jsonl; stage 1 imitates texts of the task last_letter", None),
    (None, "sums.jsonl; stage 1 imitates what the run other did, whose settings are gone", None),
])
def test_the_card_tells_of_the_stage_one_of_another_run(other, problems, datasets, folder, tmp_path):
    """This run's task.stage_one is not used."""
    config = default_config()
    config.generator.checkpoint = config.verifier.checkpoint = str(folder)
    config.task.name, config.task.train, config.task.stage_one = "math", "/a/sums.jsonl", "hub:team/taught/train"
    config.generator.init_from = str(tmp_path / "other")
    save_run(tmp_path / "run", config, step=3)
    if other:
        (tmp_path / "other").mkdir()
        (tmp_path / "other/config.json").write_text(json.dumps(other))
    card = export.export(tmp_path / "run", "generator", tmp_path / "out") / "README.md"
    assert f"- Problems: {problems}\n" in card.read_text()
    assert metadata_load(card).get("datasets") == datasets


@pytest.mark.parametrize("start, places", [("generator", "AA"), ("fresh", "A"), (None, "A")])
def test_a_verifier_from_another_run_learned_what_it_learned_there(start, places, tmp_path):
    """B, from which this run's generator starts, taught the verifier nothing. None: the settings of A are gone."""
    config = default_config()
    config.generator.sft.steps = config.verifier.sft.steps = 2
    for name in ("A", "B"):
        config.verifier.sft.start = start or "fresh"
        if start or name == "B":
            save_config(config, tmp_path / name / "config.json")
    config.verifier.sft.start = "generator"
    config.generator.init_from, config.verifier.init_from = str(tmp_path / "B"), str(tmp_path / "A")
    save_config(config, tmp_path / "run/config.json")
    assert export.stage_ones(tmp_path / "run", "verifier") == [str(tmp_path / name) for name in places]
    assert export.stage_ones(tmp_path / "run", "generator") == [str(tmp_path / "B")]


@pytest.mark.parametrize("is_best, patience, best, said", [
    (True, 0, (0.5, 6, 1), "generator/accuracy on hub:me/sums/test (checkpoint.keep_best)"),
    (False, 2, (0.5, 2, 2), "generator/accuracy on the problems set aside from sums.jsonl (checkpoint.patience=2)"),
    (False, 2, (0.5, 2, 1), ""), (False, 0, (0.5, 2, 9), ""), (False, 2, None, ""),
])
def test_an_export_says_what_chose_its_weights(is_best, patience, best, said, folder, tmp_path):
    config = default_config()
    config.generator.checkpoint = config.verifier.checkpoint = str(folder)
    config.checkpoint.keep_best, config.checkpoint.patience = "generator/accuracy", patience
    config.task.name, config.task.train, config.task.test = "math", "/a/sums.jsonl", "hub:me/sums/test" * is_best
    save_run(tmp_path / "run", config, step=6, meta={"best": best})
    out = export.export(tmp_path / "run", "generator", tmp_path / "out", is_best=is_best)
    assert read_prompting(out).chosen_by == said
    chosen = f", chosen by {said}" if said else ""
    assert f"These are the weights after turn 6{chosen}.\n" in (out / "README.md").read_text()
    if not is_best:
        assert prompting_of(str(tmp_path / "run"), "generator").chosen_by == said


@pytest.mark.parametrize("arm, metric, said", [
    # Worked answers that stage 1 holds out, and not the test problems.
    ("tango", "verifier/pool/step_f1", "verifier/pool/step_f1 on the fixed pool of the problems set aside from "
     "gsm8k.jsonl (checkpoint.keep_best)"),
    ("grpo", "generator/accuracy", ""),  # which does not train the verifier
    ("fixed_verifier_warm", "generator/accuracy", ""),  # the same verifier after every generator turn
    ("fixed_verifier_warm", "verifier/pool/outcome_f1", "verifier/pool/outcome_f1 on the fixed pool of the problems "
     "set aside from gsm8k.jsonl (checkpoint.keep_best)"),
    ("self_verify", "generator/accuracy", "generator/accuracy on test.jsonl (checkpoint.keep_best)"),
])
def test_a_verifiers_export_says_what_chose_it(arm, metric, said, folder, tmp_path):
    config = default_config()
    config.generator.checkpoint = config.verifier.checkpoint = str(folder)
    config.arm, config.checkpoint.keep_best = arm, metric
    config.task.name, config.task.stage_one = "math", "gsm8k"
    config.task.train, config.task.test = "/a/gsm8k.jsonl", "/a/test.jsonl"
    save_run(tmp_path / "run", config, step=6, meta={"best": (0.5, 6, 0)})
    (tmp_path / "run/provenance.json").write_text(json.dumps({"arm": stored_arm(arm), "attempts": [{}], "files": {}}))
    out = tmp_path / "out"
    export.main([f"--workdir={tmp_path / 'run'}", "--role=verifier", f"--out={out}", "--best"])
    assert read_prompting(out).chosen_by == said
    assert f"weights after turn 6{f', chosen by {said}' if said else ''}.\n" in (out / "README.md").read_text()


def test_the_fixed_pool_chooses_no_generator(folder, tmp_path):
    """Which has no part in it. Weights of the same turn are exported."""
    config = default_config()
    config.generator.checkpoint = config.verifier.checkpoint = str(folder)
    config.checkpoint.keep_best = "verifier/pool/step_f1"
    save_run(tmp_path / "run", config, step=6, meta={"best": (0.5, 6, 0)})
    said = [what_chose(tmp_path / "run", config, role, is_best=True) for role in ROLES]
    assert said == ["", "verifier/pool/step_f1 on the fixed pool of the task last_letter (checkpoint.keep_best)"]


def test_the_card_says_what_the_run_was_made_of(tmp_path):
    """Base, licence, data and command; adapters have a card, too."""
    base = write_tiny_folder(tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    config = default_config()
    config.generator.checkpoint = config.verifier.checkpoint = str(base)
    config.task.name, config.task.train, config.task.stage_one = "math", "gsm8k_train", str(tmp_path / "teacher.jsonl")
    config.generator.model.lora.rank = config.verifier.model.lora.rank = config.generator.sft.steps = 2
    save_config(config, tmp_path / "run" / "config.json")
    adapters = {"params": init_adapters(start_source(config, "generator").model_config, jax.random.key(3)),
                "step": np.array(1, np.int32)}
    save_step(tmp_path / "run" / "checkpoints", 3, {"generator": adapters, "verifier": adapters}, {})
    command = "python -m tango_jax.train --config=mine.py"
    stored = {"attempts": [{"command": "other"}, {"command": command}], "files": {}}
    (tmp_path / "run" / "provenance.json").write_text(json.dumps(stored))
    merged = export.export(tmp_path / "run", "generator", tmp_path / "merged")
    adapter = export.export_adapter(tmp_path / "run", "generator", tmp_path / "adapter")
    for out, library in ((merged, "transformers"), (adapter, "peft")):
        card, front = (out / "README.md").read_text(), metadata_load(out / "README.md")
        assert (front["library_name"], front["license"], front["datasets"]) == (library, "apache-2.0", ["openai/gsm8k"])
        assert "- Problems: hub:openai/gsm8k:main/train; stage 1 imitates teacher.jsonl\n" in card
        assert f"```text\n{command}\n```" in card and "## Use" in card


def gguf_run(gguf, workdir, base_digest: str = "") -> list[str]:
    """The arguments that export the adapters of a run whose base is a .gguf file, without an --out."""
    config = default_config()
    config.task.name, config.task.train = "math", "gsm8k_train"
    for role in (config.generator, config.verifier):
        role.checkpoint, role.use_chat, role.max_response, role.model.lora.rank = str(gguf), True, 6, 2
    save_config(config, workdir / "config.json")
    source = start_source(config, "generator")
    shapes = jax.eval_shape(lambda: init_adapters(source.model_config, jax.random.key(0)))
    rng = np.random.default_rng(5)
    adapters = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.1).astype(leaf.dtype), shapes)
    states = {"params": adapters, "step": np.array(1, np.int32)}
    base_digest = base_digest or tree_fingerprint(source.open_params())
    meta = {"source_fingerprint": {"templates": templates_digest({role: TEMPLATES[role, "math"] for role in ROLES}),
                                   "generator_base": base_digest}}
    save_step(workdir / "checkpoints", 3, {"generator": states, "verifier": states}, meta)
    return [f"--workdir={workdir}", "--adapter"]


@pytest.mark.parametrize("by", ["peft", "formula"])
def test_the_adapters_of_a_gguf_run_on_the_exported_base(by, gguf, tmp_path, monkeypatch, capsys):
    """The card's code gives the logits of the run's policy, also after the folder was moved. Without peft, the formula
    that it documents stands in for it."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    if by == "peft":
        pytest.importorskip("peft")
    assert export.main([*gguf_run(gguf, tmp_path / "run"), f"--out={tmp_path / 'out'}"]) == 0
    named = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (named["base_model_name_or_path"], named["revision"]) == (str(tmp_path / "out/base"), None)
    base, start = open_source(named["base_model_name_or_path"]), open_source(str(gguf))
    assert_equal_trees(base.load_params(), start.load_params())
    assert base.tokenizer.encode_fn(TEXT) == start.tokenizer.encode_fn(TEXT)
    assert base.tokenizer.stop_ids == start.tokenizer.stop_ids

    (tmp_path / "out").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    card = Path("README.md").read_text()
    [snippet] = re.findall(r"```python\n(.*?)\n```", card, re.DOTALL)
    made = {}
    if by == "formula":
        made["PeftModel"] = SimpleNamespace(from_pretrained=add_adapters)
        snippet = snippet.removeprefix("from peft import PeftModel\n")
    exec(snippet, made)
    assert len(made["inputs"]["input_ids"][0]) > 50 and "What is 3 + 4?" in capsys.readouterr().out
    own, token = open_workdir(tmp_path / "run", "generator"), np.asarray(made["inputs"]["input_ids"], np.int32)
    inputs = Inputs(token, np.arange(token.shape[1])[None], np.ones_like(token, bool))
    with torch.no_grad():
        theirs, bare = (model(made["inputs"]["input_ids"]).logits.numpy() for model in (
            made["model"].float(), AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)))
    ours = np.asarray(logits(own.model_config, own.load_params(), inputs))
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    assert np.abs(theirs - bare).max() > 0.1
    assert metadata_load("README.md")["library_name"] == "peft" and "- Base: `base`, licence: not stated\n" in card
    assert "# model.gguf as a Hugging Face folder\n" in Path("base/README.md").read_text()


@pytest.mark.parametrize("base_digest, options, message", [
    ("of other weights", [], "were trained on other weights than the run's generator starts from now: put back"),
    ("", ["--push=me/model"], "model.gguf, and peft finds no such base on the hub: leave out --adapter to upload the"),
])
def test_the_base_in_a_gguf_has_not_changed_and_is_not_uploaded(hub, gguf, tmp_path, monkeypatch, capsys, base_digest,
                                                                options, message):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(SystemExit):
        export.main([*gguf_run(gguf, tmp_path / "run", base_digest), f"--out={tmp_path / 'out'}", *options])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("out*")) and hub.posted == []


def test_a_disk_that_fills_up_while_the_base_is_written_leaves_nothing(gguf, tmp_path, monkeypatch):
    arguments = gguf_run(gguf, tmp_path / "run")
    monkeypatch.setattr("tango_jax.weights.to_hf.commit", full_disk)
    with pytest.raises(SystemExit):
        export.main([*arguments, f"--out={tmp_path / 'out'}"])
    assert not list(tmp_path.glob("out*"))


SUM = (Problem("asked", "What is 3 + 4?", "7"), r"<think><step>3 + 4 = 7</step></think><answer>\boxed{7}</answer>", 1)


@pytest.mark.parametrize("role, use_chat, task", [
    ("generator", True, "math"), ("generator", False, "last_letter"), ("verifier", True, "math"),
    ("verifier", False, "state_tracking"),
])
def test_the_cards_snippet_makes_the_prompt_of_the_run(role, use_chat, task, folder, tmp_path, monkeypatch):
    """Run as it stands there, but for the model, whose weights transformers reads with PyTorch."""
    config = default_config()
    config.task.name = task
    for name in ("generator", "verifier"):
        config[name].checkpoint, config[name].use_chat, config[name].max_response = str(folder), use_chat, 77
    save_run(tmp_path / "run", config)
    out = export.export(tmp_path / "run", role, tmp_path / "out")
    [snippet] = re.findall(r"```python\n(.*?)\n```", (out / "README.md").read_text(), re.DOTALL)
    assert len(snippet.splitlines()) == 5
    asked = {}

    class Model:
        @classmethod
        def from_pretrained(cls, name):
            return cls()

        def generate(self, **arguments):
            asked.update(arguments)
            return arguments["input_ids"]

    monkeypatch.chdir(out)
    monkeypatch.setattr("transformers.AutoModelForCausalLM", Model)
    exec(snippet.replace('return_tensors="pt"', 'return_tensors="np"'), {})
    source = open_workdir(tmp_path / "run", role)
    problem, solution, num_steps = SUM
    if task != "math":  # a problem of its own; as many steps as the problem is large
        problem, solution = make_task(config, {}).pool_solution(0)
        num_steps = solution.count("<step>")
    if role == "generator":
        prompt = generator_prompt(TEMPLATES[role, "math"], source.tokenizer, problem)
    else:
        prompt, _ = verifier_prompt(TEMPLATES[role, "math"], source.tokenizer, problem, solution, num_steps, 10_000)
    assert asked["input_ids"].tolist() == [prompt] and asked["max_new_tokens"] == 77


def test_the_card_asks_nothing_that_the_tokenizer_has_no_token_for():
    config = default_config()
    tokenizer = start_source(config, "generator").tokenizer  # letters, and what this task needs besides
    own = export.example_of(config, tokenizer)
    assert own.problem == make_task(config, {}).pool_solution(0)[0].question
    assert own.num_steps == own.solution.count("</step>") == 5
    free = default_config()
    free.task.double_steps = 1.0
    assert export.example_of(free, tokenizer).num_steps < 5
    config.task.name = "math"  # of a policy that started from a run on words
    assert export.example_of(config, tokenizer) == NO_EXAMPLE
    prompting = Prompting("verifier", "{problem}{solution}", False, 8, 9, 1)
    assert """.replace("{problem}", '...').replace("{solution}", '...')""" in prompting.snippet(NO_EXAMPLE)


def test_one_policy_is_exported_with_the_prompts_of_both_roles(folder, tmp_path):
    config = default_config()
    config.verifier.adapter = "generator"
    config.generator.checkpoint = config.verifier.checkpoint = str(folder)
    config.generator.max_response, config.verifier.max_response = 50, 70
    config.verifier.stop_at_first_error, config.verifier.template = True, FIRST_ERROR
    save_run(tmp_path / "run", config)
    for role in ("generator", "verifier"):
        out = export.export(tmp_path / "run", role, tmp_path / role)
        assert read_prompting(out).role == role
        for name in ("generator", "verifier"):
            found = prompting_of(str(out), name)
            assert (found.role, found.max_new_tokens) == (name, config[name].max_response)
            assert found.template == TEMPLATES[name, config[name].template]
            assert found.stop_at_first_error == (name == "verifier")
            sampler = open_checkpoint_sampler(name, str(out), CheckpointSamplerSettings())
            assert sampler.stops == (name == "verifier")


@pytest.mark.parametrize("change, warning", [
    (Path.unlink, "generator.template="),
    (lambda path: path.write_text("{problem}!"), "a template file has changed since the run"),
])
def test_a_template_that_is_not_what_it_was_is_left_out_of_the_card(folder, tmp_path, capsys, change, warning):
    config, template = default_config(), tmp_path / "template.txt"
    template.write_text("{problem}?")
    config.generator.checkpoint = config.verifier.checkpoint = str(folder)
    config.generator.template = str(template)
    digest = templates_digest({"generator": "{problem}?", "verifier": TEMPLATES["verifier", config.verifier.template]})
    save_run(tmp_path / "run", config, meta={"source_fingerprint": {"templates": digest}})
    kept = export.export(tmp_path / "run", "generator", tmp_path / "as_it_was")
    assert (kept / "prompt_template.txt").read_text() == "{problem}?" and capsys.readouterr().err == ""
    change(template)
    out = export.export(tmp_path / "run", "generator", tmp_path / "out")
    assert f"warning: the card shows no prompt: {warning}" in capsys.readouterr().err
    assert "## Use" not in (out / "README.md").read_text() and not (out / "prompt_template.txt").exists()
    assert not (out / "prompting.json").exists()
