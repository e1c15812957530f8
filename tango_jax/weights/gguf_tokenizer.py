"""The tokenizer inside a GGUF file: loaded for the loop, or written in Hugging Face format beside an exported model."""

from pathlib import Path

import tokenizers

from tango_jax.text.bpe import PieceKind, Pieces, add_bos, byte_level_backend, sentencepiece_backend
from tango_jax.text.hf_tokenizer import make_chat, make_tokenizer
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights.gguf_file import GgufFile, open_gguf

# Names of the pre-tokenizer in files -> ours.
_SPLITS = {"smollm": "smollm", "gpt-2": "gpt-2", "llama-bpe": "llama-bpe", "llama3": "llama-bpe", "qwen2": "qwen2"}


def gguf_tokenizer(path: str | Path | GgufFile, use_chat: bool = False) -> Tokenizer:
    """Load the tokenizer of a GGUF file, with as many ids as the model's embedding has rows.

    Raises:
        ValueError: not a GGUF file, an unsupported kind of tokenizer, or no chat template although `use_chat` is set.
    """
    file = open_gguf(path)
    backend = _backend(file)
    chat = None
    if use_chat:
        chat = make_chat(backend, file.get("tokenizer.chat_template"), _special_tokens(file), str(file.path))
    embedding = file.tensors.get("token_embd.weight")
    # Several tokens can end a text: end of sequence, end of a turn, end of a message.
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
    """Write tokenizer.json, tokenizer_config.json and the chat template of a GGUF file into a folder. Stop ids beyond
    the first belong in the model's generation_config.json. Raises ValueError, see `gguf_tokenizer`.
    """
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
    """Return whether prompts start with BOS; if the file does not specify it, use llama.cpp's default."""
    kind, split = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    is_default = kind == "llama" or _SPLITS.get(split) == "llama-bpe"
    return file.get("tokenizer.ggml.add_bos_token", is_default) and "bos_token" in _special_tokens(file)


def _special_tokens(file: GgufFile) -> dict[str, str]:
    """Return special tokens under transformers' names, without missing ones, for which some files have invalid ids."""
    texts = file.require("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id", len(texts)) for name, key in names.items()}
    return {name: texts[token] for name, token in ids.items() if token < len(texts)}
