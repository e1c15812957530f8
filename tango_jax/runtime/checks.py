"""The checks that validation is made of: each raises ValueError with the name of the setting, its value and the limit.

Paths that the user gives are also handled here.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def one_of(name: str, value: Any, choices: Iterable[str]) -> None:
    require(value in choices, f"{name}={shortened(value)} is not one of {', '.join(choices)}")


def at_least(name: str, value: float, limit: float) -> None:
    require(value >= limit, f"{name}={value} must be at least {limit}")


def local_path(name: str, text: str | os.PathLike) -> Path:
    """The path that a user means, with ~ replaced; it may exist or not.

    Raises:
        ValueError: the text is empty, names the home of a user who does not exist, or can be no path of this system.
    """
    require(bool(os.fspath(text)), f"{name} is empty: give a path")
    try:
        path = Path(text).expanduser()
        os.path.lexists(path)
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # whoever opens it says so
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, ~ without a home
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{name}={shortened(os.fspath(text))} is no path here ({reason}): give another one") from error
    return path


def folder_to_write(name: str, text: str | os.PathLike) -> Path:
    """The path of a folder that exists or can be made, for a command that writes into it.

    Raises:
        ValueError: `local_path`'s; a file is in its place or in that of a folder above it; or it may not be written.
    """
    path = local_path(name, text)
    nearest = next((place for place in (path, *path.absolute().parents) if os.path.lexists(place)), path)
    if not nearest.is_dir():
        what = "is a file" if nearest == path else f"cannot be made: {nearest} is no folder"
        raise ValueError(f"{name}={text} {what}; name a folder, which may exist or not")
    require(os.access(nearest, os.W_OK | os.X_OK),
            f"{name}={text}: this user may not write into {nearest}; name another folder, or change its permissions")
    return path


def file_to_write(name: str, text: str | os.PathLike) -> Path:
    """The path of a file that exists or can be made.

    Raises:
        ValueError: it is a folder, or `folder_to_write`'s about the folder that it is in.
    """
    path = local_path(name, text)
    require(not path.is_dir(), f"{name}={text} is a folder; name a file in it")
    folder_to_write(name, path.parent)
    return path


def shortened(value: Any) -> str:
    """A value as Python writes it, cut where it is long."""
    try:
        return cut(repr(value))
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"a value of type {type(value).__name__} that is too long to show"


def cut(text: str, most: int = 80) -> str:
    """The text, or as much of it as stays within `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
