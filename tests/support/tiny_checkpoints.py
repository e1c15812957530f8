"""One tiny random model with a byte-level tokenizer, as a Hugging Face folder and as a GGUF file of equal weights."""

import errno
import os
from pathlib import Path

import jax
import numpy as np

from support.gguf_files import VOCAB_ROWS, file_arrays, gpt2_metadata, model_metadata, write_gguf
from support.small_tokenizers import CHAT_TEMPLATE, byte_level, write_folder
from tango_jax.models.transformer import ModelConfig, init_params
from tango_jax.runtime.checkpoint import Checkpointer
from tango_jax.tracking.run_config import save_config
from tango_jax.weights.hf_layout import LAYOUTS, path_name, stored_tensors, to_stored
from tango_jax.weights.to_hf import export_hf

MODEL = ModelConfig(
    vocab_size=VOCAB_ROWS, width=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, mlp_width=48,
    norm_eps=1e-5, rope_base=100_000.0, max_position=4096,
)
GGUF_NAMES = {
    "embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm", "q_proj": "attn_q",
    "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}


def tiny_params(model: ModelConfig = MODEL) -> dict:
    return init_params(model, jax.random.key(7))


def write_tiny_folder(folder: Path, model: ModelConfig = MODEL, architecture: str = "llama") -> Path:
    """A model in small, by default a SmolLM2, with tokenizer, chat template and generation config."""
    backend = byte_level("smollm")
    source = folder.with_name(f"{folder.name}_tokenizer")
    stop = backend.token_to_id("<|im_end|>")
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    write_folder(source, backend, settings | {"add_bos_token": False}, {"eos_token_id": stop, "temperature": 0.5})
    return export_hf(folder, model, tiny_params(model), architecture, tokenizer_folder=source)


def write_tiny_gguf(path: Path) -> Path:
    """The same model and tokenizer."""
    leaves = {path_name(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tiny_params())[0]}
    plain = {}
    for name, (leaf, layer, _) in stored_tensors(MODEL).items():
        value = np.asarray(leaves[leaf] if layer is None else leaves[leaf][layer])
        key = next(short for long, short in GGUF_NAMES.items() if f"{long}." in name)
        plain[(f"blk.{layer}." if layer is not None else "") + f"{key}.weight"] = to_stored(LAYOUTS[leaf], value)
    metadata = model_metadata("llama", MODEL) | gpt2_metadata(byte_level("smollm"), "smollm")
    write_gguf(path, "llama", metadata, file_arrays("llama", MODEL, plain))
    return path


def save_run(workdir, config, stage_one=False, step=1, meta=None, updates=(1, 1)):
    """A workdir as a run leaves it, with the tiny model's parameters times the step. `updates`: of each role."""
    workdir.mkdir(parents=True, exist_ok=True)
    save_config(config, workdir / "config.json")
    params = jax.tree.map(lambda leaf: leaf * step, tiny_params())
    states = {role: {"params": params, "step": np.array(count, np.int32)}
              for role, count in zip(("generator", "verifier"), updates, strict=True)}
    state = {"params": params} if stage_one else states
    directory = workdir / "sft" / "generator" if stage_one else workdir
    save_step(directory / "checkpoints", step, state, meta or {})
    return params


def full_disk(*args):
    """In place of `runtime.sealed.seal` or `commit`."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_step(directory, step, state, meta):
    """Written when this returns."""
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(step, state, meta)
