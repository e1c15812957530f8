"""Import of process reward models: probabilities of steps against those of transformers, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.hf_loading import TOLERANCE
from support.reward_models import MARK, TRL, write_qwen_folder, write_trl_folder
from support.tiny_checkpoints import write_tiny_folder
from tango_jax.evaluation.judging import score_solutions
from tango_jax.records import Problem
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings, open_checkpoint_sampler
from tango_jax.sampling.given_text import make_text_reader
from tango_jax.text.prompts import solution_of
from tango_jax.text.templates import step_row
from tango_jax.weights.from_hf import model_config_from_json
from tango_jax.weights.presets import preset_model
from tango_jax.weights.source import open_source, score_head_of
from tango_jax.weights.workdir import open_checkpoint

SETTINGS = CheckpointSamplerSettings(rows=4, max_prompt=512)
QUESTION = "What is 3 + 4, if $x^2 = 12$?"
STEPS = ["The sum of 3 and 4 is 7.", "We know that 7 is odd.\nSo it is prime, too.", "  The answer is \\boxed{7}"]
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


PUBLISHED = {  # of Qwen2.5-Math-PRM-7B
    "architectures": ["Qwen2ForProcessRewardModel"], "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig",
        "AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel",
    }, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 4096, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.37.0", "use_cache": True, "use_mrope": False,
    "use_sliding_window": False, "vocab_size": 152064,
}


def opened(folder):
    return open_checkpoint_sampler("verifier", str(folder), SETTINGS).with_weights()


def solution(steps=STEPS, question=QUESTION):
    text = "".join(f"<step>{step}</step>" for step in steps)
    return solution_of(Problem("p", question, ""), f"<think>{text}</think>", len(steps))


def torch_classifier(folder):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model, info = transformers.AutoModelForTokenClassification.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def torch_qwen_scores(folder, ids):
    """Class logits of the published model: Qwen2's trunk, and two layers with a ReLU between them."""
    torch = pytest.importorskip("torch")
    from safetensors import torch as stored
    from transformers import Qwen2Config, Qwen2Model

    tensors = stored.load_file(folder / "model.safetensors")
    about = json.loads((folder / "config.json").read_text())
    trunk = Qwen2Model(Qwen2Config(**about, attn_implementation="eager"))
    trunk.load_state_dict({name.removeprefix("model."): one for name, one in tensors.items()
                           if name.startswith("model.")})
    width = tensors["score.0.weight"].shape[0]
    head = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
    head.load_state_dict({name.removeprefix("score."): one for name, one in tensors.items() if "score" in name})
    with torch.no_grad():
        return head(trunk.eval()(torch.tensor([ids])).last_hidden_state)[0].numpy()


def softmax_at(logits, ends):
    exp = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (exp / exp.sum(axis=-1, keepdims=True))[ends, 1]


def trl_ids(tokenizer, question, steps, separator="\n"):
    """TRL's PRMTrainer: pieces are tokenized one by one, and the last token of each separator has the label."""
    encoded = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in (question, *steps)]
    after = tokenizer.encode(separator, add_special_tokens=False)
    ids, ends = [tokenizer.bos_token_id] * (tokenizer.bos_token_id is not None) + encoded[0], []
    for one in encoded[1:]:
        ids = ids + one + after
        ends.append(len(ids) - 1)
    return ids, ends


