"""Where a run comes from: provenance.json in its workdir, and copies of the user's files that take part in it.

    {"attempts": [one record a start: time, command, versions, commit, devices ... (runtime/process.py)],
     "files": {key: {"path", "sha256", "copy", "changes"}},
     "arm": the record of an arm of the user's (tasks/own_arm.py), or null}

`files` are those of the user (user_files.py), whose copies lie in WORKDIR/user_files.

Takes the configuration and the workdir; returns a record for the run to keep when it writes its config.json, or raises
one error where the method is no longer the one that the run began with. Runs before any long work.
"""

import dataclasses
import hashlib
import itertools
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically, write_json_atomic
from tango_jax.runtime.checks import cut
from tango_jax.runtime.console import Console
from tango_jax.runtime.process import LIBRARIES, process_facts
from tango_jax.tasks.own_arm import stored_arm
from tango_jax.tracking.user_files import CONFIG, TEMPLATES, UserFile, config_files, user_files

PROVENANCE = "provenance.json"
# What is told when it differs from the start before.
_TOLD = ("tango_jax", "commit", "dirty", "source", "python", *LIBRARIES, "platform", "devices", "processes", "cpu")

_RESTORE = "restore it, or delete it: what the run was made with is then unknown, and changes of it go unnoticed"


@dataclasses.dataclass(frozen=True)
class Provenance:
    """One start of a run. `begin` makes it; the run's log (loggers.py) writes it into the workdir."""

    facts: dict[str, Any]  # see runtime/process.py
    files: dict[str, UserFile]  # in the first process, which writes them
    arm: dict[str, Any] | None = None  # see `stored_arm`

    def keep(self, workdir: Path) -> None:
        """Write it into the workdir, unless it is there. For the first process. Raises OSError."""
        stored, entries = read_provenance(workdir), {key: file.entry for key, file in self.files.items()}
        attempt = self.facts | {"files": {key: entry["sha256"] for key, entry in entries.items()}}
        attempts = stored.get("attempts", [])
        if attempts and attempts[-1] == json.loads(json.dumps(attempt)):
            return
        for key, file in self.files.items():
            if not (copy := workdir / entries[key]["copy"]).exists():
                write_atomically(copy, file.content)
        files = stored.get("files", {}) | entries
        write_json_atomic(workdir / PROVENANCE, {"attempts": [*attempts, attempt], "files": files, "arm": self.arm})


def begin(config: ConfigDict, workdir: Path, console: Console) -> Provenance:
    """Check that the method is the one that the run in this workdir began with, and log what else has changed.

    All processes must call this.

    Raises:
        ValueError: see `check_method`.
    """
    check_method(config, workdir)
    files = {}
    hosts.in_first(lambda: files.update(user_files(config)))
    provenance = Provenance(process_facts(), files, stored_arm(config.arm))
    for file in provenance.files.values():
        if file.changes:
            console.log(f"{file.path} changes the package: {_listed(file.changes)}")
    if hosts.is_first() and _is_begun(workdir):
        for line in _told(read_provenance(workdir), provenance):
            console.log(line)
    return provenance


def check_method(config: ConfigDict, workdir: Path) -> None:
    """Check that the functions of the user, and what config files change in the package, are as they were.

    Templates are compared by their text, where the checkpoint is read (loop/resume.py). All processes must call this.

    Raises:
        ValueError: a file has changed, is missing or is new; the message says how to accept that.
    """
    hosts.in_first(lambda: _check_method(config, workdir))


def _check_method(config: ConfigDict, workdir: Path) -> None:
    stored = read_provenance(workdir)
    if not stored or not _is_begun(workdir):
        return
    entries = {key: file.entry for key, file in user_files(config).items()}
    then, now = (_digests(files) for files in (stored["files"], entries))
    differing = [key for key in sorted(then | now) if then.get(key) != now.get(key) and key not in TEMPLATES]
    if differing:
        places = (workdir / f"provenance.{number}.json" for number in itertools.count(1))
        free = next(path for path in places if not path.exists())
        accept = shlex.join(["mv", str(workdir / PROVENANCE), str(free)])
        told = "; ".join(_difference(key, stored["files"].get(key) if key in then else None,
                                     entries.get(key) if key in now else None, workdir) for key in differing)
        raise ValueError(f"{workdir} holds a run that was begun with another method ({told}): put back what was there, "
                         f"choose another --workdir, or accept the change with `{accept}`")


def _difference(key: str, then: dict | None, now: dict | None, workdir: Path) -> str:
    """What differs in one file; None: it takes no part."""
    if then is None:
        return f"{key}: {now['path']} is new" + (f", and changes {_listed(now['changes'])}" if "changes" in now else "")
    if now is None:
        what = f", which changes {_listed(then['changes'])}: give --config={then['path']}" if "changes" in then else ""
        return f"{key}: this start lacks {then['path']}{what}"
    path = Path(now["path"])
    # An object that a Python program hands over has no file: its path is its name alone (runtime/user_code.py).
    if not path.is_absolute():
        return f"{key}: the text of the object {path.stem} differs from the one stored in {workdir / then['copy']}"
    return f"{key}: {path} has changed; {workdir / then['copy']} is a copy of what it was"


