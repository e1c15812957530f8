"""Single-byte damage anywhere in the newest step of a checkpoint directory: every one is seen, and the step before is
restored bit for bit, with a message that names what is damaged.
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from tango_jax.runtime.checkpoint import Checkpointer
from tango_jax.runtime.sealed import MANIFEST, complete_steps
from tango_jax.runtime.trees import tree_fingerprint
from torture.outcome import Outcome

STEPS = (10, 20, 30)


def flips(count: int = 1000, seed: int = 0, folder: Path | None = None) -> Outcome:
    """Change one random byte of the newest step, restore, put the byte back; `count` times.

    Args:
        folder: a directory of tiny checkpoints as `make_steps` leaves it, made if it is not there; None: a temporary
            one.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return flips(count, seed, Path(temporary) / "checkpoints")
    if not complete_steps(folder):
        make_steps(folder)
    *_, before, newest = complete_steps(folder)
    rng, failures = np.random.default_rng(seed), []
    files = sorted(path for path in (folder / str(newest)).rglob("*") if path.is_file() and path.stat().st_size)
    for number in range(count):
        # Files alike, however small, and the manifest more often: it is what the others are judged by.
        path = folder / str(newest) / MANIFEST if number % 4 == 0 else files[rng.integers(len(files))]
        data = path.read_bytes()
        position, change = int(rng.integers(len(data))), int(rng.integers(1, 256))
        damaged = bytes([*data[:position], data[position] ^ change, *data[position + 1 :]])
        path.write_bytes(damaged)
        try:
            problem = find_problem(folder, newest, before)
        finally:
            path.write_bytes(data)
        if problem:
            name = path.relative_to(folder)
            failures.append(f"seed {seed}, flip {number}: byte {position} of {name} ^ {change:#04x}: {problem}")
    return Outcome(count, count - len(failures), failures)


def find_problem(folder: Path, newest: int, before: int) -> str | None:
    """None if a start of a run does what it should with the damaged step, else what it did."""
    checkpointer, wanted = Checkpointer(folder), make_state(before)
    with _warnings() as messages:
        try:
            glance = checkpointer.peek(_abstract(wanted))
            restored = checkpointer.restore(_abstract(wanted))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            return f"stopped with {type(error).__name__}: {error}"
    if restored is None or restored.step != before or glance.step != before:
        return f"restored {restored and restored.step} instead of {before}"
    if tree_fingerprint(restored.state) != tree_fingerprint(wanted) or restored.meta != make_meta(before):
        return "what was restored differs"
    said = f"{folder / str(newest)} is damaged: "
    if len(messages) != 1 or said not in messages[0] or f"falling back to step {before}" not in messages[0]:
        return f"said {messages}"
    return None


def make_steps(folder: Path) -> None:
    """Save the STEPS, which differ in every array, and keep the last two."""
    with Checkpointer(folder, keep=2) as checkpointer:
        for step in STEPS:
            checkpointer.save(step, make_state(step), make_meta(step))


def make_state(step: int) -> dict:
    """Arrays of several types; the first is so large that a flip in it is no flip in its header."""
    rng = np.random.default_rng(step)
    params = {"kernel": rng.normal(size=(32, 16)).astype(np.float32), "bias": np.full(4, step, jax.numpy.bfloat16)}
    return {"generator": {"params": params, "count": np.array([step], np.int32)}}


def make_meta(step: int) -> dict:
    return {"turn": step, "metrics_bytes": 100 * step, "source_fingerprint": {"generator": "ab12"}}


def _abstract(state: dict) -> dict:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), state)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What is logged about damage while the block runs, instead of printing it."""
    messages, logger = [], logging.getLogger("tango_jax.runtime.sealed")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
