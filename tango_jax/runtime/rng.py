"""Random keys as a pure function of (seed, names, counters). The host makes them: eager jax.random is slow."""

import zlib

import numpy as np

MAX_SEED = 2**32 - 1  # limit of grain's shuffles, used for every seed


def step_key(seed: int, *path: str | int) -> np.ndarray:
    """Raw data of a threefry key, uint32[2], for `jax.random.wrap_key_data` in a jitted function."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in path]
    # Unlike entropy, a spawn key distinguishes a counter of zero from none.
    return np.random.SeedSequence(seed, spawn_key=words).generate_state(2, np.uint32)
