"""Randomness as a pure function of (seed, names and counters), so that a resumed run repeats it and no step reuses it.

Keys are made on the host: an eager jax.random call between jitted steps would be dispatched, and compiled, on its own.
"""

import zlib

import numpy as np

MAX_SEED = 2**32 - 1  # of grain's orders; one limit for every seed


def step_key(seed: int, *path: str | int) -> np.ndarray:
    """Raw data of a threefry key, uint32[2], for `jax.random.wrap_key_data` inside a jitted function."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in path]
    # A spawn key, unlike more entropy, tells a counter of zero from no counter.
    return np.random.SeedSequence(seed, spawn_key=words).generate_state(2, np.uint32)