@pytest.mark.parametrize("name, bos", [*((name, None) for name in TRL), ("qwen2", "<|endoftext|>")])
def test_a_token_classifier_judges_as_in_trl(name, bos, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer

    folder = write_trl_folder(tmp_path / "model", name, bos)
    ids, ends = trl_ids(AutoTokenizer.from_pretrained(folder), QUESTION, STEPS)
    with torch.no_grad():
        logits = torch_classifier(folder)(torch.tensor([ids])).logits[0].numpy()
    sampler = opened(folder)
    row = step_row(sampler.template, sampler.tokenizer, solution().problem, solution().text, 512)
    assert (row.tokens, row.ends) == (ids, ends)
    reader = make_text_reader(sampler.source.model_config, sampler.sampler)
    [ours] = reader.logits(sampler.weights, [ids], (0, 1))
    assert np.abs(ours - logits).max() < TOLERANCE
    [judged] = score_solutions(sampler, [solution()])
    np.testing.assert_allclose(judged.p_steps, softmax_at(logits, ends), atol=1e-5)
    assert np.ptp(judged.p_steps) > 0.01
    assert judged.judgements == tuple(p >= 0.5 for p in judged.p_steps) and judged.is_aligned
    assert judged.verdict == ("CORRECT" if all(judged.judgements) else "INCORRECT")


def test_qwens_model_judges_as_on_its_page(tmp_path):
    from transformers import AutoTokenizer

    folder, steps = write_qwen_folder(tmp_path / "model"), [step.strip() for step in STEPS]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION},
         {"role": "assistant", "content": MARK.join(steps) + MARK}], tokenize=False, add_generation_prompt=False)
    ids = tokenizer(text.removeprefix("None"), add_special_tokens=False)["input_ids"]
    [mark] = tokenizer.encode(MARK, add_special_tokens=False)
    ends = np.flatnonzero(np.array(ids) == mark)
    sampler = opened(folder)
    row = step_row(sampler.template, sampler.tokenizer, solution().problem, solution(steps).text, 512)
    # The chat template closes the turn after the last mark, where nothing is read.
    assert row.tokens == ids[: ends[-1] + 1] and row.ends == ends.tolist() and len(ends) == len(steps)
    logits = torch_qwen_scores(folder, ids)
    reader = make_text_reader(sampler.source.model_config, sampler.sampler)
    [ours] = reader.logits(sampler.weights, [ids], (0, 1))
    assert np.abs(ours - logits).max() < TOLERANCE
    [judged] = score_solutions(sampler, [solution(steps)])
    np.testing.assert_allclose(judged.p_steps, softmax_at(logits, ends), atol=1e-5)
    assert np.ptp(judged.p_steps) > 0.01


def test_sizes_and_parameters_are_those_of_the_trunk_and_the_head(tmp_path):
    linear = open_source(str(write_trl_folder(tmp_path / "linear")), takes_scores=True)
    hidden = open_source(str(write_qwen_folder(tmp_path / "hidden")), takes_scores=True)
    assert (linear.model_config.score_head, hidden.model_config.score_head) == ("linear", "mlp")
    assert linear.model_config.tied_head == hidden.model_config.tied_head is False
    shapes = {name: leaf.shape for name, leaf in hidden.load_params().items() if "score" in name or name == "head"}
    assert shapes == {"score": (32, 2), "score_bias": (2,), "score_hidden": (32, 32), "score_hidden_bias": (32,)}
    assert "head" not in linear.load_params() and linear.load_params()["score"].shape == (32, 2)


def test_a_leftover_language_head_is_not_read(tmp_path):
    folder = write_qwen_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    assert "head" not in open_source(str(folder), takes_scores=True).load_params()


@pytest.mark.parametrize("dtype, atol", [("float32", 1e-6), ("bfloat16", 0.1)])
def test_one_device_and_bfloat16_judge_alike(dtype, atol, tmp_path):
    folder, found = str(write_qwen_folder(tmp_path / "model")), []
    for settings in (SETTINGS, dataclasses.replace(SETTINGS, dtype=dtype, rows=1)):
        sampler = open_checkpoint_sampler("verifier", folder, settings).with_weights()
        found.append(score_solutions(sampler, [solution()])[0].p_steps)
    np.testing.assert_allclose(*found, atol=atol)


