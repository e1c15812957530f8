"""Writes out what an object is made of, so that a later process can tell whether it was handed the same one.

Takes a function, a record or any other value; returns text: the source of its functions, and the values in its fields,
closures, defaults and bound arguments. Used for objects that a Python program hands over (runtime/user_code.py).
"""

import copyreg
import dataclasses
import dis
import functools
import hashlib
import inspect
import pickle
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

LONGEST, SHOWN = 100_000, 64  # characters of a value, and numbers of an array; of larger ones the digest is written
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)
_ARRAYS = (np.ndarray, np.generic, jax.Array)
# What counts of the values that a function reads from its module: others, such as a console, are no part of a method.
_READ = (*_PLAIN, *_ARRAYS, tuple, list, set, frozenset, Mapping, types.FunctionType, type, functools.partial)
_INSTALLED = {Path(__file__).parents[1], *map(Path, sysconfig.get_paths().values())}


def text_of(value: Any, name: str) -> str:
    """All that an object is made of, in words that are the same in every process.

    What a function reads from its module counts, where that is a function, a class, a dataclass or plain data. Code of
    installed packages, and of this one, counts by its name.

    Args:
        name: what the object is called.

    Raises:
        ValueError: it holds something that cannot be written out, such as an open file or a lock.
    """
    return "\n".join(_lines(value, name, {}))


def _lines(value: Any, name: str, written: dict[int, Any]) -> Iterator[str]:
    """Lines about a value. `written` has the functions and classes that need not be told again, and the values that
    this one is in, by their ids."""
    if _is_plain(value):
        yield f"{name} = {_shortened(value if _has_lines(value) else repr(value))}"
    elif outside := _name_outside(value):
        yield f"{name} = {outside}"
    elif id(value) in written:
        yield f"{name}: as above"
    else:
        written[id(value)] = value
        yield f"{name}: {type(value).__qualname__}"
        for part, held in _parts(value, name):
            yield from _lines(held, f"{name}{part}", written)
        if not isinstance(value, (types.FunctionType, type)):
            del written[id(value)]  # whether an equal value is the same object or a copy does not matter


def _is_plain(value: Any) -> bool:
    """Whether the repr of a value says all of it."""
    held = (*value, *value.values()) if type(value) is dict else value if type(value) in (tuple, list) else (value,)
    return all(type(each) in _PLAIN for each in held)


def _has_lines(value: Any) -> bool:
    return isinstance(value, str) and "\n" in value  # as source has, which is for people to read


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:100]}... sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def _name_outside(value: Any) -> str:
    """The name of a module, or of what an installed package defines; empty for the user's own code, and for data."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    place, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    module = sys.modules.get(place) if isinstance(place, str) and isinstance(name, str) else None
    found = module
    for part in name.split(".") if module else ():
        found = getattr(found, part, None)
    if module is None or found is not value:
        return ""
    file = getattr(module, "__file__", None)
    is_outside = _INSTALLED & set(Path(file).parents) if file else place in sys.builtin_module_names
    return f"{place}.{name}" if is_outside else ""


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(what it is called, part) of all that a value is made of."""
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, type):
        yield ".__bases__", value.__bases__
        yield from ((f".{key}", held) for key, held in vars(value).items() if _is_written(key, held))
    elif isinstance(value, functools.partial):
        yield from ((f".{part}", getattr(value, part)) for part in ("func", "args", "keywords"))
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield ".__func__", value.__func__
        yield ".__self__", getattr(value, "__self__", None)
    elif isinstance(value, property):
        yield ".fget", value.fget
    elif hasattr(value, "__wrapped__"):  # of jax.jit or functools.cache
        yield ".__wrapped__", value.__wrapped__
    elif isinstance(value, _ARRAYS) and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        yield "", f"{value.dtype}{list(value.shape)}"
        yield "", value.tolist() if value.size <= SHOWN else hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
    elif type(value) in (dict, types.MappingProxyType):
        yield from ((f"[{key!r}]", held) if type(key) in _PLAIN else ("", (key, held)) for key, held in value.items())
    elif type(value) in (set, frozenset):
        yield "", sorted(value, key=repr)
    elif type(value) in (tuple, list):
        yield from ((f"[{index}]", held) for index, held in enumerate(value))
    else:
        yield from _parts_of_instance(value, name)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code, module = function.__code__, function.__globals__
    yield "", _source(code)
    if code.co_name == "<lambda>":  # the source is that of the line, which may have several
        yield " in column", min((place[2] for place in code.co_positions() if place[2]), default=0)
    if defaults := (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()):
        yield " by default", defaults
    yield from ((f".{name}", held) for name, held in vars(function).items())
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield from [(f" with {name}", cell.cell_contents)] if cell != types.CellType() else []
    for name in sorted(_names_read(code) & module.keys()):
        held = module[name]
        if isinstance(held, _READ) or dataclasses.is_dataclass(held) or hasattr(held, "__wrapped__"):
            yield f" with {name}", held


def _source(code: types.CodeType) -> Any:
    try:
        return inspect.getsource(code)
    except OSError:  # typed into an interpreter, or made by a program
        consts = [_source(one) if isinstance(one, types.CodeType) else one for one in code.co_consts]
        return code.co_code, code.co_names, consts


def _names_read(code: types.CodeType) -> set[str]:
    """The names that a function reads from its module."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return own.union(*(_names_read(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def _is_written(key: str, held: Any) -> bool:
    """Whether an attribute of a class is part of what it does: not what Python or a decorator has made."""
    if isinstance(held, types.FunctionType) and key.startswith("__"):
        return key != "__repr__" and held.__code__.co_filename != "<string>"  # as dataclasses have it
    is_slot = isinstance(held, (types.GetSetDescriptorType, types.MemberDescriptorType))
    return not (is_slot or key.startswith("__") or key == "_abc_impl")


def _parts_of_instance(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What pickle would write of it."""
    reduce_fn = copyreg.dispatch_table.get(type(value))
    try:
        made = reduce_fn(value) if reduce_fn else value.__reduce_ex__(2)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ValueError(f"{name} is of type {type(value).__name__}, whose content cannot be compared when the run is "
                         "resumed: hand over numbers, texts and functions instead") from error
    if isinstance(made, str):
        made = (made,)
    elif made[0] is copyreg.__newobj__:
        yield ".__class__", made[1][0]
        made = made[1][1:], *made[2:]
    for part in made:
        if isinstance(part, dict):
            yield from ((f".{key}", held) for key, held in part.items())
        elif part is not None:
            yield "", list(part) if isinstance(part, Iterator) else part
