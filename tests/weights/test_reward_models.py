"""Import of process reward models: probabilities of steps against those of transformers, and what is refused."""

import json

import numpy as np
import pytest

from support.hf_loading import TOLERANCE
from support.reward_models import MARK, TRL, write_qwen_folder, write_trl_folder
from tango_jax.evaluation.judging import score_solutions
from tango_jax.records import Problem
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings, open_checkpoint_sampler
from tango_jax.sampling.given_text import make_text_reader
from tango_jax.text.prompts import solution_of
from tango_jax.text.templates import step_row

SETTINGS = CheckpointSamplerSettings(rows=4, max_prompt=512)
QUESTION = "What is 3 + 4, if $x^2 = 12$?"
STEPS = ["The sum of 3 and 4 is 7.", "We know that 7 is odd.\nSo it is prime, too.", "  The answer is \\boxed{7}"]
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


def opened(folder, **settings):
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
    from safetensors.torch import load_file
    from transformers import Qwen2Config, Qwen2Model

    tensors = load_file(folder / "model.safetensors")
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
