"""One GGUF file, opened and checked: its metadata and its tensors, still quantised. Read once, at start."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# What the `gguf` package can turn into float32, of the types that published files are made of.
TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An open file; tensors are views of the memory-mapped data."""

    path: Path
    reader: gguf.GGUFReader

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as Python has it, or `default` where the file does not have the key."""
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.path} has no metadata {key!r}: convert the model again with a recent llama.cpp")
        return value

    @property
    def tensors(self) -> dict[str, gguf.ReaderTensor]:
        return {tensor.name: tensor for tensor in self.reader.tensors}


def open_gguf(path: "str | Path | GgufFile") -> GgufFile:
    """Open a GGUF file; one that is open is returned as it is.

    A large vocabulary takes seconds to read: whoever wants config, weights and tokenizer opens the file once and hands
    the result to each of them.

    Raises:
        ValueError: no such file, not GGUF, truncated, or one part of several.
    """
    if isinstance(path, GgufFile):
        return path
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give the path of one .gguf file")
    size = path.stat().st_size
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(
            f"{path} ({size} bytes) is not a whole GGUF file ({error}): it is of another kind or was cut off; "
            "download it again"
        ) from error
    file = GgufFile(path, reader)
    parts = file.get("split.count", 1)
    if parts > 1:
        raise ValueError(f"{path} is one of {parts} parts: join them first with `llama-gguf-split --merge`")
    return file


def dequantize(file: GgufFile, tensor: gguf.ReaderTensor) -> np.ndarray:
    """A tensor as float32, in the order in which PyTorch has it: [out, in].

    Raises:
        ValueError: a type that is not supported, or values that are not finite.
    """
    kind = tensor.tensor_type.name
    if kind not in TENSOR_TYPES:
        raise ValueError(
            f"{file.path}: tensor {tensor.name} has type {kind}, not one of {', '.join(TENSOR_TYPES)}: "
            "take the file in one of these, Q8_0 or F16 for instance"
        )
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ValueError(f"{file.path}: tensor {tensor.name} holds infinities or NaN: download the file again")
    return values
