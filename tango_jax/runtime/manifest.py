"""Seals a folder with the sha256 of every file in it, gives it its number, and finds the newest one still intact.

In: a folder that is fully written. Out: `manifest.sha256` inside it, in the format `sha256sum -c` reads too, and
`seal.json`, one of the files in it, which says which step the folder holds and how many files it has.
Stage: the end of a save of a checkpoint and the start of its restore. Array stores miss a flipped byte: this does not.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tango_jax.runtime.atomic import sync_directory, write_atomically

log = logging.getLogger(__name__)

MANIFEST, SEAL = "manifest.sha256", "seal.json"
SAVING, REPLACED, REMOVED = ".saving", ".replaced", ".removed"  # folders on their way in, aside and out
NO_STEP, ALL_DAMAGED = -1, -2
HASH_THREADS = 8  # hashing releases the interpreter lock


def write_seal(folder: Path, step: int) -> None:
    """Write the number that the folder will have, so that another step's content under it is seen. Comes before
    `write_manifest`, and after everything else."""
    write_atomically(folder / SEAL, json.dumps({"step": step, "files": len(_file_names(folder)) + 1}) + "\n")


def write_manifest(folder: Path) -> None:
    """Write the manifest so that it either exists whole, on disk, or not at all."""
    names = _file_names(folder)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = list(pool.map(lambda name: _sha256(folder / name), names))
    write_atomically(folder / MANIFEST, _manifest_text(dict(zip(names, digests, strict=True))))


def find_damage(folder: Path, below: str = "") -> str | None:
    """None if the folder holds the files of its manifest, byte for byte, and no others, and is the step that its name
    says; else one clause that names the first difference. Folders of before there was a seal pass without one.

    `below`: verify the bytes of the seal and of the files below this subfolder only, to be quick.
    """
    try:
        expected = _read_manifest(folder)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({getattr(error, 'strerror', None) or error})"
    if extra := sorted(set(_file_names(folder)) - expected.keys()):
        return f"{extra[0]} is not in {MANIFEST}"
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        names = [name for name in sorted(expected) if name.startswith((below, SEAL))]
        clauses = pool.map(lambda name: _file_damage(folder, name, expected[name]), names)
        damage = next((clause for clause in clauses if clause is not None), None)
    return damage or (_seal_damage(folder, len(expected)) if SEAL in expected else None)


def newest_verified(directory: Path, below: str = "") -> int:
    """The newest step whose bytes are intact, or NO_STEP or ALL_DAMAGED; each damaged one is logged in one line.
    `below`: see `find_damage`."""
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
    """The numbers of the folders named by one, smallest first. Each was sealed before it got its number; one that has
    no manifest is damaged, not unfinished."""
    return sorted(int(path.name) for path in _numbered_folders(directory))


def fingerprint_of_files(folder: Path) -> tuple:
    """Names, sizes and times of change of a folder's files: equal as long as nobody has touched them."""
    stats = [(name, (folder / name).stat()) for name in _file_names(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats)


def commit(saving: Path, final: Path) -> None:
    """Give a sealed folder its name; a folder that has the name already can be put back until that is done."""
    replaced = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        os.replace(final, replaced)
    os.replace(saving, final)
    sync_directory(final.parent)
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


def _manifest_text(digests: dict[str, str]) -> str:
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))


def _read_manifest(folder: Path) -> dict[str, str]:
    """name -> sha256. Raises ValueError for anything that `write_manifest` would not have written."""
    text = (folder / MANIFEST).read_bytes().decode("utf-8")
    expected = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (.+)$", text, re.MULTILINE)}
    if not expected or _manifest_text(expected) != text:
        raise ValueError("it is not as it was written")
    return expected


def _seal_damage(folder: Path, num_files: int) -> str | None:
    seal = json.loads((folder / SEAL).read_bytes())  # its bytes are as they were written
    if seal["files"] != num_files:
        return f"{MANIFEST} lists {num_files} of {seal['files']} files"
    return None if str(seal["step"]) == folder.name else f"it holds step {seal['step']}"


def _file_names(folder: Path) -> list[str]:
    """All files below a folder but its manifest, relative to it."""
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


def _numbered_folders(directory: Path) -> list[Path]:
    return [path for path in directory.glob("[0-9]*")
            if path.name.isdecimal() and str(int(path.name)) == path.name and path.is_dir()]
