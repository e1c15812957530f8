"""Small files that are always whole: a kill, a full disk or a power cut leaves the old or the new one."""

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes, one process at a time. Makes the folder. After an OSError the old file is intact."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        # The error of a failed write lacks the file's name.
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_directory(path.parent)


def sync_directory(folder: Path) -> None:
    """A rename survives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json_atomic(path: str | os.PathLike, obj: Any) -> None:
    write_atomically(path, json.dumps(json_value(obj), indent=2, allow_nan=False) + "\n")


def json_value(value: Any) -> Any:
    """Numpy and jax values as Python ones; NaN and infinity as None."""
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):
        return json_value(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
