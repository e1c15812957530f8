"""Reads raw rows from JSONL, a JSON list, parquet or a hub dataset. `row_formats.py` interprets their fields."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tango_jax.runtime import hub
from tango_jax.runtime.checks import cut, local_path
from tango_jax.runtime.hub import REVISION

HUB_PREFIX = "hub:"
HUB_FORM = "hub:owner/name[:config]/split, or hub:owner/name/path/of/a/file.jsonl; owner/name@COMMIT pins either"
SUFFIXES = (".jsonl", ".json", ".parquet")
ACCEPTED = "JSONL with one object a line, a JSON list of objects, or parquet"
_HUB = re.compile(
    rf"hub:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>{REVISION}))?(?::(?P<config>[\w.-]+))?/(?P<rest>[\w./-]+)"
)
# Where the hub keeps each dataset as {config}/{split}/0000.parquet and so on. A commit of this branch pins a split; a
# commit of the dataset pins a file.
PARQUET_BRANCH = "refs/convert/parquet"
_PARQUET_MAGIC = b"PAR1"
_COMPRESSED_MAGIC = (b"\x1f\x8b", b"PK\x03\x04")  # gzip, zip


class Row(NamedTuple):
    where: str  # for error messages: "file.jsonl, line 3"
    id: str  # name of the source / number from 1; unique within the source
    fields: dict[str, Any]


def hub_repo(source: str) -> str:
    """owner/name of a hub id; "" of a file."""
    found = _HUB.fullmatch(source)
    return found["repo"] if found else ""


def short_name(source: str) -> str:
    """For others to read: a file without the machine's folders; a hub id, or a name, as it is."""
    return source if hub_repo(source) else Path(source).name


def read_rows(source: str | Path, may_be_empty: bool = False) -> list[Row]:
    """Reads a local file or a hub id (`HUB_FORM`), in order. ValueError names file and line: no such source, a line
    that is no JSON object, or no rows."""
    name, paths = _locate(str(source))
    is_hub = str(source).startswith(HUB_PREFIX)
    rows = [row for path in paths for row in _rows_of_file(path, f"{source} ({path.name})" if is_hub else str(path))]
    if not rows and not may_be_empty:
        raise ValueError(f"{source}: no rows found; give a file with at least one problem")
    return [Row(where, f"{name}/{number}", fields) for number, (where, fields) in enumerate(rows, 1)]


def _locate(source: str) -> tuple[str, list[Path]]:
    """(name for problem ids, local files in order)."""
    if source.startswith(HUB_PREFIX):
        return _download(source)
    path = local_path("data file", source)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"data file {source} {what}; give a {', '.join(SUFFIXES)} file or {HUB_FORM}")
    return path.stem, [path]


def _rows_of_file(path: Path, label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (where, fields). The content tells the format, not the name."""
    with open(path, "rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(_PARQUET_MAGIC):
        yield from _parquet_rows(path, label)
    elif start.startswith(b"["):
        for number, value in enumerate(_parse_json(path.read_bytes(), label), 1):
            where = f"{label}, row {number}"
            yield where, _as_object(value, where)
    else:
        yield from _json_lines_rows(path, label)


def _json_lines_rows(path: Path, label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{label}, line {number}"
                try:
                    fields = _parse_json(line, where)
                except ValueError:
                    _refuse_object(line, path, label)
                    raise
                yield where, _as_object(fields, where)


def _refuse_object(line: bytes, path: Path, label: str) -> None:
    """ValueError: the file is one object over several lines."""
    whole = _json_or_none(path.read_bytes()) if _json_or_none(line) is None else None
    if isinstance(whole, dict):
        raise ValueError(f"{label}: the file is one JSON object with the keys {cut(', '.join(whole))}, not a list of "
                         "rows: write [{...}, {...}], or one object a line") from None


def _json_or_none(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None


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
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ValueError(f"{where}: {why_not_json(text, error)}; give {ACCEPTED}") from error
    if b"\\ud" in text.lower():  # half of a surrogate pair: no tokenizer accepts it, so it would end the run later
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{where}: {half!r} is half of a surrogate pair; write the whole character or remove it"
                             ) from error
    return value


def why_not_json(text: bytes, error: Exception) -> str:
    """What the text is instead of JSON in UTF-8, and what to do."""
    if text.startswith(_COMPRESSED_MAGIC):
        return "not JSON but a compressed file: unpack it"
    # In UTF-16, every second byte of most letters is 0; a byte-order mark may be missing.
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 3 * text.count(b"\0") > len(text):
        return "not UTF-8 text but UTF-16: save the file as UTF-8"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text ({error}), but perhaps Latin-1: save the file as UTF-8"
    if not text.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"[")):
        return "not JSON but other text, perhaps CSV: write every row as an object with named fields"
    return f"not JSON ({error})"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Rejects duplicate keys: json.loads would silently keep the last."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return fields


def _as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a row must be an object with named fields, not {type(value).__name__}")
    return value


def check_hub_id(source: str) -> tuple[str, str | None, str]:
    """(dataset, config or None, split or file), without contacting the hub. ValueError: not a hub id."""
    match = _HUB.fullmatch(source)
    parts = match and (match["repo"], match["config"], match["rest"])
    if match and ".." in (match["revision"] or ""):
        parts = None
    is_file = parts is not None and parts[2].endswith(SUFFIXES)
    if parts is None or (is_file and parts[1]) or (not is_file and "/" in parts[2]):
        raise ValueError(f"{source!r} is not a hub id; write {HUB_FORM}")
    return parts


def _download(source: str) -> tuple[str, list[Path]]:
    repo, config, rest = check_hub_id(source)
    revision = _HUB.fullmatch(source)["revision"]
    is_file = rest.endswith(SUFFIXES)
    pattern = rest if is_file else f"{config or '*'}/{rest}/*.parquet"
    form = f"{HUB_PREFIX}{{}}{f':{config}' if config else ''}/{rest}"
    folder = hub.download(hub.HubId(repo, revision), pattern, "dataset", None if is_file else PARQUET_BRANCH, form)
    paths = sorted(folder.glob(pattern))
    if not paths:
        pinned = f" (splits are on the branch {PARQUET_BRANCH}: pin a commit of it)" if revision and not is_file else ""
        raise ValueError(f"{source}: dataset {repo} has no files {pattern}; check the split{pinned}, or name one of "
                         "its files")
    configs = sorted({path.parent.parent.name for path in paths})
    if not is_file and len(configs) > 1:
        raise ValueError(f"{source}: {repo} has the configs {', '.join(configs)}; write hub:{repo}:CONFIG/{rest}")
    return f"{repo.split('/')[1]}-{Path(rest).stem}", paths
