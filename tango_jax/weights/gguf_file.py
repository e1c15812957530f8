"""A GGUF file: metadata, and tensors, still quantized."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Types that the `gguf` package converts to float32.
TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """Tensors are views of the memory-mapped data."""

    path: Path
    reader: gguf.GGUFReader

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as a Python object."""
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
    """Open a file, or return the open one: a large vocabulary takes seconds. ValueError: missing, damaged or split."""
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
            f"{path} ({size} bytes) is not a complete GGUF file ({error}): it is of another kind or truncated; "
            "download it again"
        ) from error
    file = GgufFile(path, reader)
    parts = file.get("split.count", 1)
    if parts > 1:
        raise ValueError(f"{path} is one of {parts} parts: join them first with `llama-gguf-split --merge`")
    return file


def dequantize(file: GgufFile, tensor: gguf.ReaderTensor) -> np.ndarray:
    """A tensor as float32, axes [out, in] as in PyTorch. ValueError: unsupported type, or values not finite."""
    kind = tensor.tensor_type.name
    if kind not in TENSOR_TYPES:
        raise ValueError(
            f"{file.path}: tensor {tensor.name} has type {kind}, not one of {', '.join(TENSOR_TYPES)}: "
            "use a file with one of these types, for instance Q8_0 or F16"
        )
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ValueError(f"{file.path}: tensor {tensor.name} contains infinities or NaN: download the file again")
    return values
