"""Small GGUF files with random weights, for the tests: the plain arrays are PyTorch's, [out, in]."""

import json

import gguf
import numpy as np
from tokenizers import Tokenizer

from support.small_tokenizers import CHAT_TEMPLATE
from tango_jax.models.transformer import ModelConfig
from tango_jax.text.bpe import PieceKind

VOCAB_ROWS = 448  # of the embedding: more than there are tokens, as for Qwen2


def plain_arrays(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by their name in a file, rows of q and k in the order of Hugging Face."""
    rng = np.random.default_rng(seed)
    D, F, V, E = config.width, config.mlp_width, config.vocab_size, config.head_dim
    q, k = config.num_heads * E, config.num_kv_heads * E
    shapes = {"token_embd.weight": (V, D), "output_norm.weight": (D,)}
    if not config.tied_head:
        shapes["output.weight"] = (V, D)
    for layer in range(config.num_layers):
        of_layer = {
            "attn_norm.weight": (D,), "attn_q.weight": (q, D), "attn_k.weight": (k, D), "attn_v.weight": (k, D),
            "attn_output.weight": (D, q), "ffn_norm.weight": (D,), "ffn_gate.weight": (F, D), "ffn_up.weight": (F, D),
            "ffn_down.weight": (D, F),
        }
        if config.qkv_bias:
            of_layer |= {"attn_q.bias": (q,), "attn_k.bias": (k,), "attn_v.bias": (k,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def interleave(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of every head from [0, 1, 2, .. | E/2, ..] to [0, E/2, 1, E/2 + 1, ..]: what llama.cpp's converter does."""
    order = np.arange(head_dim).reshape(2, -1).T.reshape(-1)
    heads = len(w) // head_dim
    return w[(np.arange(heads)[:, None] * head_dim + order[None]).reshape(-1)]


def file_arrays(arch: str, config: ModelConfig, plain: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays as a file has them: llama models with the rows of q and k interleaved."""
    if arch != "llama":
        return dict(plain)
    turned = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")
    return {name: interleave(w, config.head_dim) if name.endswith(turned) else w for name, w in plain.items()}


def model_metadata(arch: str, config: ModelConfig) -> dict:
    """The keys that a llama or qwen2 file has."""
    return {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_position,
        f"{arch}.embedding_length": config.width,
        f"{arch}.feed_forward_length": config.mlp_width,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.rope.freq_base": float(config.rope_base),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
    }


def gpt2_metadata(backend: Tokenizer, split: str) -> dict:
    """As the converter writes a byte-level tokenizer: rows without a token get a name of their own."""
    vocab = {token: piece for piece, token in backend.get_vocab().items()}
    added = backend.get_added_tokens_decoder()
    kinds = [PieceKind.NORMAL if token in vocab else PieceKind.UNUSED for token in range(VOCAB_ROWS)]
    for token, entry in added.items():
        kinds[token] = PieceKind.CONTROL if entry.special else PieceKind.USER_DEFINED
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": [vocab.get(token, f"[PAD{token}]") for token in range(VOCAB_ROWS)],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": backend.token_to_id("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": backend.token_to_id("<|im_end|>"),
        "tokenizer.ggml.eot_token_id": backend.token_to_id("<|endoftext|>"),
        "tokenizer.ggml.padding_token_id": 2**32 - 1,  # "none", as some files have it
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(path, arch: str, metadata: dict, tensors: dict) -> None:
    """`tensors`: name -> float32 array, or (array of bytes, type). A metadata value of None leaves the key out."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path, arch: str, config: ModelConfig, plain: dict[str, np.ndarray]) -> None:
    write_gguf(path, arch, model_metadata(arch, config), file_arrays(arch, config, plain))
