"""The tokenizer inside a GGUF file: loaded, or written in Hugging Face format."""

from pathlib import Path

import tokenizers

from tango_jax.text.bpe import PieceKind, Pieces, add_bos, byte_level_backend, sentencepiece_backend
from tango_jax.text.hf_tokenizer import make_chat, make_tokenizer
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights.gguf_file import GgufFile, open_gguf

# Pre-tokenizer in files -> here.
_SPLITS = {"smollm": "smollm", "gpt-2": "gpt-2", "llama-bpe": "llama-bpe", "llama3": "llama-bpe", "qwen2": "qwen2"}


def gguf_tokenizer(path: str | Path | GgufFile, use_chat: bool = False) -> Tokenizer:
    """The file's tokenizer, with an id per row of the embedding. ValueError: unknown kind, or no chat template."""
    file = open_gguf(path)
    backend = _backend(file)
    chat = None
    if use_chat:
        chat = make_chat(backend, file.get("tokenizer.chat_template"), _special_tokens(file), str(file.path))
    embedding = file.tensors.get("token_embd.weight")
    # End of sequence, of a turn, of a message.
    stop_ids = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return make_tokenizer(
        backend,
        len(file.require("tokenizer.ggml.tokens")) if embedding is None else int(embedding.shape[1]),
        bos_ids=(file.get("tokenizer.ggml.bos_token_id"),) if _adds_bos(file) else (),
        stop_ids=[token for token in stop_ids if token is not None],
        chat=chat,
        source=str(file.path),
    )


def write_hf_tokenizer(path: str | Path | GgufFile, folder: str | Path) -> None:
    """Write tokenizer and chat template in Hugging Face format. Further stop ids: generation_config.json."""
    from transformers import PreTrainedTokenizerFast  # takes a second to import, and only exports need it

    file = open_gguf(path)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_backend(file),
        chat_template=file.get("tokenizer.chat_template"),
        add_bos_token=_adds_bos(file),
        clean_up_tokenization_spaces=False,
        **_special_tokens(file),
    )
    fast.save_pretrained(folder)


def _backend(file: GgufFile) -> tokenizers.Tokenizer:
    kind, split = file.require("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    texts = file.require("tokenizer.ggml.tokens")
    pieces = Pieces(texts, file.get("tokenizer.ggml.token_type", [int(PieceKind.NORMAL)] * len(texts)))
    try:
        if kind == "gpt2" and split in _SPLITS:
            backend = byte_level_backend(pieces, file.require("tokenizer.ggml.merges"), _SPLITS[split])
        elif kind == "llama":
            has_prefix = file.get("tokenizer.ggml.add_space_prefix", True)
            backend = sentencepiece_backend(pieces, file.require("tokenizer.ggml.scores"), has_prefix)
        else:
            name = f"gpt2 with pre-tokenizer {split!r}" if kind == "gpt2" else repr(kind)
            raise ValueError(f"kind {name} is not supported, only llama, and gpt2 with {', '.join(_SPLITS)}")
    except ValueError as error:
        raise ValueError(
            f"the tokenizer in {file.path}: {error}; use the tokenizer of the model's Hugging Face folder"
        ) from error
    if _adds_bos(file):
        add_bos(backend, _special_tokens(file)["bos_token"])
    return backend


def _adds_bos(file: GgufFile) -> bool:
    """llama.cpp's default where the file does not say."""
    kind, split = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    is_default = kind == "llama" or _SPLITS.get(split) == "llama-bpe"
    return file.get("tokenizer.ggml.add_bos_token", is_default) and "bos_token" in _special_tokens(file)


def _special_tokens(file: GgufFile) -> dict[str, str]:
    """By transformers' names. Missing ones have invalid ids in some files."""
    texts = file.require("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id", len(texts)) for name, key in names.items()}
    return {name: texts[token] for name, token in ids.items() if token < len(texts)}
