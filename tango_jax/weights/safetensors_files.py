"""Tensors in a folder of safetensors files, with or without an index. Only headers and requested parts are read."""

import contextlib
import itertools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
WEIGHT_FILES = f"{SINGLE_FILE} (or {INDEX_FILE})"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SHOWN = 5  # number of names that an error message lists before it abbreviates


class StoredTensor(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str
    name: str  # in the file


def shorten(names: Iterable[str]) -> str:
    """The names, or the first few and the number of the others."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def tensor_problems(found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> tuple[list[str], str]:
    """(missing names, all problems as text) of a file's shapes against a model's."""
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    misshapen = [f"{name} {list(found[name])} instead of {list(shape)}" for name, shape in wanted.items()
                 if found.get(name, shape) != shape]
    kinds = (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
    return missing, "; ".join(f"{len(names)} {what}: {shorten(names)}" for what, names in kinds if names)


class Place(NamedTuple):
    file: Path
    start: int  # in bytes


def create_file(file: Path, tensors: Mapping[str, Any]) -> dict[str, Place]:
    """Write a file's header, with space for arrays of these shapes and dtypes; `write_tensor` fills it. The bytes are
    those of safetensors' `save_file`, which needs all arrays at once. OSError."""
    stored, header, end = {name: code for code, name in DTYPES.items()}, {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        own = tensors[name]
        start, end = end, end + own.dtype.itemsize * math.prod(own.shape)
        header[name] = {"dtype": stored[str(own.dtype)], "shape": list(own.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with _to_write(file, "wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        first = opened.tell()
        opened.truncate(first + end)
    return {name: Place(file, first + header[name]["data_offsets"][0]) for name in tensors}


def write_tensor(place: Place, array: np.ndarray) -> None:
    with _to_write(place.file, "r+b") as opened:
        opened.seek(place.start)
        opened.write(np.ascontiguousarray(array).view(np.uint8).data)


@contextlib.contextmanager
def _to_write(file: Path, mode: str) -> Iterator[BinaryIO]:
    """Python does not say which file could not be written."""
    try:
        with file.open(mode) as opened:
            yield opened
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def write_tensors(tensors: dict[str, np.ndarray], file: Path) -> None:
    for name, place in create_file(file, tensors).items():
        write_tensor(place, tensors[name])


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder, from headers. ValueError: a file, the index or a dtype is wrong."""
    if (instead := instead_of_weights(folder)) is not None:
        raise ValueError(f"{folder} lacks {WEIGHT_FILES}: copy them from the model's page{instead}")
    index, files = None, [folder / SINGLE_FILE]
    if not files[0].is_file():
        index = _read_index(folder / INDEX_FILE)
        files = [folder / name for name in sorted(set(index.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(f"{folder}: {INDEX_FILE} names {shorten(absent)}, which {_is(absent)} not there: "
                         "download the folder again")
    tensors = {}
    for file in files:
        header = _read_header(file)
        twice = sorted(tensors.keys() & header.keys())
        if twice:
            raise ValueError(f"{file} holds {shorten(twice)}, which {_is(twice)} also in {tensors[twice[0]].file.name}")
        tensors.update(header)
    odd = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in DTYPES]
    if odd:
        raise ValueError(f"{folder}: {shorten(odd)} {_is(odd)} not stored as {', '.join(DTYPES)}: quantized "
                         "checkpoints are not supported, use the original one")
    lost = sorted(index.keys() - tensors.keys()) if index else []
    if lost:
        raise ValueError(f"{folder}: {INDEX_FILE} lists {shorten(lost)}, but the files do not contain "
                         f"{'it' if len(lost) == 1 else 'them'}: download the folder again")
    return tensors


def read_parts(
    tensors: dict[str, StoredTensor], parts: Iterable[tuple[str, tuple[slice, ...], np.ndarray]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(part of the tensor, target) for each (tensor name, slices, target), in the order of the files."""

    def file_of(part) -> Path:
        return tensors[part[0]].file

    for file, group in itertools.groupby(sorted(parts, key=file_of), key=file_of):
        with _open(file) as handle:
            for name, slices, target in group:
                yield handle.get_slice(tensors[name].name)[slices], target


def _is(names: list) -> str:
    return "is" if len(names) == 1 else "are"


def _open(file: Path):
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} ({file.stat().st_size} bytes) is truncated or not a safetensors file: {error}; "
                         "download it again") from error


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with _open(file) as handle:
        stored = {name: handle.get_slice(name) for name in handle.keys()}
        return {name: StoredTensor(file, tuple(part.get_shape()), part.get_dtype(), name)
                for name, part in stored.items()}


def _read_index(file: Path) -> dict[str, str]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not an index of safetensors files ({error!r}): download it again") from error
    plain = isinstance(index, dict) and index and all(
        isinstance(name, str) and name == Path(name).name for name in index.values()
    )
    if not plain:
        raise ValueError(f"{file}: weight_map must name at least one tensor, and for each a file inside the folder")
    return index


def instead_of_weights(folder: Path) -> str | None:
    """What to do with a folder that has no weights; None: it has them."""
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return None
    here = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pth", ".gguf"))
    if "adapter_model.safetensors" in here:
        return ", or merge the adapter that is here into its base model"
    if any(name.endswith((".bin", ".pth")) for name in here):
        return f", or convert {shorten(here)} with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
    return f", or name {here[0]} in it" if here else ""