def check_stored_changes(settings_file: Path) -> None:
    """Check that the settings of a run are all that it was made with: they execute nothing.

    Args:
        settings_file: its config.json.

    Raises:
        ValueError: the run was made with a config file that changes the package, and these changes are not in force in
            this process.
    """
    stored = read_provenance(settings_file.parent).get("files", {})
    now = _digests({key: file.entry for key, file in config_files().items()})
    for key, entry in stored.items():
        if "changes" in entry and key not in now:  # a file that has changed is the business of `check_method`
            raise ValueError(f"{settings_file} has the settings of the run alone, which was made with {entry['path']}, "
                             f"and this file changes {_listed(entry['changes'])}: give --config={entry['path']}")


def same_settings_hint(settings_file: Path) -> str:
    """What to give to have the settings of a run again."""
    for entry in read_provenance(settings_file.parent).get("files", {}).values():
        if "changes" in entry:
            return f"--config={entry['path']} with them, since it also changes the package: {settings_file} lists them"
    return f"--config={settings_file} has them"


def read_provenance(workdir: Path) -> dict[str, Any]:
    """What is stored in a workdir, see the top of this file; empty where nothing is.

    Raises:
        ValueError: the file is damaged.
    """
    path = workdir / PROVENANCE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {_RESTORE}") from error
    if not isinstance(stored, dict) or not stored.get("attempts") or "files" not in stored:
        raise ValueError(f"{path} is damaged; {_RESTORE}")
    return stored


def method_files(workdir: Path) -> dict[str, str]:
    """{key: sha256} of every file that changes the method of the run in a workdir; empty where nothing is stored.

    These are the functions and templates of the user, and config files that change the package: the digest of such a
    file is over its changes, too.

    Raises:
        ValueError: see `read_provenance`.
    """
    return method_digests(read_provenance(workdir))


def method_digests(stored: Mapping[str, Any]) -> dict[str, str]:
    """`method_files` of what `read_provenance` returned."""
    return _digests(stored.get("files", {}))


def _digests(files: Mapping[str, Mapping]) -> dict[str, str]:
    digests = {}
    for key, entry in files.items():
        if "changes" in entry:
            text = json.dumps([entry["sha256"], entry["changes"]], sort_keys=True)
            digests[key] = hashlib.sha256(text.encode()).hexdigest()
        elif key != CONFIG:
            digests[key] = entry["sha256"]
    return digests


def package_changes(stored: Mapping[str, Any]) -> list[str]:
    """What config files have changed in the package, given what `read_provenance` returned for a run."""
    return [name for entry in stored.get("files", {}).values() for name in entry.get("changes", ())]


def describe(stored: Mapping[str, Any]) -> list[str]:
    """Lines about the last start of a run, given its provenance: code, machine, files, changes."""
    if not stored:
        return []
    last = stored["attempts"][-1]
    commit = f", commit {last['commit'][:12]}{' with local changes' * bool(last['dirty'])}" if last["commit"] else ""
    lines = [f"tango_jax {last['tango_jax']}{commit}, source {last['source']}; jax {last['jax']}, Python "
             f"{last['python']}; {_shown(last['devices'])} ({last['platform']}), {last['cpu']}"]  # fmt: skip
    lines += [f"{key}: {Path(entry['path']).name}, sha256 {entry['sha256'][:12]}"
              for key, entry in stored["files"].items()]  # fmt: skip
    if changes := package_changes(stored):
        lines.append(f"changed in the package: {_listed(changes)}")
    return lines


def summary_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The part of summary.json about the last start of a run, given its provenance."""
    if not stored:
        return {}
    names = ("tango_jax", "commit", "dirty", "source", "jax", "platform", "devices")
    files = {key: entry["sha256"] for key, entry in stored["files"].items()}
    return {name: stored["attempts"][-1][name] for name in names} | {
        "files": files, "changes": package_changes(stored)
    }  # fmt: skip


def _is_begun(workdir: Path) -> bool:
    """Whether something in the workdir depends on the settings, and so on the files: they are stored together."""
    return (workdir / "config.json").is_file()


def _told(stored: Mapping[str, Any], provenance: Provenance) -> list[str]:
    """What has changed since the last start and may."""
    if not stored:
        return []
    lines, last, now = [], stored["attempts"][-1], provenance.facts
    changed = [key for key in _TOLD if key in last and last[key] != now[key]]
    if changed:
        then, this = (", ".join(f"{key} {_shown(facts[key])}" for key in changed) for facts in (last, now))
        lines.append(f"the last start of this run had {then}; it goes on with {this}")
    before, file = stored["files"].get(CONFIG), provenance.files.get(CONFIG)
    if before and file and not file.changes and before["sha256"] != file.entry["sha256"]:
        lines.append(f"{file.path} has changed since this run began, and the settings are the same")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{count} x {kind}" for kind, count in value.items())
    return cut(str(value), 40)


def _listed(names: Mapping[str, str] | list[str]) -> str:
    return cut(", ".join(names), 300)
