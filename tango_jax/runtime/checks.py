"""Checks of settings and paths. Each raises ValueError with the setting, its value and the limit."""

import contextlib
import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def one_of(name: str, value: Any, choices: Iterable[str]) -> None:
    require(value in choices, f"{name}={shortened(value)} is not one of {', '.join(choices)}{meant(value, choices)}")


def meant(value: Any, choices: Iterable[str]) -> str:
    """For messages about `value`, which is none of the choices."""
    near = difflib.get_close_matches(str(value), [one for one in choices if one], n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def local_path(name: str, text: str | os.PathLike) -> Path:
    """The path with ~ expanded; it need not exist. Raises ValueError if the text cannot be a path."""
    require(bool(os.fspath(text)), f"{name} is empty: give a path")
    try:
        path = Path(text).expanduser()
        os.path.lexists(path)
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # reported when the file is opened
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, ~ without a home
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{name}={shortened(os.fspath(text))} is not a valid path ({reason}): give another "
                         "one") from error
    return path


def folder_to_write(name: str, text: str | os.PathLike) -> Path:
    path = local_path(name, text)
    nearest = next((place for place in (path, *path.absolute().parents) if os.path.lexists(place)), path)
    if not nearest.is_dir():
        what = "is a file" if nearest == path else f"cannot be created: {nearest} is not a folder"
        raise ValueError(f"{name}={text} {what}; name a folder, which need not exist")
    require(os.access(nearest, os.W_OK | os.X_OK),
            f"{name}={text}: this user may not write into {nearest}; name another folder, or change its permissions")
    return path


def file_to_write(name: str, text: str | os.PathLike) -> Path:
    path = local_path(name, text)
    require(not path.is_dir(), f"{name}={text} is a folder; name a file in it")
    folder_to_write(name, path.parent)
    return path


def read_json_object(path: Path, advice: str) -> dict[str, Any]:
    """Raises ValueError if the file holds no object; `advice` ends the message."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {advice}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): {advice}") from error
    require(isinstance(value, dict), f"{path} holds a {type(value).__name__}, not an object: {advice}")
    return value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """["name: old -> new", ...]; None where one lacks it."""
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)]


def shortened(value: Any) -> str:
    try:
        return cut(repr(value))
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return f"a value of type {type(value).__name__} that is too long to show"


def cut(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


class SettingsError(ValueError):
    """Mistakes in the settings, one line each."""

    def __init__(self, messages: Iterable[str]):
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))


class Mistakes:
    """Collects mistakes in settings, to report all at once."""

    def __init__(self):
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        if message not in self.messages:
            self.messages.append(message)

    def is_about(self, *beginnings: str) -> bool:
        """Whether a message begins with one of these setting or group names."""
        return any(message.startswith(beginnings) for message in self.messages)

    def require(self, condition: bool, message: str) -> bool:
        if not condition:
            self.add(message)
        return condition

    def one_of(self, name: str, value: Any, choices: Iterable[str]) -> bool:
        with self.collected():
            one_of(name, value, choices)
            return True
        return False

    @contextlib.contextmanager
    def collected(self, prefix: str = "") -> Iterator[None]:
        """Note a ValueError of the block and skip the rest of it."""
        try:
            yield
        except ValueError as error:
            for message in getattr(error, "messages", (error,)):
                self.add(f"{prefix}{message}")

    def raise_all(self) -> None:
        if self.messages:
            raise SettingsError(self.messages)
