"""A tokenizer whose pieces are given, so that a test chooses where words are cut."""

from tango_jax.text.tokenizer import Tokenizer


def greedy_tokenizer(*pieces: str) -> Tokenizer:
    """The longest piece first; single characters else."""
    known = [*pieces, *map(chr, range(32, 127))]

    def encode(text):
        ids = []
        while text:
            piece = max((one for one in known if text.startswith(one)), key=len)
            ids.append(known.index(piece))
            text = text[len(piece) :]
        return ids

    return Tokenizer(encode, tuple(one.encode() for one in known), (), (known.index(" "),))
