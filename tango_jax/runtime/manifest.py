"""Seals a folder with the sha256 of every file in it, renames it to its step, and finds the newest intact step.

`manifest.sha256` is in the format of `sha256sum -c`; `seal.json`, which it covers too, holds the step and the number of
files. Array stores do not detect a flipped byte; this does.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tango_jax.runtime.atomic import sync_directory, write_atomically

log = logging.getLogger(__name__)

MANIFEST, SEAL = "manifest.sha256", "seal.json"
SAVING, REPLACED, REMOVED = ".saving", ".replaced", ".removed"  # suffixes of temporary folders
NO_STEP, ALL_DAMAGED = -1, -2
BLOCKS, BLOCK_BYTES = 64, 4096  # the parts of a file that `sampled_digest` reads
HASH_THREADS = 8  # hashing releases the GIL


def seal(folder: Path, step: int) -> None:
    """Add the seal and then, atomically, the manifest, once everything else has been written. `step` is the number that
    the folder will have, so that one renamed to another step is detected."""
    write_atomically(folder / SEAL, json.dumps({"step": step, "files": len(_file_names(folder)) + 1}) + "\n")
    names = _file_names(folder)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = list(pool.map(lambda name: _sha256(folder / name), names))
    write_atomically(folder / MANIFEST, _manifest_text(dict(zip(names, digests, strict=True))))


def find_damage(folder: Path, below: str = "") -> str | None:
    """None if the folder holds exactly the files of its manifest and the step of its name, else one clause that names
    the first difference. `below` restricts the check of bytes to the seal and the files whose path starts with it."""
    try:
        expected = _read_manifest(folder)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({getattr(error, 'strerror', None) or error})"
    if extra := sorted(set(_file_names(folder)) - expected.keys()):
        return f"{extra[0]} is not in {MANIFEST}"
    if SEAL not in expected:
        return f"{SEAL} is missing"
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        names = [name for name in sorted(expected) if name.startswith((below, SEAL))]
        clauses = pool.map(lambda name: _file_damage(folder, name, expected[name]), names)
        damage = next((clause for clause in clauses if clause is not None), None)
    return damage or _seal_damage(folder, len(expected))


def newest_verified(directory: Path, below: str = "") -> int:
    """The newest intact step, NO_STEP or ALL_DAMAGED; damaged steps are logged. For `below` see `find_damage`."""
    steps = complete_steps(directory)
    for position in reversed(range(len(steps))):
        path = directory / str(steps[position])
        damage = find_damage(path, below)
        if damage is None:
            return steps[position]
        then = f"falling back to step {steps[position - 1]}" if position else "no earlier step is left"
        log.warning("checkpoint %s is damaged: %s; %s", path, damage, then)
    return ALL_DAMAGED if steps else NO_STEP


def complete_steps(directory: Path) -> list[int]:
    """The steps of the numbered folders, in ascending order. Folders are sealed before they get their number, so one
    without a manifest is damaged, not unfinished."""
    return sorted(int(path.name) for path in directory.glob("[0-9]*")
                  if path.name.isdecimal() and str(int(path.name)) == path.name and path.is_dir())


def fingerprint_of_files(folder: Path) -> tuple:
    """Names, sizes and modification times of a folder's files, to detect later changes."""
    stats = [(name, (folder / name).stat()) for name in _file_names(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats)


def sampled_digest(files: Iterable[Path]) -> str:
    """A digest of the sizes of large files and of BLOCKS blocks spread over each, to tell two versions apart without
    reading all of either; a copy with other times has the same."""
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = path.stat().st_size
            found.update(f"{path.name} {size} ".encode())
            for block in range(BLOCKS):
                file.seek(max(0, size - BLOCK_BYTES) * block // (BLOCKS - 1))
                found.update(file.read(BLOCK_BYTES))
    return found.hexdigest()[:16]


def commit(saving: Path, final: Path) -> None:
    """Rename a sealed folder to its final name. A folder with that name can be put back until the rename is done."""
    replaced = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        os.replace(final, replaced)
    os.replace(saving, final)
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete a folder, renaming it first, so that a kill half-way leaves nothing that looks complete."""
    removed = folder.with_name(f"{folder.name}{REMOVED}")
    os.replace(folder, removed)
    shutil.rmtree(removed)


def clean_up(directory: Path) -> None:
    """Undo what a kill, an interrupt or a full disk left behind in a directory of numbered folders."""
    for replaced in directory.glob(f"[0-9]*{REPLACED}"):
        final = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if not final.exists():
            os.replace(replaced, final)
    for suffix in (SAVING, REPLACED, REMOVED):
        for leftover in directory.glob(f"[0-9]*{suffix}*"):
            # Writer threads of an interrupted save may still add files; these are removed at the next start.
            shutil.rmtree(leftover, ignore_errors=True)


def _manifest_text(digests: dict[str, str]) -> str:
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))


def _read_manifest(folder: Path) -> dict[str, str]:
    """name -> sha256. Raises ValueError for anything that `seal` would not have written."""
    text = (folder / MANIFEST).read_bytes().decode("utf-8")
    expected = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (.+)$", text, re.MULTILINE)}
    if not expected or _manifest_text(expected) != text:
        raise ValueError("it has changed since it was written")
    return expected


def _seal_damage(folder: Path, num_files: int) -> str | None:
    found = json.loads((folder / SEAL).read_bytes())  # its sha256 has been verified
    if found["files"] != num_files:
        return f"{MANIFEST} lists {num_files} of {found['files']} files"
    return None if str(found["step"]) == folder.name else f"it holds step {found['step']}"


def _file_names(folder: Path) -> list[str]:
    """Relative paths of all files below a folder, except the manifest."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return sorted(names - {MANIFEST})


def _file_damage(folder: Path, name: str, expected: str) -> str | None:
    try:
        return None if _sha256(folder / name) == expected else f"{name} has changed since it was written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

