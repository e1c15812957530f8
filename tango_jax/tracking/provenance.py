"""Where a run comes from: provenance.json in its workdir, and copies of the files that its settings name.

    {"attempts": [one record a start: time, command, versions, commit, devices ... (runtime/process.py),
                  "files": {key: sha256}, "weights": {key: digest}],
     "files": {key: {"path", "sha256", "copy"}} of the last start, with the copies in WORKDIR/user_files,
     "arm": the record of the arm (method/own_arm.py),
     "earlier": {key: digest} of the files of a method that was given up for the one of now}

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

from tango_jax.config import ROLES, flatten
from tango_jax.method.load import load_method
from tango_jax.method.own_arm import stored_arm
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically, write_json_atomic
from tango_jax.runtime.checkpoint import sampled_digest
from tango_jax.runtime.checks import cut, local_path
from tango_jax.runtime.console import Console
from tango_jax.runtime.process import LIBRARIES, process_facts
from tango_jax.runtime.user_code import Source, is_user_code, sources
from tango_jax.text.templates import is_template_file
from tango_jax.weights.from_hf import resolve_folder
from tango_jax.weights.source import kind_of
from tango_jax.weights.workdir import identify_weights

PROVENANCE = "provenance.json"
COPIES = "user_files"  # folder in the workdir
FUNCTIONS = ("arm", "task.name", "task.grader", *(f"{role}.{name}" for role in ROLES
                                                  for name in ("reward", "loss.algorithm", "loss.term")))  # fmt: skip
TEMPLATES = tuple(f"{role}.template" for role in ROLES)
# What is told when it differs from the start before.
_TOLD = ("tango_jax", "commit", "dirty", "source", "python", *LIBRARIES, "platform", "devices", "processes", "cpu")
_CONFIG = "config"  # an earlier version's key of the config file
_RESTORE = "restore it, or delete it: what the run was made with is then unknown, and changes of it go unnoticed"


@dataclasses.dataclass(frozen=True)
class Provenance:
    """One start of a run. `begin` makes it; the run's log (loggers.py) writes it into the workdir."""

    facts: dict[str, Any]  # see runtime/process.py
    files: dict[str, Source]  # in the first process, which writes them
    weights: dict[str, str] = dataclasses.field(default_factory=dict)  # see `_weights`
    arm: dict[str, Any] | None = None  # see `stored_arm`

    def keep(self, workdir: Path) -> None:
        """Write it into the workdir, unless it is there. For the first process. Raises OSError."""
        entries, stored = _entries(self.files), read_provenance(workdir)
        attempt = self.facts | {"files": _digests(entries), "weights": self.weights}
        attempts, earlier = stored.get("attempts", []), stored.get("earlier", {})
        if attempts and attempts[-1] == json.loads(json.dumps(attempt)):
            return
        if not stored and (given_up := _set_aside(workdir)):
            before = _read(given_up[-1])
            attempts, earlier = before["attempts"], method_digests(before)
        for key, file in self.files.items():
            if not (copy := workdir / entries[key]["copy"]).exists():
                write_atomically(copy, file.content)
        write_json_atomic(workdir / PROVENANCE, {"attempts": [*attempts, attempt], "files": entries, "arm": self.arm,
                                                 "earlier": earlier})  # fmt: skip


def begin(config: ConfigDict, workdir: Path, console: Console) -> Provenance:
    """Check that the method is the one that the run in this workdir began with, and log what else has changed.

    All processes must call this.

    Raises:
        ValueError: see `check_method`; or there are no weights to start from.
    """
    check_method(config, workdir)
    files = {}
    hosts.in_first(lambda: files.update(_user_files(config)))
    provenance = Provenance(process_facts(), files, _weights(config), _arm_record(config))
    if hosts.is_first() and _is_begun(workdir) and (stored := read_provenance(workdir)):
        last, now = stored["attempts"][-1], provenance.facts
        if changed := [key for key in _TOLD if key in last and last[key] != now[key]]:
            then, this = (", ".join(f"{key} {_shown(facts[key])}" for key in changed) for facts in (last, now))
            console.log(f"the last start of this run had {then}; it goes on with {this}")
    return provenance


