"""Text to token ids and back, with the character span of every token.

Spans come from the sampled ids. A character split across two tokens ends in the second one.
"""

import bisect
import codecs
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import sentencepiece

PAD_ID = 0  # only fills arrays; masks come from lengths, so it may equal a real token
# What an unknown character is decoded to, so the one character that cannot be told from it.
_UNKNOWN = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    encode_fn: Callable[[str], list[int]]
    token_bytes: tuple[bytes, ...]  # the bytes that each id stands for; empty for control tokens
    bos_ids: tuple[int, ...]  # prepended to every prompt; empty if the model has no BOS
    stop_ids: tuple[int, ...]  # each of them ends a response; stage 1 trains on the first
    strips_blank: bool = False  # encode_fn prepends a space to the text, so decoding removes one from its start
    chat_fn: Callable[[str], str] | None = None  # wraps a prompt in the model's chat template, BOS included
    special_texts: tuple[str, ...] = ()  # what encode_fn makes one special token of, such as <|im_end|>

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def encode_prompt(self, text: str) -> list[int]:
        if self.chat_fn is not None:
            return self.encode_fn(self.chat_fn(text))
        ids, bos = self.encode_fn(text), list(self.bos_ids)
        return ids if bos and ids[: len(bos)] == bos else [*bos, *ids]  # a template may spell it out

    def as_text(self, text: str) -> str:
        """Break up special tokens: a solution that spells out the end of a turn must not end one in the verifier's
        prompt."""
        found = [special for special in self.special_texts if special and special in text]
        if not found:
            return text
        pattern = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
        # A special token of one character cannot be spelled otherwise, so it is left out.
        return re.sub(pattern, lambda match: f"{match[0][0]} {match[0][1:]}" if len(match[0]) > 1 else "", text)

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a response, with the stop id at the end."""
        ends = tuple(filter(None, self.special_texts))  # such as the end of a turn, which files often keep
        while ends and text.rstrip().endswith(ends):
            text = text.rstrip()
            text = text.removesuffix(next(special for special in ends if text.endswith(special)))
        return [*self.encode_fn(self.as_text(text)), self.stop_ids[0]]

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_with_ends(ids)[0]

    def decode_for_reader(self, ids: Sequence[int]) -> str:
        """With special tokens spelled out, such as <|im_end|>, which `decode` leaves out."""
        tokens_of_texts = [(text, self.encode_fn(text)) for text in self.special_texts]
        spelled = {tokens[0]: text for text, tokens in tokens_of_texts if len(tokens) == 1}
        parts = itertools.groupby(ids, key=spelled.get)
        return "".join(text * len(list(run)) if text else self.decode(list(run)) for text, run in parts)

    def decode_with_ends(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text and, for each token, the number of characters complete after it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces, ends, total = [], [], 0
        may_strip = self.strips_blank
        for token in ids:
            piece = decoder.decode(self.token_bytes[token])
            if may_strip and piece:
                piece, may_strip = piece.removeprefix(" "), False
            total += len(piece)
            pieces.append(piece)
            ends.append(total)
        tail = decoder.decode(b"", final=True)
        if tail and ends:  # an incomplete character at the end belongs to the last token
            pieces.append(tail)
            ends[-1] += len(tail)
        return "".join(pieces), ends


def is_readable(tokenizer: Tokenizer, text: str) -> bool:
    return _UNKNOWN not in tokenizer.decode(tokenizer.encode_fn(text))


def unreadable_characters(tokenizer: Tokenizer, texts: Iterable[str]) -> list[str]:
    """The characters, sorted, without a token where they stand ("#" may be known in "#1" only)."""
    texts = list(texts)
    suspects = {c for c in set().union(*texts) if c != _UNKNOWN and not is_readable(tokenizer, c)}

    def without_others(text: str, suspect: str) -> str:
        return "".join(c for c in text if c == suspect or (c not in suspects and c != _UNKNOWN))

    return [
        c for c in sorted(suspects)
        if any(c in text and not is_readable(tokenizer, without_others(text, c)) for text in texts)
    ]


def token_of_character(ends: Sequence[int], character: int) -> int:
    """-1 if the text does not reach the character."""
    token = bisect.bisect_right(ends, character)
    return token if token < len(ends) else -1


def load_sentencepiece(model: bytes) -> Tokenizer:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def piece_bytes(token: int) -> bytes:
        if processor.is_control(token):
            return b""
        if processor.is_unknown(token):
            return _UNKNOWN.encode()
        piece = processor.id_to_piece(token)
        byte = _BYTE_PIECE.fullmatch(piece) if processor.is_byte(token) else None
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()

    return Tokenizer(
        encode_fn=lambda text: processor.encode(text),
        token_bytes=tuple(piece_bytes(token) for token in range(processor.vocab_size())),
        bos_ids=(processor.bos_id(),) if processor.bos_id() >= 0 else (),
        stop_ids=(processor.eos_id(),),
    )
