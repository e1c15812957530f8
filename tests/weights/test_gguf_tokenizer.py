"""Tokenizers inside GGUF files: against those they were written from, and again after export to a folder."""

import unicodedata

import numpy as np
import pytest
import sentencepiece
from transformers import PreTrainedTokenizerFast

from support.gguf_files import VOCAB_ROWS, gpt2_metadata, write_gguf
from support.small_tokenizers import byte_level, random_text, sentencepiece_model
from tango_jax.text.bpe import PieceKind
from tango_jax.text.hf_tokenizer import load_hf_tokenizer
from tango_jax.weights.gguf_tokenizer import gguf_tokenizer, write_hf_tokenizer

SPLITS = {"smollm": "smollm", "llama-bpe": "llama3", "qwen2": "qwen2"}


def llama_metadata(model: bytes) -> dict:
    """As the converter writes a SentencePiece model."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def kind(token: int) -> PieceKind:
        tests = {
            PieceKind.UNKNOWN: processor.is_unknown, PieceKind.CONTROL: processor.is_control,
            PieceKind.UNUSED: processor.is_unused, PieceKind.BYTE: processor.is_byte,
        }
        return next((found for found, test_fn in tests.items() if test_fn(token)), PieceKind.NORMAL)

    tokens = range(processor.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [processor.id_to_piece(token) for token in tokens],
        "tokenizer.ggml.token_type": [int(kind(token)) for token in tokens],
        "tokenizer.ggml.scores": [float(processor.get_score(token)) for token in tokens],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
    }


def write_tokenizer(path, metadata: dict, rows: int = VOCAB_ROWS) -> None:
    write_gguf(path, "llama", metadata, {"token_embd.weight": np.zeros((rows, 4), np.float32)})


def assert_same_tokenizer(folder, tokenizer) -> None:
    """The exported folder gives the same ids, bytes and BOS, here and in transformers."""
    loaded, reference = load_hf_tokenizer(folder, VOCAB_ROWS), PreTrainedTokenizerFast.from_pretrained(folder)
    assert loaded.token_bytes == tokenizer.token_bytes
    assert (loaded.bos_ids, loaded.stop_ids[0]) == (tokenizer.bos_ids, tokenizer.stop_ids[0])
    rng = np.random.default_rng(1)
    for _ in range(50):
        text = random_text(rng)
        ids = tokenizer.encode_prompt(text)
        assert loaded.encode_prompt(text) == ids == reference(text).input_ids
        assert loaded.decode(ids) == tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("split", SPLITS)
def test_byte_level_tokenizers(tmp_path, split):
    backend = byte_level(SPLITS[split])
    write_tokenizer(tmp_path / "m.gguf", gpt2_metadata(backend, split))
    tokenizer = gguf_tokenizer(tmp_path / "m.gguf")
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = random_text(rng)
        ids = tokenizer.encode_fn(text)
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == (unicodedata.normalize("NFC", text) if split == "qwen2" else text)
    assert tokenizer.stop_ids == (backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>"))
    assert tokenizer.bos_ids == ((backend.token_to_id("<|endoftext|>"),) if split == "llama-bpe" else ())
    assert tokenizer.vocab_size == VOCAB_ROWS and tokenizer.token_bytes[VOCAB_ROWS - 1] == b""
    ids = tokenizer.encode_fn("a<|im_end|><tool_call>[PAD447]")
    assert ids == backend.encode("a<|im_end|><tool_call>[PAD447]", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "a<tool_call>[PAD447]"
    write_hf_tokenizer(tmp_path / "m.gguf", tmp_path / "folder")
    assert_same_tokenizer(tmp_path / "folder", tokenizer)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_tokenizers(tmp_path, has_prefix):
    model = sentencepiece_model(add_dummy_prefix=has_prefix)
    metadata = llama_metadata(model)
    if not has_prefix:
        metadata |= {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    write_tokenizer(tmp_path / "m.gguf", metadata)
    tokenizer = gguf_tokenizer(tmp_path / "m.gguf")
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = random_text(rng)
        ids = tokenizer.encode_fn(text)
        assert ids == processor.encode(text), text
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")  # its letter for a blank
    assert (tokenizer.bos_ids, tokenizer.stop_ids) == ((1,) if has_prefix else (), (2,))
    write_hf_tokenizer(tmp_path / "m.gguf", tmp_path / "folder")
    assert_same_tokenizer(tmp_path / "folder", tokenizer)


def test_chat_template_of_a_file(tmp_path):
    write_tokenizer(tmp_path / "m.gguf", gpt2_metadata(byte_level("llama3"), "llama-bpe"))
    tokenizer = gguf_tokenizer(tmp_path / "m.gguf", use_chat=True)
    write_hf_tokenizer(tmp_path / "m.gguf", tmp_path / "folder")
    of_folder = load_hf_tokenizer(tmp_path / "folder", VOCAB_ROWS, use_chat=True)
    text = "<|endoftext|><|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_fn("What is 2 + 2?") == of_folder.chat_fn("What is 2 + 2?") == text
    ids = tokenizer.encode_prompt("What is 2 + 2?")
    assert ids == of_folder.encode_prompt("What is 2 + 2?")
    assert ids.count(tokenizer.bos_ids[0]) == 1


@pytest.mark.parametrize("change, rows, words", [
    ({"pre": "tekken"}, VOCAB_ROWS, ["'tekken'", "smollm"]),
    ({"model": "bert"}, VOCAB_ROWS, ["'bert'", "llama"]),
    ({"merges": None}, VOCAB_ROWS, ["tokenizer.ggml.merges"]),
    ({"tokens": None}, VOCAB_ROWS, ["tokenizer.ggml.tokens"]),
    ({"merges": ["th"]}, VOCAB_ROWS, ["'th'"]),
    ({"merges": ["q q"]}, VOCAB_ROWS, ["'q q'"]),
    ({"token_type": [1] * VOCAB_ROWS, "tokens": ["a"] * VOCAB_ROWS}, VOCAB_ROWS, ["'a' twice", "0 and 1"]),
    ({"eos_token_id": None, "eot_token_id": None}, VOCAB_ROWS, ["needs a stop id"]),
    ({"eos_token_id": 999}, VOCAB_ROWS, ["999", f"below {VOCAB_ROWS}"]),
    ({}, 300, ["391 tokens", "300 rows"]),
])
def test_files_that_cannot_be_used(tmp_path, change, rows, words):
    metadata = gpt2_metadata(byte_level("smollm"), "smollm")
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    write_tokenizer(tmp_path / "m.gguf", metadata, rows)
    with pytest.raises(ValueError) as error:
        gguf_tokenizer(tmp_path / "m.gguf")
    assert all(word in str(error.value) for word in ["m.gguf", *words]), error.value


def test_a_file_without_a_template(tmp_path):
    metadata = gpt2_metadata(byte_level("smollm"), "smollm") | {"tokenizer.chat_template": None}
    write_tokenizer(tmp_path / "m.gguf", metadata)
    with pytest.raises(ValueError, match="m.gguf has no chat template"):
        gguf_tokenizer(tmp_path / "m.gguf", use_chat=True)
