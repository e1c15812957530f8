"""Log-probs of the tokens of a response as two short strings, one character a token in each.

Takes the log-probs of the sampler and the number of characters complete after each token; returns the strings that a
dumped rollout holds. They compress well, and tell what a reader wants to see: where a policy was unsure, not its last
digits. Used by rollout_rows.py; the report's page reads them (viewer/paint.js).

A character stands for its place in ALPHABET, 0 to 63. In `token_surprise` it is -log p in units of a tenth of a nat, at
most 63. In `token_lengths` it is the number of characters of the token; 63 is followed by a further character, to which
it is added, so that any length can be written.
"""

import string
from collections.abc import Sequence

import numpy as np

ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
UNIT = 0.1  # nats
MOST = len(ALPHABET) - 1
_LETTERS = np.frombuffer(ALPHABET.encode(), np.uint8)


def surprise_code(logp_T: np.ndarray) -> str:
    """The `token_surprise` of log-probs, float [tokens]."""
    levels = np.clip(np.rint(-np.asarray(logp_T, float) / UNIT), 0, MOST).astype(int)
    return _LETTERS[levels].tobytes().decode()


def lengths_code(token_ends: Sequence[int]) -> str:
    """The `token_lengths` of a response, from the number of characters complete after each token."""
    lengths = np.diff(token_ends, prepend=0).tolist()
    return "".join(ALPHABET[MOST] * (length // MOST) + ALPHABET[length % MOST] for length in lengths)
