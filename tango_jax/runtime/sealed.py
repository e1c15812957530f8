"""Folders of checkpoints on disk: sealed with a digest of every file, renamed when they are whole, checked before use.

The seal is `manifest.sha256`, for `sha256sum -c`, and `seal.json`, with the step and the number of files.
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
from tango_jax.runtime.stored_arrays import STATE, VALUES, files_with
from tango_jax.runtime.trees import prefix_of

log = logging.getLogger(__name__)

MANIFEST, SEAL = "manifest.sha256", "seal.json"
SAVING, REPLACED, REMOVED = ".saving", ".replaced", ".removed"  # suffixes of temporary folders
NO_STEP, ALL_DAMAGED = -1, -2
BLOCKS, BLOCK_BYTES = 64, 4096  # the parts of a file that `sampled_digest` reads
HASH_THREADS, HASH_BYTES = 8, 2**22  # hashing releases the GIL; training goes on, so it is seldom taken back


def digests_of(folder: Path, process: int = 0) -> dict[str, str]:
    """{name: sha256} of the files that a process wrote; the first one also wrote all that are not in such a folder."""
    names = [name for name in _file_names(folder) if _writer(name) == process]
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True))


def _writer(name: str) -> int:
    found = re.search(r"/ocdbt\.process_(\d+)/", name)
    return int(found[1]) if found else 0


def seal(folder: Path, step: int, digests: dict[str, str]) -> None:
    """Add seal and manifest, last. The seal's `step` shows that a folder was renamed to another step."""
    if differing := set(_file_names(folder)) ^ digests.keys():
        raise RuntimeError(f"{min(differing)} is not seen by all processes: is {folder} on a disk that they share?")
    write_atomically(folder / SEAL, json.dumps({"step": step, "files": len(digests) + 1}) + "\n")
    write_atomically(folder / MANIFEST, manifest_text(digests | {SEAL: _sha256(folder / SEAL)}))


def find_damage(folder: Path, below: str = "", part: tuple[str, ...] = ()) -> str | None:
    """The first difference from manifest and seal, or None. `below`: only files with this prefix are hashed; `part`:
    only those with arrays of this branch."""
    try:
        expected = _read_manifest(folder)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({getattr(error, 'strerror', None) or error})"
    if extra := sorted(set(_file_names(folder)) - expected.keys()):
        return f"{extra[0]} is not in {MANIFEST}"
    if SEAL not in expected:
        return f"{SEAL} is missing"
    names = [name for name in sorted(expected) if name.startswith((below, SEAL))]
    values = [name for name in names if part and VALUES.match(name)]
    damage = _first_damage(folder, [name for name in names if name not in set(values)], expected)
    if damage is None and values:
        try:  # these are intact
            needed = files_with(folder, prefix_of(part))
        except ValueError as error:
            return f"{STATE} cannot be read ({' '.join(str(error).split())})"
        damage = _first_damage(folder, [name for name in values if needed is None or name in needed], expected)
    return damage or _seal_damage(folder, len(expected))


def _first_damage(folder: Path, names: list[str], expected: dict[str, str]) -> str | None:
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        clauses = pool.map(lambda name: _file_damage(folder, name, expected[name]), names)
        return next((clause for clause in clauses if clause is not None), None)


def newest_verified(directory: Path, below: str = "", part: tuple[str, ...] = (), only: int | None = None) -> int:
    """The newest intact step, NO_STEP or ALL_DAMAGED. `below` and `part`: see `find_damage`; `only`: a step."""
    steps = [step for step in complete_steps(directory) if only in (None, step)]
    for position in reversed(range(len(steps))):
        path = directory / str(steps[position])
        damage = find_damage(path, below, part)
        if damage is None:
            return steps[position]
        then = f"falling back to step {steps[position - 1]}" if position else "no earlier step is left"
        log.warning("checkpoint %s is damaged: %s; %s", path, damage, then)
    return ALL_DAMAGED if steps else NO_STEP


def complete_steps(directory: Path) -> list[int]:
    """Ascending. A folder without a manifest is damaged, not unfinished."""
    return sorted(int(path.name) for path in directory.glob("[0-9]*")
                  if path.name.isdecimal() and str(int(path.name)) == path.name and path.is_dir())


def fingerprint_of_files(folder: Path) -> tuple:
    stats = [(name, (folder / name).stat()) for name in _file_names(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats)


def sampled_digest(files: Iterable[Path]) -> str:
    """A digest of the sizes and BLOCKS blocks of large files: quick, and enough to tell versions apart."""
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
    replaced = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        os.replace(final, replaced)
    os.replace(saving, final)
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(folder: Path) -> None:
    """Renames first: a kill half-way leaves nothing that looks complete."""
    removed = folder.with_name(f"{folder.name}{REMOVED}")
    os.replace(folder, removed)
    shutil.rmtree(removed)


def clean_up(directory: Path) -> None:
    """Undo what a kill, an interrupt or a full disk left."""
    for replaced in directory.glob(f"[0-9]*{REPLACED}"):
        final = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if not final.exists():
            os.replace(replaced, final)
    for suffix in (SAVING, REPLACED, REMOVED):
        for leftover in directory.glob(f"[0-9]*{suffix}*"):
            # Threads of an interrupted save may still add files; the next start removes these.
            shutil.rmtree(leftover, ignore_errors=True)


def manifest_text(digests: dict[str, str]) -> str:
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))


def _read_manifest(folder: Path) -> dict[str, str]:
    text = (folder / MANIFEST).read_bytes().decode("utf-8")
    expected = parse_manifest(text)
    if not expected or manifest_text(expected) != text:
        raise ValueError("it has changed since it was written")
    return expected


def parse_manifest(text: str) -> dict[str, str]:
    return {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (.+)$", text, re.MULTILINE)}


def _seal_damage(folder: Path, num_files: int) -> str | None:
    found = json.loads((folder / SEAL).read_bytes())  # its sha256 has been verified
    if found["files"] != num_files:
        return f"{MANIFEST} lists {num_files} of {found['files']} files"
    return None if str(found["step"]) == folder.name else f"it holds step {found['step']}"


def _file_names(folder: Path) -> list[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return sorted(names - {MANIFEST})


def _file_damage(folder: Path, name: str, expected: str) -> str | None:
    try:
        return None if _sha256(folder / name) == expected else f"{name} has changed since it was written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def _sha256(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(HASH_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()
