"""What comes of the trials of one kind."""

from typing import NamedTuple


class Outcome(NamedTuple):
    """How many trials there were, and how many ended as they should."""

    tried: int
    survived: int
    failures: list[str]  # one line each; maybe only the first of them
