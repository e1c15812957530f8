"""Small process reward models with random weights, as TRL and Qwen publish them: folders with tokenizers."""

from pathlib import Path

import numpy as np

from support.hf_cases import CASES, Case, make_tensors, write_checkpoint
from support.small_tokenizers import CHAT_TEMPLATE, byte_level, write_folder

MARK = "<extra_0>"
TRL = {"llama2": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
SPREAD = 1.5  # of the head's weights, times a row of width one: probabilities near 0 and near 1


def tensors_of(case: Case, rows: int, hidden: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Of a trunk with `rows` in its embedding, and of the head: linear, or with a hidden layer."""
    rng, width = np.random.default_rng(seed + 1), case.config["hidden_size"]
    tensors = {name: one for name, one in make_tensors(case, seed).items() if not name.startswith("lm_head")}
    tensors["model.embed_tokens.weight"] = rng.normal(size=(rows, width)).astype(np.float32)
    for name, outputs in (("score.0", width), ("score.2", 2)) if hidden else (("score", 2),):
        weight = SPREAD * width**-0.5 * rng.normal(size=(outputs, width))
        tensors[f"{name}.weight"] = weight.astype(np.float32)
        tensors[f"{name}.bias"] = rng.normal(size=outputs).astype(np.float32)
    return tensors


def write_trl_folder(folder: Path, name: str = "qwen2", bos: str | None = None, seed: int = 0, **changes) -> Path:
    """What TRL's PRMTrainer saves of a token classifier; `bos`: the tokenizer's BOS."""
    return _write(folder, name, f"{TRL[name]}ForTokenClassification", False, bos, changes, seed=seed)


def write_qwen_folder(folder: Path, has_mark: bool = True, **changes) -> Path:
    """As Qwen2.5-Math-PRM-7B is published."""
    return _write(folder, "qwen2", "Qwen2ForProcessRewardModel", True, None, changes, has_mark)


def _write(
    folder: Path, name: str, architecture: str, hidden: bool, bos: str | None, changes: dict, has_mark: bool = True,
    seed: int = 0,
) -> Path:
    backend = byte_level("qwen2")
    if has_mark:
        backend.add_special_tokens([MARK])
    settings = {"bos_token": bos, "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    write_folder(folder, backend, settings | {"add_bos_token": False})
    rows = backend.get_vocab_size() + 3
    tensors = tensors_of(CASES[name], rows, hidden, seed)
    about = dict(vocab_size=rows, architectures=[architecture], max_position_embeddings=1024, sliding_window=None)
    return write_checkpoint(folder, CASES[name], tensors=tensors, **about | changes)
