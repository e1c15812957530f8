"""Describes any record of the loop field by field: type, shape, and the contents that fit on a line."""

import dataclasses
from array import array
from typing import Any

import jax
import numpy as np

LINE = 104  # characters per line: longer ones would be wrapped by the notebook


def describe(record: Any) -> str:
    """A line for each field of a dataclass or NamedTuple: name, type or shape, beginning of the value."""
    fields = record._asdict() if hasattr(record, "_asdict") else _fields(record)
    lines = [(name, *_kind_and_value(value)) for name, value in fields.items()]
    names, kinds = (max(len(line[part]) for line in lines) for part in (0, 1))
    rows = [_short(f"  {name:<{names}}  {kind:<{kinds}}  {value}".rstrip()) for name, kind, value in lines]
    return "\n".join([type(record).__name__, *rows])


def _fields(record: Any) -> dict:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _kind_and_value(value: Any) -> tuple[str, str]:
    if isinstance(value, (np.ndarray, jax.Array)):
        kind = f"{value.dtype}[{','.join(map(str, value.shape))}]"
        pattern = "{:.4g}" if value.dtype.kind == "f" else "{}"
        return kind, " ".join(pattern.format(item) for item in np.asarray(value).reshape(-1)[:16])
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], (np.ndarray, jax.Array)):
        lengths = f"{min(map(len, value))} to {max(map(len, value))}"
        return f"{len(value)} x {value[0].dtype}[{lengths}]", f"the first: {_kind_and_value(value[0])[1]}"
    if isinstance(value, (tuple, list, array)):
        return f"{type(value).__name__} of {len(value)}", str(tuple(value) if isinstance(value, array) else value)
    if dataclasses.is_dataclass(value):
        return type(value).__name__, ", ".join(f"{name}={item!r}" for name, item in _fields(value).items())
    return type(value).__name__, repr(value)


def _short(text: str) -> str:
    return text if len(text) <= LINE else text[: LINE - 4] + " ..."