def without(folder, *names):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name not in names}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("make, message", [
    (lambda path: write_trl_folder(path, num_labels=3), "has 2 labels, incorrect .* this one .Qwen2.* has 3: choose"),
    (lambda path: write_trl_folder(path, id2label={"0": "a"}), r"\(Qwen2ForTokenClassification\) has 1: choose"),
    (lambda path: write_qwen_folder(path, architectures=["Qwen2ForRewardModel"]),
     "architectures=Qwen2ForRewardModel is not supported: .* a process reward model .Qwen2ForTokenClassification or"),
    (lambda path: write_trl_folder(path, "llama2", architectures=["Qwen2ForProcessRewardModel"]),
     "architectures=Qwen2ForProcessRewardModel is not supported: for model_type=llama"),
    (lambda path: without(write_trl_folder(path), "score.weight", "score.bias"),
     "tensors 2 missing: score.bias, score.weight. Check the folder"),
    (lambda path: without(write_qwen_folder(path), "score.2.weight"), "1 missing: score.2.weight"),
    (lambda path: write_qwen_folder(path, has_mark=False), "the template qwen_prm judges each step at <extra_0>, w"),
])
def test_what_is_refused(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        opened(make(tmp_path / "model"))


def test_what_writes_is_no_reward_model(tmp_path):
    folder = str(write_trl_folder(tmp_path / "prm"))
    for open_fn in (open_source, lambda name: open_checkpoint_sampler("generator", name, SETTINGS),
                    lambda name: open_checkpoint(name, "generator")):
        with pytest.raises(ValueError, match=f"^{folder} is a process reward model, which judges steps and writes no"):
            open_fn(folder)
    for settings, message in ((dict(template="math"), "the template math is for a model that writes, .* to trl_prm"),
                              (dict(use_chat=True), "the template trl_prm of a process reward model has all turns"),
                              (dict(template="{problem} {step}"), r"ends in \{step\}: put the text after it")):
        with pytest.raises(ValueError, match=message):
            open_checkpoint_sampler("verifier", folder, dataclasses.replace(SETTINGS, **settings))
    writer = str(write_tiny_folder(tmp_path / "writer"))
    with pytest.raises(ValueError, match=r"the template trl_prm has \{step\}, .* this checkpoint is a language model"):
        open_checkpoint_sampler("verifier", writer, dataclasses.replace(SETTINGS, template="trl_prm"))


def test_own_templates_say_where_steps_are_judged(tmp_path):
    folder = write_trl_folder(tmp_path / "prm")
    settings = dataclasses.replace(SETTINGS, template="Q: {problem}\nA: {step} ->")
    sampler = open_checkpoint_sampler("verifier", str(folder), settings)
    row = step_row(sampler.template, sampler.tokenizer, solution().problem, solution().text, 512)
    read = [sampler.tokenizer.decode(row.tokens[: end + 1]) for end in row.ends]
    assert read[0] == f"Q: {QUESTION}\nA: {STEPS[0]} ->" and read[1] == f"{read[0]}{STEPS[1]} ->"
    assert read[-1] == sampler.tokenizer.decode(row.tokens)


def test_heads_are_known_before_anything_is_loaded(tmp_path):
    assert score_head_of(str(write_trl_folder(tmp_path / "linear"))) == "linear"
    assert score_head_of(str(write_qwen_folder(tmp_path / "hidden"))) == "mlp"
    assert score_head_of("Qwen/Qwen2.5-Math-PRM-7B@main") == score_head_of("Qwen/Qwen2.5-Math-PRM-72B") == "mlp"
    for name in (str(write_tiny_folder(tmp_path / "writer")), "Qwen/Qwen2.5-Math-7B", str(tmp_path / "none"), ""):
        assert score_head_of(name) == ""
    assert preset_model("Qwen/Qwen2.5-Math-PRM-7B") == model_config_from_json(PUBLISHED, "config.json")
    assert preset_model("Qwen/Qwen2.5-Math-PRM-72B").num_layers == 80