def _arm_record(config: ConfigDict) -> dict[str, Any]:
    """What is stored of the arm, with the names of the prompts that its stage 1 teaches beside the roles' own."""
    method = load_method(config)
    further = {role: [prompt.name for prompt in method.further_prompts(role)] for role in ROLES}
    return stored_arm(config.arm) | {"further_prompts": further}


def check_method(config: ConfigDict, workdir: Path) -> None:
    """Check that the user's functions are as they were.

    Templates are compared by their text, where the checkpoint is read (loop/resume.py). All processes must call this.

    Raises:
        ValueError: a file has changed, is missing or is new; the message says how to accept that.
    """
    hosts.in_first(lambda: _check_method(config, workdir))


def _check_method(config: ConfigDict, workdir: Path) -> None:
    stored = read_provenance(workdir)
    if not stored or not _is_begun(workdir):
        return
    before, files = stored["files"], _entries(_user_files(config))
    then, now = _digests(before), _digests(files)
    differing = [key for key in sorted(then | now) if then.get(key) != now.get(key) and key not in TEMPLATES]
    if differing:
        aside = workdir / f"provenance.{len(_set_aside(workdir)) + 1}.json"
        accept = shlex.join(["mv", str(workdir / PROVENANCE), str(aside)])
        told = "; ".join(_difference(key, before.get(key), files.get(key), workdir) for key in differing)
        raise ValueError(f"{workdir} holds a run that was begun with another method ({told}): put back what was there, "
                         f"choose another --workdir, or accept the change with `{accept}`, after which the run "
                         "compares with none that was made by one method alone")


def _difference(key: str, then: dict | None, now: dict | None, workdir: Path) -> str:
    """What differs in one file; None: it takes no part."""
    if then is None:
        return f"{key}: {now['path']} is new"
    if now is None:
        return f"{key}: this start lacks {then['path']}"
    path = Path(now["path"])
    # An object that a Python program hands over has no file: its path is its name alone (runtime/user_code.py).
    if not path.is_absolute():
        return f"{key}: the text of the object {path.stem} differs from the one stored in {workdir / then['copy']}"
    return f"{key}: {path} has changed; {workdir / then['copy']} is a copy of what it was"


def _user_files(config: ConfigDict) -> dict[str, Source]:
    """{key: file} of the functions and templates that settings name. A function's other files, and those that an own
    arm names, have keys that begin with the setting's."""
    settings, found = flatten(config), {}
    named = {key: settings[key] for key in FUNCTIONS if is_user_code(settings[key])}
    for key, text in named.items():
        for number, source in enumerate(sources(key, text)):
            found[f"{key} ({source.path.name})" if number else key] = source
    for role, key in zip(ROLES, TEMPLATES, strict=True):
        if is_template_file(role, settings[key]):
            path = local_path(key, settings[key]).absolute()
            found[key] = Source(path, path.read_bytes())
    return found


def _entries(files: Mapping[str, Source]) -> dict[str, dict[str, str]]:
    """What provenance.json has of each file."""
    digests = {key: hashlib.sha256(file.content).hexdigest() for key, file in files.items()}
    return {key: {"path": str(file.path), "sha256": digests[key],
                  "copy": f"{COPIES}/{digests[key][:12]}-{file.path.name}"}
            for key, file in files.items()}  # fmt: skip


def _weights(config: ConfigDict) -> dict[str, str]:
    """{key: digest of its files} of the checkpoints and adapters that roles start from, before stage 1."""
    found = {}
    for role in ROLES:
        checkpoint, adapter = config[role].checkpoint, config[role].adapter
        if checkpoint:
            # The commit that a hub id has now is downloaded, as the run needs it anyway.
            place = str(resolve_folder(checkpoint)) if kind_of(checkpoint) == "hub" else checkpoint
            found[f"{role}.checkpoint"] = identify_weights(place, role)[1]
        if adapter not in ("", "generator"):
            found[f"{role}.adapter"] = sampled_digest(sorted(Path(adapter).expanduser().glob("*.safetensors")))
    return found


