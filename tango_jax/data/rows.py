"""Data files to raw rows: JSONL, a JSON list, parquet, or a dataset of the model hub; in a path, out dicts that know
where they stand.

Stage of the loop: before anything else. What the fields of a row mean is the business of `row_formats.py`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tango_jax.runtime import hub
from tango_jax.runtime.checks import local_path
from tango_jax.runtime.hub import REVISION

HUB_PREFIX = "hub:"
HUB_FORM = "hub:owner/name[:config]/split, or hub:owner/name/path/of/a/file.jsonl; owner/name@COMMIT pins either"
SUFFIXES = (".jsonl", ".json", ".parquet")
_HUB = re.compile(
    rf"hub:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>{REVISION}))?(?::(?P<config>[\w.-]+))?/(?P<rest>[\w./-]+)"
)
# The hub keeps every data set that it can read converted on this branch, as {config}/{split}/0000.parquet and so on. To
# pin a split is to name a commit of this branch; to pin a file, one of the data set itself.
PARQUET_BRANCH = "refs/convert/parquet"
_PARQUET_MAGIC = b"PAR1"


class Row(NamedTuple):
    """One raw row."""

    where: str  # for error messages: "file.jsonl, line 3"
    id: str  # name of the source / number from 1, unique in it
    fields: dict[str, Any]


def read_rows(source: str | Path, may_be_empty: bool = False) -> list[Row]:
    """All rows of a local file or of a hub id (`HUB_FORM`), in order.

    Raises:
        ValueError: no such file, a line that is no JSON object, no rows at all (unless `may_be_empty`), or a hub id
            that cannot be had; the message names the file, the line and what to change.
    """
    name, paths = _locate(str(source))
    is_hub = str(source).startswith(HUB_PREFIX)
    rows = [row for path in paths for row in _rows_of_file(path, f"{source} ({path.name})" if is_hub else str(path))]
    if not rows and not may_be_empty:
        raise ValueError(f"{source}: no rows in it; give a file with at least one problem")
    return [Row(where, f"{name}/{number}", fields) for number, (where, fields) in enumerate(rows, 1)]


def _locate(source: str) -> tuple[str, list[Path]]:
    """(name for problem ids, the local files in order)."""
    if source.startswith(HUB_PREFIX):
        return _download(source)
    path = local_path("data file", source)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"data file {source} {what}; give a {', '.join(SUFFIXES)} file or {HUB_FORM}")
    return path.stem, [path]


def _rows_of_file(path: Path, label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, fields) of every row. What the file holds decides, not its name."""
    with open(path, "rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(_PARQUET_MAGIC):
        yield from _parquet_rows(path, label)
    elif start.startswith(b"["):
        yield from _json_list_rows(path, label)
    else:
        yield from _json_lines_rows(path, label)


def _json_lines_rows(path: Path, label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{label}, line {number}"
                yield where, _as_object(_parse_json(line, where), where)


def _json_list_rows(path: Path, label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, value in enumerate(_parse_json(path.read_bytes(), label), 1):
        where = f"{label}, row {number}"
        yield where, _as_object(value, where)


def _parquet_rows(path: Path, label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    number += 1
                    yield f"{label}, row {number}", fields
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{label}: damaged parquet file after row {number} ({error}); fetch it again") from error


def _parse_json(text: bytes, where: str) -> Any:
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor JSON, or nested without end
        raise ValueError(f"{where}: not JSON ({error}); each row is one JSON object") from error
    if b"\\ud" in text.lower():  # JSON can write what is no text: no tokenizer takes it, and it would end a run later
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{where}: {half!r} is half of a character beyond U+FFFF; write both, or leave it out"
                             ) from error  # fmt: skip
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json.loads would take the last of two values with the same name."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return fields


def _as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a row must be an object with named fields, not {type(value).__name__}")
    return value


def check_hub_id(source: str) -> tuple[str, str | None, str]:
    """(data set, config or None, split or file) of a hub id; the hub is not asked. ValueError if it is not one."""
    match = _HUB.fullmatch(source)
    parts = match and (match["repo"], match["config"], match["rest"])
    if match and ".." in (match["revision"] or ""):
        parts = None
    is_file = parts is not None and parts[2].endswith(SUFFIXES)
    if parts is None or (is_file and parts[1]) or (not is_file and "/" in parts[2]):
        raise ValueError(f"{source!r} is not a hub id; write {HUB_FORM}")
    return parts


def _download(source: str) -> tuple[str, list[Path]]:
    """Fetch a split or a file of a hub data set, or find it in the local cache."""
    repo, config, rest = check_hub_id(source)
    revision = _HUB.fullmatch(source)["revision"]
    is_file = rest.endswith(SUFFIXES)
    pattern = rest if is_file else f"{config or '*'}/{rest}/*.parquet"
    form = f"{HUB_PREFIX}{{}}{f':{config}' if config else ''}/{rest}"
    folder = _fetch(source, hub.HubId(repo, revision), pattern, None if is_file else PARQUET_BRANCH, form)
    paths = sorted(folder.glob(pattern))
    if not paths:
        pinned = f" (splits are on the branch {PARQUET_BRANCH}: pin a commit of it)" if revision and not is_file else ""
        raise ValueError(f"{source}: data set {repo} has no files {pattern}; check the split{pinned}, or name one of "
                         "its files")
    configs = sorted({path.parent.parent.name for path in paths})
    if not is_file and len(configs) > 1:
        raise ValueError(f"{source}: {repo} has the configs {', '.join(configs)}; write hub:{repo}:CONFIG/{rest}")
    return f"{repo.split('/')[1]}-{Path(rest).stem}", paths


def _fetch(source: str, hub_id: hub.HubId, pattern: str, branch: str | None, form: str) -> Path:
    try:
        return hub.download(hub_id, pattern, "dataset", branch, form)
    except (OSError, ValueError) as error:  # no network, no such data set, no permission, not a valid name
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{source}: could not be fetched from the hub ({reason}); without a network, download the file elsewhere "
            "and give its path"
        ) from error
