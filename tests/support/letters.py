"""A tokenizer with one token a character, so that ids are readable."""

from tango_jax.text.tokenizer import Tokenizer

BOS, EOS = 0x110000, 0x110001


class Letters(Tokenizer):
    """Each token is the number of its character."""

    def read(self, ids) -> str:
        assert ids[0] == BOS and BOS not in ids[1:] and EOS not in ids
        return "".join(map(chr, ids[1:]))


LETTERS = Letters(lambda text: [ord(character) for character in text], (), (BOS,), (EOS,))