def read_provenance(workdir: Path) -> dict[str, Any]:
    """What is stored in a workdir, see the top of this file; empty where nothing is.

    Raises:
        ValueError: the file is damaged.
    """
    return _read(workdir / PROVENANCE)


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {_RESTORE}") from error
    if not isinstance(stored, dict) or not stored.get("attempts") or "files" not in stored:
        raise ValueError(f"{path} is damaged; {_RESTORE}")
    return stored


def _set_aside(workdir: Path) -> list[Path]:
    """The files of methods that were given up for another one, in their order."""
    numbered = (workdir / f"provenance.{number}.json" for number in itertools.count(1))
    return list(itertools.takewhile(Path.exists, numbered))


def method_digests(stored: Mapping[str, Any]) -> dict[str, str]:
    """{key: digest} of the functions and templates that a run was made with, given what `read_provenance` returned. A
    run that has changed its method compares with none that has not."""
    earlier = {f"{key} before": digest for key, digest in stored.get("earlier", {}).items()}
    return _digests(stored.get("files", {})) | earlier


def weights_digest(stored: Mapping[str, Any]) -> str:
    """A digest of the checkpoints and adapters that both roles start from, before stage 1; empty where there are none,
    or an earlier version has not recorded it."""
    found = dict.fromkeys(json.dumps(weights) for attempt in stored.get("attempts", ())
                          if (weights := attempt.get("weights")))  # fmt: skip
    return hashlib.sha256(" ".join(found).encode()).hexdigest()[:12] if found else ""


def _digests(files: Mapping[str, Mapping]) -> dict[str, str]:
    """{key: sha256}. Earlier versions also stored the config file, which counts where it changed the package."""
    return {key: entry["sha256"] for key, entry in files.items() if key != _CONFIG or "changes" in entry}


def describe(stored: Mapping[str, Any]) -> list[str]:
    """Lines about the starts of a run, given its provenance: code, machine and files, once for those that agree."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for number, attempt in enumerate(stored.get("attempts", ()), 1):
        alike.setdefault(_lines_about(attempt, stored["files"]), []).append(str(number))
    if len(alike) == 1:
        return list(*alike)
    return [f"start {', '.join(numbers)}: {line}" for lines, numbers in alike.items() for line in lines]


def _lines_about(attempt: Mapping[str, Any], files: Mapping[str, Mapping]) -> tuple[str, ...]:
    commit = attempt["commit"] and f", commit {attempt['commit'][:12]}{' with local changes' * bool(attempt['dirty'])}"
    names = {key: f"{Path(entry['path']).name}, " for key, entry in files.items()}
    return (f"tango_jax {attempt['tango_jax']}{commit or ''}, source {attempt['source']}; jax {attempt['jax']}, Python "
            f"{attempt['python']}; {_shown(attempt['devices'])} ({attempt['platform']}), {attempt['cpu']}",
            *(f"{key}: {names.get(key, '')}sha256 {digest[:12]}"
              for key, digest in attempt.get("files", {}).items()))  # fmt: skip


def summary_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The part of summary.json about the last start of a run, given its provenance."""
    names = ("tango_jax", "commit", "dirty", "source", "jax", "platform", "devices")
    last = {name: attempt[name] for attempt in stored.get("attempts", [])[-1:] for name in names}
    return last | {"files": method_digests(stored)}


def _is_begun(workdir: Path) -> bool:
    """Whether something in the workdir depends on the settings, and so on the files: they are stored together."""
    return (workdir / "config.json").is_file()


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{count} x {kind}" for kind, count in value.items())
    return cut(str(value), 40)
