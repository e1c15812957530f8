"""Tokenizers for models trained from scratch: single characters, and symbols for longer texts."""

import io
import re
import string
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tango_jax.text.bpe import METASPACE

_TAGS = ("think", "step", "answer", "step_verification", "final_verification")
# What both roles write in every task (the text contract of arXiv 2505.15034).
CONTRACT_SYMBOLS = (
    *(mark for tag in _TAGS for mark in (f"<{tag}>", f"</{tag}>")), "\\boxed{", "INCORRECT", "CORRECT",
)


def train_sentencepiece(alphabet: str, symbols: Sequence[str]) -> bytes:
    """One piece per letter and per symbol. Symbols may contain spaces; they are matched first, the longest before
    others."""
    assert not alphabet.endswith("\n"), "SentencePiece drops a line break at the end of a text"
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([alphabet] * 2),
        model_writer=model,
        model_type="char",
        character_coverage=1.0,
        vocab_size=len(set(alphabet) | {" "}) + len(symbols) + 3,
        hard_vocab_limit=False,
        user_defined_symbols=[symbol.replace(" ", "\u2581") for symbol in symbols],
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=-1,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
    )
    return model.getvalue()


def printable_model() -> bytes:
    return train_sentencepiece("\n" + string.printable[:95], CONTRACT_SYMBOLS)


def write_character_tokenizer(model: bytes, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with a regular expression that takes the longest symbol, or else
    a letter."""
    from transformers import PreTrainedTokenizerFast  # takes a second to import, and only exports need it

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(token) for token in range(processor.vocab_size())]
    unk, bos, eos = (pieces[token] for token in (processor.unk_id(), processor.bos_id(), processor.eos_id()))
    texts = [piece for piece in pieces if piece not in (unk, bos, eos)]
    longest_first = "|".join(re.escape(piece) for piece in sorted(texts, key=len, reverse=True))
    backend = tokenizers.Tokenizer(models.WordLevel({piece: token for token, piece in enumerate(pieces)}, unk))
    backend.normalizer = normalizers.Replace(" ", METASPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(f"{longest_first}|[\\s\\S]"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(METASPACE, " "), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, processor.bos_id())]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=unk, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)
