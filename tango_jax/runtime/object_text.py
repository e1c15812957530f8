"""Tells whether an object from a Python program equals the one that an earlier process had."""

import dataclasses
import dis
import functools
import hashlib
import inspect
import io
import pickle
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Types of module values that count; others, such as a console, are no part of a method.
_READ = (bool, int, float, complex, str, bytes, types.NoneType, np.ndarray, np.generic, jax.Array, tuple, list, set,
         frozenset, Mapping, types.FunctionType, type, functools.partial)
_INSTALLED = {Path(__file__).parents[1], *map(Path, sysconfig.get_paths().values())}


def text_of(value: Any, name: str) -> str:
    """The source of an object's functions, and a digest of its fields, closures, defaults, bound arguments, and what
    its functions read from their modules. Equal in every process. Code of packages counts by name. Raises ValueError.
    """
    stream = io.BytesIO()
    writer = _Writer(stream)
    try:
        writer.dump(value)
    except (TypeError, AttributeError, ValueError, RecursionError, pickle.PicklingError) as error:
        raise ValueError(f"{name} holds a value that cannot be compared when the run is resumed ({error}): hand over "
                         "numbers, texts and functions instead") from error
    return "\n".join([*writer.sources, f"{name}: sha256 {hashlib.sha256(stream.getvalue()).hexdigest()}"])


class _Writer(pickle.Pickler):
    """Pickles functions and classes by their parts; never loaded."""

    def __init__(self, stream: io.BytesIO):
        super().__init__(stream, protocol=4)
        self.fast = True  # whether equal values are one object does not matter
        self.sources: list[str] = []
        self._written: dict[int, tuple[int, Any]] = {}  # functions and classes by id

    def persistent_id(self, value: Any) -> Any:
        """The parts to pickle in place of a value; None: the value itself."""
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(getattr(value, "__qualname__", None), str) and (outside := _name_outside(value)):
            return outside
        if isinstance(value, (types.FunctionType, type)):
            return self._code(value)
        if isinstance(value, (set, frozenset)):
            return sorted(value, key=repr)
        if isinstance(value, property):
            return (value.fget,)
        if isinstance(value, types.MappingProxyType):
            return dict(value)
        return (value.__wrapped__,) if hasattr(value, "__wrapped__") else None

    def _code(self, value: Any) -> Any:
        if id(value) in self._written:
            return self._written[id(value)][0]
        self._written[id(value)] = len(self._written), value
        if isinstance(value, type):
            return value.__bases__, {key: held for key, held in vars(value).items() if _is_written(key, held)}
        code, module = value.__code__, value.__globals__
        source = _source(code)
        self.sources += [source] if isinstance(source, str) else []
        # A line may have several lambdas.
        column = min((place[2] for place in code.co_positions() if place[2]), default=0)
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        held = {name: module[name] for name in sorted(_names_read(code) & module.keys())}
        read = {name: one for name, one in held.items()
                if isinstance(one, _READ) or dataclasses.is_dataclass(one) or hasattr(one, "__wrapped__")}
        return source, column, value.__defaults__, value.__kwdefaults__, cells, vars(value), read


def _name_outside(value: Any) -> str:
    """The name, if Python or an installed package defines the value, else ""."""
    place = getattr(value, "__module__", None)
    module = found = sys.modules.get(place)
    file = getattr(module, "__file__", None)
    if not file:
        return value.__qualname__ if place in sys.builtin_module_names else ""
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return f"{place}.{value.__qualname__}" if found is value and _INSTALLED & set(Path(file).parents) else ""


def _source(code: types.CodeType) -> Any:
    try:
        return inspect.getsource(code)
    except OSError:  # typed into an interpreter, or made by a program
        consts = [_source(one) if isinstance(one, types.CodeType) else one for one in code.co_consts]
        return code.co_code, code.co_names, consts


def _names_read(code: types.CodeType) -> set[str]:
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return own.union(*(_names_read(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def _is_written(key: str, held: Any) -> bool:
    """Whether the user wrote the attribute, not Python or a decorator."""
    if isinstance(held, types.FunctionType) and key.startswith("__"):
        return key != "__repr__" and held.__code__.co_filename != "<string>"  # as dataclasses have it
    is_slot = isinstance(held, (types.GetSetDescriptorType, types.MemberDescriptorType))
    return not (is_slot or key.startswith("__") or key == "_abc_impl")
