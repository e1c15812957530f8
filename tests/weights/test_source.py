"""Any checkpoint by its name: what each kind gives, and one line for what is none."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from support.hf_loading import assert_equal_trees
from support.policies import policies_of
from support.tiny_checkpoints import MODEL, save_run, tiny_params, write_tiny_folder, write_tiny_gguf
from tango_jax.config import default_config
from tango_jax.tasks.last_letter import tokenizer_model
from tango_jax.text.character_tokenizer import write_character_tokenizer
from tango_jax.text.hf_tokenizer import load_hf_tokenizer
from tango_jax.text.tokenizer import load_sentencepiece
from tango_jax.tracking.run_config import save_config
from tango_jax.weights.source import kind_of, open_source
from tango_jax.weights.workdir import open_checkpoint, read_config

TEXT = "Two words: <step>3 + 4</step> \u6570"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_published_checkpoints(kind, folder, gguf, tmp_path):
    name = {"folder": folder, "gguf": gguf}[kind]
    assert kind_of(str(name)) == kind
    source = open_checkpoint(str(name), "verifier", remat="none")
    assert source.model_config == dataclasses.replace(MODEL, remat="none")
    assert_equal_trees(source.load_params(), tiny_params())
    tokenizer = source.tokenizer
    assert tokenizer.vocab_size == MODEL.vocab_size and tokenizer.chat_fn is None
    assert tokenizer.decode(tokenizer.encode_fn(TEXT)) == TEXT
    assert source.architecture == "llama"
    several = list(tokenizer.stop_ids)
    assert source.generation["eos_token_id"] == (several if len(several) > 1 else several[0])
    assert (len(several) > 1) == (kind == "gguf")
    assert ("temperature" in source.generation) == (kind == "folder")
    source.write_tokenizer(tmp_path)
    again = load_hf_tokenizer(tmp_path, MODEL.vocab_size)
    assert again.encode_fn(TEXT) == tokenizer.encode_fn(TEXT)


def test_chat_is_a_choice(folder):
    source = open_source(str(folder), use_chat=True)
    prompt = source.tokenizer.encode_prompt("Hi")
    assert prompt[0] == source.tokenizer.encode_fn("<|endoftext|>")[0]
    assert "user\nHi" in source.tokenizer.decode(prompt)


def test_a_workdir_gives_its_newest_checkpoint(folder, tmp_path):
    config = default_config()
    config.generator.checkpoint = str(folder)
    config.generator.use_chat = True
    config.generator.model.remat = "dots"
    first = save_run(tmp_path, config, stage_one=True)
    source = open_checkpoint(str(tmp_path), "generator", param_dtype="bfloat16")
    assert kind_of(str(tmp_path)) == "workdir"
    assert source.model_config == dataclasses.replace(MODEL, remat="dots", param_dtype="bfloat16")
    assert source.tokenizer.chat_fn is not None
    assert open_checkpoint(str(tmp_path), "generator", use_chat=False).tokenizer.chat_fn is None
    assert_equal_trees(source.load_params(), jax.tree.map(lambda leaf: leaf.astype("bfloat16"), first))
    with pytest.raises(ValueError, match="holds no complete checkpoint of the verifier"):
        open_checkpoint(str(tmp_path), "verifier")
    later = save_run(tmp_path, config, step=2)
    assert_equal_trees(open_checkpoint(str(tmp_path), "generator").load_params(), later)
    with pytest.raises(ValueError, match="a published checkpoint is expected here"):
        open_source(str(tmp_path))


def test_settings_of_a_run_come_back(tmp_path):
    config = default_config()
    config.seed, config.generator.row_buckets, config.task.rl_words = 5, (4, 8), (2, 3)
    save_config(config, tmp_path / "config.json")
    assert read_config(tmp_path) == config
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"rl.gama": 1}))
    with pytest.raises(ValueError, match=r"does not know \(rl\.gama=1\)"):
        read_config(tmp_path)
    for text, message in (("{", "cannot be read"), ("[1]", r"holds \[1\], not the settings of a run")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path)


def test_policies_start_from_their_checkpoints(folder, gguf):
    config = default_config()
    config.generator.checkpoint, config.verifier.checkpoint = str(folder), str(gguf)
    config.verifier.model.unroll = True
    policies = policies_of(config)
    assert policies["generator"].model_config == dataclasses.replace(MODEL, attention="xla")  # what a CPU has
    assert policies["verifier"].model_config == dataclasses.replace(MODEL, unroll=True, attention="xla")
    assert_equal_trees(policies["generator"].load_params(), policies["verifier"].load_params())
    config.verifier.checkpoint = ""
    assert policies_of(config)["verifier"].load_params is None


@pytest.mark.parametrize("kept, message", [
    ((), r"lacks config\.json, tokenizer\.json \(or tokenizer\.model\), model\.safetensors \(or"),
    (("config.json",), r"lacks tokenizer\.json \(or tokenizer\.model\), model\.safetensors \(or"),
    (("config.json", "tokenizer.json"), r"lacks model\.safetensors \(or"),
])
def test_everything_that_a_folder_with_a_pickle_lacks_is_one_error(folder, tmp_path, kept, message):
    (tmp_path / "pytorch_model.bin").touch()
    for name in kept:
        shutil.copy(folder / name, tmp_path / name)
    with pytest.raises(ValueError, match=f"{message}.*: copy what is missing .*, or convert pytorch_model.bin with"):
        open_source(str(tmp_path))


def test_a_plan_needs_no_weights(folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / name)
    assert open_source(str(tmp_path), reads_weights=False).model_config == MODEL
    with pytest.raises(ValueError, match="lacks model.safetensors"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("name, message", [
    ("none.gguf", "none.gguf does not exist"),
    ("a b/c", "'a b/c' is neither a .gguf file nor a folder nor a hub id"),
])
def test_what_is_no_checkpoint_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        kind_of(name)


@pytest.mark.parametrize("name, message", [
    ("runs/nothing", r"checkpoint runs/nothing: there is no such folder \(runs beside it: runs/mine\); give a run's "
     r"workdir, a Hugging Face folder or a \.gguf file; a model of the hub is runs/nothing@COMMIT$"),
    ("./nothing", r"no such folder; give .* \.gguf file$"),
    ("elsewhere/runs/nothing", r"no such folder; give .* \.gguf file$"),
    ("many/run_9", r"\(runs beside it: many/run_0, many/run_1, many/run_2, many/run_3, many/run_4 and 2 more\)"),
    ("{folder}/runs/nothing", r"no such folder \(runs beside it: {folder}/runs/mine\)"),
])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, name, message):
    for run in ("runs/mine", *(f"many/run_{number}" for number in range(7))):
        (tmp_path / run).mkdir(parents=True)
        save_config(default_config(), tmp_path / run / "config.json")
    (tmp_path / "runs" / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message.format(folder=tmp_path)):
        kind_of(name.format(folder=tmp_path))


def test_other_names_are_hub_ids(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("owner/name", "name", "owner/name@refs/pr/1", "runs/nothing@main"):
        assert kind_of(name) == "hub"


def test_the_tokenizer_of_models_from_scratch_in_hugging_faces_format(tmp_path):
    model = tokenizer_model(default_config().task)
    own = load_sentencepiece(model)
    write_character_tokenizer(model, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(own.stop_ids)}))
    written = load_hf_tokenizer(tmp_path, own.vocab_size)
    rng, pieces = np.random.default_rng(0), ["<step>", "#1", "#8", " ends in ", " ", "\n", "abc", "CORRECT", "7}"]
    for _ in range(50):
        text = "".join(rng.choice(pieces, 8))
        assert written.encode_prompt(text) == own.encode_prompt(text), text
        assert written.decode(written.encode_fn(text)) == own.decode(own.encode_fn(text))
    assert written.stop_ids == own.stop_ids
