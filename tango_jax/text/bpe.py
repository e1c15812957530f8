"""Byte-pair tokenizers for models without a tokenizer.json: GGUF files and bare SentencePiece models."""

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

METASPACE = "\u2581"  # stands for a space in SentencePiece

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = ("smollm", "gpt-2", "llama-bpe", "qwen2")


class PieceKind(enum.IntEnum):
    """Numbered as in SentencePiece models and GGUF files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Pieces(NamedTuple):
    """One entry per token id."""

    texts: Sequence[str]
    kinds: Sequence[int]


def byte_level_backend(pieces: Pieces, merges: Sequence[str], split: str) -> Tokenizer:
    """Byte-level BPE like GPT-2's; `split`, one of SPLITS, separates words. Raises ValueError: the split is unknown, or
    the merges do not match the pieces."""
    if split not in SPLITS:
        raise ValueError(f"pre-tokenizer {split!r} is not one of {', '.join(SPLITS)}")
    vocab = _vocab(pieces)
    # Llama-3 looks up the whole word before it merges.
    backend = Tokenizer(models.BPE(vocab, _pairs(merges, vocab), ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_byte_level_split(split))
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, pieces)
    return backend


def sentencepiece_backend(pieces: Pieces, scores: Sequence[float], has_prefix: bool) -> Tokenizer:
    """BPE like SentencePiece's: the pair that forms the piece with the highest score is merged first. `has_prefix`: a
    space is added before the text, and decoding removes it."""
    blanks = normalizers.Replace(" ", METASPACE)
    model = models.BPE(
        vocab=_vocab(pieces),
        merges=_merges_of_scores(pieces, scores),
        unk_token=next((text for text, kind in zip(*pieces, strict=True) if kind == PieceKind.UNKNOWN), None),
        fuse_unk=True,
        byte_fallback=PieceKind.BYTE in pieces.kinds,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(METASPACE), blanks]) if has_prefix else blanks
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_tokens(backend, pieces)
    return backend


def read_sentencepiece(path: Path) -> Tokenizer:
    """Load a SentencePiece model file (Llama-2, Mistral); prompts start with BOS. Raises ValueError: its model is not
    BPE or rewrites the text."""
    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # each implementation of protobuf defines DecodeError in a different module
        raise ValueError(f"{path} is not a SentencePiece model ({error}): copy it from its page again") from error
    normalizer, trainer = proto.normalizer_spec, proto.trainer_spec
    if not proto.pieces or trainer.model_type != trainer.BPE:
        raise ValueError(f"{path} is not a SentencePiece model of type BPE: use the model's tokenizer.json instead")
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        raise ValueError(f"{path} rewrites characters or spaces of the text: use the model's tokenizer.json instead")
    pieces = Pieces([piece.piece for piece in proto.pieces], [piece.type for piece in proto.pieces])
    backend = sentencepiece_backend(pieces, [piece.score for piece in proto.pieces], normalizer.add_dummy_prefix)
    if trainer.bos_id >= 0:
        add_bos(backend, pieces.texts[trainer.bos_id])
    return backend


def add_bos(backend: Tokenizer, bos: str) -> None:
    """Prepend `bos` to every sequence encoded with special tokens."""
    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, backend.token_to_id(bos))]
    )


def _byte_level_split(split: str) -> list:
    if split == "gpt-2":
        return [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if split == "smollm":
        return [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    digits = r"\p{N}{1,3}" if split == "llama-bpe" else r"\p{N}"
    words = pre_tokenizers.Split(Regex(f"{_WORDS}|{digits}|{_REST}"), behavior="isolated")
    return [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _vocab(pieces: Pieces) -> dict[str, int]:
    """Unused pieces, which only fill rows of the embedding, are left out."""
    vocab = {}
    for token, (text, kind) in enumerate(zip(*pieces, strict=True)):
        if kind != PieceKind.UNUSED and vocab.setdefault(text, token) != token:
            raise ValueError(f"the vocabulary contains {text!r} twice, as ids {vocab[text]} and {token}")
    return vocab


def _pairs(merges: Sequence[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise ValueError(f"the merge {merge!r} does not join two pieces of the vocabulary into a third one")
        pairs.append((left, right))
    return pairs


def _merges_of_scores(pieces: Pieces, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges by their scores, the highest first."""
    normal = {text: score for text, kind, score in zip(*pieces, scores, strict=True) if kind == PieceKind.NORMAL}
    merges = []
    for text, _ in sorted(normal.items(), key=lambda item: -item[1]):
        halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        merges += [(left, right) for left, right in halves if left in normal and right in normal]
    return merges


def _add_tokens(backend: Tokenizer, pieces: Pieces) -> None:
    """Control and user-defined pieces are matched in the text before anything else."""
    special = {PieceKind.CONTROL: True, PieceKind.UNKNOWN: True, PieceKind.USER_DEFINED: False}
    found = [(text, special[kind]) for text, kind in zip(*pieces, strict=True) if kind in special]
    backend.add_tokens([AddedToken(text, normalized=False, special=is_special) for text, is_special in found])
