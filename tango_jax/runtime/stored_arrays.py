"""Arrays of a checkpoint as Orbax stores them: in zarr's format, in an OCDBT database, which tensorstore reads."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from tango_jax.runtime.unread import read_array

STATE = "state"  # folder of the database
VALUES = re.compile(rf"{STATE}/ocdbt\.process_\d+/d/")  # files with values, as each process wrote them
# Of a file with values, and at most of a chunk of an array: a large model has many, so that reading a part of it needs
# few verified, and little memory.
DATA_FILE_BYTES = 2**28


def read_stored(step_folder: Path, name: str, leaf: Any) -> jax.Array | np.ndarray:
    """One array, with the sharding of `leaf` if it has one, else in host memory."""
    database = {"driver": "ocdbt", "base": _base(step_folder), "path": f"{name}/"}
    sharding = getattr(leaf, "sharding", None)
    # Read in parts, chunks are kept, and so decoded once.
    kept = leaf.size * leaf.dtype.itemsize if sharding is not None else 0
    stored = ts.open({"driver": "zarr", "kvstore": database}, open=True, read=True,
                     context=ts.Context({"cache_pool": {"total_bytes_limit": kept}})).result()
    return read_array(leaf, sharding, lambda index: stored[index].read().result())


def files_with(step_folder: Path, prefix: str) -> set[str] | None:
    """The files, relative to the folder, with values of the arrays whose names have this prefix; None: any may have.
    ValueError: the database is damaged."""
    base = ts.KvStore.open(_base(step_folder)).result()
    newest = ts.ocdbt.dump(base).result()["versions"][-1]
    if newest["root_height"]:  # above 100 MB, names are in a tree of nodes
        return None
    entries = ts.ocdbt.dump(base, newest["root"]["location"]).result()["entries"]
    places = [entry["indirect_value"] for entry in entries
              if "indirect_value" in entry and entry["key"].decode().startswith(prefix)]
    # "value:ocdbt.process_0/:d/FILE:OFFSET:LENGTH"
    return {f"{STATE}/{''.join(place.split(':')[1:3])}" for place in places}


def _base(step_folder: Path) -> dict:
    # The tensor store refuses a path with `..`.
    return {"driver": "file", "path": f"{step_folder.resolve() / STATE}/"}
