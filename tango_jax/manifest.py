"""Seals a folder with the sha256 of every file in it, gives it its number, and finds the newest one still intact.

In: a folder that is fully written. Out: `manifest.sha256` inside it, in the format `sha256sum -c` reads too.
Stage: the end of a save of a checkpoint and the start of its restore. Array stores miss a flipped byte: this does not.
"""

import hashlib
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger(__name__)

MANIFEST = "manifest.sha256"
SAVING, REPLACED, REMOVED = ".saving", ".replaced", ".removed"  # folders on their way in, aside and out
NO_STEP, ALL_DAMAGED = -1, -2
HASH_THREADS = 8  # hashing releases the interpreter lock


def write_manifest(folder: Path) -> None:
    """Write the manifest so that it either exists whole, on disk, or not at all."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = list(pool.map(lambda name: _sha256(folder / name), names))
    partial = folder / f"{MANIFEST}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.writelines(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / MANIFEST)
    _sync_directory(folder)


def find_damage(folder: Path) -> str | None:
    """None if every listed file has its bytes, else one clause that names the first file that has not."""
    try:
        text = (folder / MANIFEST).read_bytes().decode("utf-8")
        rows = [line.split("  ", 1) for line in text.removesuffix("\n").split("\n")]
        expected = {name: digest for digest, name in rows}
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        clauses = pool.map(lambda name: _file_damage(folder, name, expected[name]), sorted(expected))
        return next((clause for clause in clauses if clause is not None), None)


def newest_verified(directory: Path) -> int:
    """The newest step whose bytes are intact, or NO_STEP or ALL_DAMAGED; each damaged one is logged in one line."""
    steps = complete_steps(directory)
    for path in _numbered_folders(directory):
        if int(path.name) not in steps:
            log.warning("checkpoint %s has no %s: it is not complete and is ignored", path, MANIFEST)
    for position in reversed(range(len(steps))):
        path = directory / str(steps[position])
        damage = find_damage(path)
        if damage is None:
            return steps[position]
        then = f"falling back to step {steps[position - 1]}" if position else "no earlier step is left"
        log.warning("checkpoint %s is damaged: %s; %s", path, damage, then)
    return ALL_DAMAGED if steps else NO_STEP


def complete_steps(directory: Path) -> list[int]:
    """The numbers of the sealed folders, smallest first."""
    return sorted(int(path.name) for path in _numbered_folders(directory) if (path / MANIFEST).is_file())


def commit(saving: Path, final: Path) -> None:
    """Give a sealed folder its name; a folder that has the name already can be put back until that is done."""
    replaced = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        os.replace(final, replaced)
    os.replace(saving, final)
    _sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete a folder, first out of sight: a kill half-way leaves nothing that looks complete."""
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
            # Writer threads of an interrupted save may still add files; what remains then goes at the next start.
            shutil.rmtree(leftover, ignore_errors=True)


def _sync_directory(folder: Path) -> None:
    """Flush a folder's list of names: a rename outlives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_damage(folder: Path, name: str, expected: str) -> str | None:
    try:
        return None if _sha256(folder / name) == expected else f"{name} has changed since it was written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _numbered_folders(directory: Path) -> list[Path]:
    return [path for path in directory.glob("[0-9]*")
            if path.name.isdecimal() and str(int(path.name)) == path.name and path.is_dir()]
