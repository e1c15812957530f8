"""Messages between the grading pool and its workers: JSON objects as length-prefixed frames.

With frames, unlike lines, the half-written reply of a killed worker is never read.
"""
import json
from typing import Any

_PREFIX_BYTES = 4


def pack(message: dict[str, Any]) -> bytes:
    """Encode a message as one frame: the length of the body in four bytes, then the body."""
    body = json.dumps(message).encode("ascii")
    return len(body).to_bytes(_PREFIX_BYTES, "big") + body


def take_message(buffer: bytearray) -> dict[str, Any] | None:
    """Remove and decode the first frame of the buffer; return None and remove nothing while it is incomplete."""
    if len(buffer) < _PREFIX_BYTES:
        return None
    end = _PREFIX_BYTES + int.from_bytes(buffer[:_PREFIX_BYTES], "big")
    if len(buffer) < end:
        return None
    body = bytes(buffer[_PREFIX_BYTES:end])
    del buffer[:end]
    return json.loads(body)


def read_message(stream: Any) -> dict[str, Any] | None:
    """Read the next frame of a blocking binary stream; return None at its end."""
    prefix = stream.read(_PREFIX_BYTES)
    if len(prefix) < _PREFIX_BYTES:
        return None
    size = int.from_bytes(prefix, "big")
    body = stream.read(size)
    return json.loads(body) if len(body) == size else None
