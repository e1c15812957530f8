"""Messages between the grading pool and its workers: JSON in length-prefixed frames.

With frames, unlike lines, a killed worker's half-written reply is never read.
"""
import json
from typing import Any

_PREFIX_BYTES = 4


def pack(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode("ascii")
    return len(body).to_bytes(_PREFIX_BYTES, "big") + body


def take_message(buffer: bytearray) -> dict[str, Any] | None:
    """Removes and decodes the first frame; None while it is incomplete."""
    if len(buffer) < _PREFIX_BYTES:
        return None
    end = _PREFIX_BYTES + int.from_bytes(buffer[:_PREFIX_BYTES], "big")
    if len(buffer) < end:
        return None
    body = bytes(buffer[_PREFIX_BYTES:end])
    del buffer[:end]
    return json.loads(body)


def read_message(stream: Any) -> dict[str, Any] | None:
    """Reads a frame from a blocking stream; None at its end."""
    prefix = stream.read(_PREFIX_BYTES)
    if len(prefix) < _PREFIX_BYTES:
        return None
    size = int.from_bytes(prefix, "big")
    body = stream.read(size)
    return json.loads(body) if len(body) == size else None
