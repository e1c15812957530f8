"""Errors of a device whose memory is full, with what was being done and what to lower."""

import contextlib
from collections.abc import Callable, Iterator

import jax

from tango_jax.runtime.failures import OutOfMemory, first_line, is_out_of_memory

GIB = 2**30


@contextlib.contextmanager
def names_what_is_full(doing: str, advice_fn: Callable[[], str]) -> Iterator[None]:
    """Raise OutOfMemory in place of XLA's error. `doing`: the phase; `advice_fn`: what to lower, as a sentence."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"{doing} ran out of device memory{_in_use()}: {first_line(error)}. {advice_fn()}") from error


def _in_use() -> str:
    """Of this process's fullest device; "" where the devices do not say."""
    found = [(stats["bytes_in_use"], stats["bytes_limit"], device.device_kind) for device in jax.local_devices()
             if {"bytes_in_use", "bytes_limit"} <= (stats := device.memory_stats() or {}).keys()]
    if not found:
        return ""
    used, limit, kind = max(found)
    return f" ({kind}: {used / GIB:.1f} of {limit / GIB:.1f} GiB in use)"
