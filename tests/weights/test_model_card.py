"""The card of an exported model: its front matter, which the hub reads, and what it says."""

import pytest
from huggingface_hub import metadata_load

from support.hf_cases import CASES, write_checkpoint
from support.hf_loading import load
from tango_jax.weights.model_card import Training, licence_of, model_card
from tango_jax.weights.prompting import Prompting
from tango_jax.weights.to_hf import export_hf

TRAINING = Training("Qwen/Qwen2.5-7B", {"license": "other", "license_name": "qwen-research"},
                    "hub:openai/gsm8k:main/train", ("openai/gsm8k",), "python -m tango_jax.train --config=a.py")
PROMPTING = Prompting("verifier", "Problem: {problem}\n```\n", True, max_prompt=8, max_new_tokens=9, min_steps=1)


def test_model_card(tmp_path):
    card = model_card("Verifier", {"step_f1": 0.5, "said": "c|d"}, PROMPTING, TRAINING)
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "| step_f1 | 0.5 |" in card and "c\\|d" in card
    assert "````text\nProblem: {problem}\n```\n\n````" in card and "max_new_tokens=9" in card
    assert "- Base: [Qwen/Qwen2.5-7B](https://huggingface.co/Qwen/Qwen2.5-7B), licence: qwen-research\n" in card
    assert "- Problems: hub:openai/gsm8k:main/train\n" in card
    assert "```text\npython -m tango_jax.train --config=a.py\n```" in card
    assert "## " not in model_card("Verifier", {}, None)
    config, params = load(write_checkpoint(tmp_path / "in", CASES["llama2"]))
    assert (export_hf(tmp_path / "out", config, params, card=card) / "README.md").read_text() == card
    assert metadata_load(tmp_path / "out" / "README.md") == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "base_model": "Qwen/Qwen2.5-7B",
        "license": "other", "license_name": "qwen-research", "datasets": ["openai/gsm8k"],
        "tags": ["tango_jax", "reinforcement-learning"]}
    assert licence_of(tmp_path / "out") == TRAINING.licence  # what a run from the export passes on


def test_the_card_of_adapters_is_for_peft():
    card = model_card("Generator", {}, PROMPTING, TRAINING, is_adapter=True)
    assert card.startswith("---\nlibrary_name: peft\n") and "AutoPeftModelForCausalLM" in card
    assert "Problem: {problem}" in card and "- Base: [Qwen/Qwen2.5-7B]" in card


@pytest.mark.parametrize("licence, said", [({"license": "mit"}, "mit"), ({}, "not stated")])
def test_the_card_of_adapters_names_the_folder_with_their_base(licence, said):
    card = model_card("Generator", {}, PROMPTING, Training(licence=licence), is_adapter=True, base_folder="base")
    assert f"- Base: `base`, licence: {said}\n" in card and "AutoPeftModelForCausalLM" not in card
    assert 'AutoModelForCausalLM.from_pretrained("base")' in card and 'PeftModel.from_pretrained(model, ".")' in card


@pytest.mark.parametrize("card, licence", [
    ("---\nlicense: apache-2.0\n---\n", {"license": "apache-2.0"}),
    ("---\r\ntags:\r\n- a\r\nlicense: mit \r\n---\r\n", {"license": "mit"}),
    ("---\nlicense: other\nlicense_name: own\nlicense_link: https://a.b/c\n---\n",
     {"license": "other", "license_name": "own", "license_link": "https://a.b/c"}),
    ("---\nlicense: other\nlicense_link: LICENSE\n---\n", {"license": "other"}),  # a file of the other folder
    ("---\nlicense:\n---\nlicense: mit\n", {}), ("license: mit\n", {}), ("", {}), (None, {}),
])
def test_the_licence_of_a_folder(tmp_path, card, licence):
    if card is not None:
        (tmp_path / "README.md").write_bytes(card.encode())
    assert licence_of(tmp_path) == licence
