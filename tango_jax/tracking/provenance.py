"""Where a run comes from: provenance.json in its workdir, and copies of the files that its settings name.

    {"attempts": [one record a start: time, command, versions, commit, devices ... (runtime/process.py),
                  "files": {key: sha256}, "weights": {key: digest}],
     "files": {key: {"path", "sha256", "copy"}} of the last start, with the copies in WORKDIR/user_files,
     "arm": the record of the arm (method/own_arm.py),
     "fork": of a fork, {"run": the other run's workdir, "turn", "digest": of its checkpoint, "is_task", "is_arm",
             "is_judge", "is_batch": whether that run had this task, this arm and turns of this size, and its verifier
             judged as here},
     "earlier": {key: digest} of the files of a method that was given up for the one of now}
"""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.config import ROLES, flatten
from tango_jax.method.load import load_method
from tango_jax.method.own_arm import arm_name, role_of_weights, stored_arm
from tango_jax.rl.own_reward import name_of
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically, write_json_atomic
from tango_jax.runtime.checks import cut, local_path
from tango_jax.runtime.console import Console
from tango_jax.runtime.process import LIBRARIES, process_facts
from tango_jax.runtime.sealed import complete_steps, sampled_digest
from tango_jax.runtime.user_code import Source, is_user_code, sources
from tango_jax.tasks.registry import teaches_further_prompts
from tango_jax.text.templates import is_template_file
from tango_jax.tracking.run_config import changes_results, without_folder
from tango_jax.weights.from_hf import resolve_folder
from tango_jax.weights.source import kind_of
from tango_jax.weights.workdir import identify_weights, read_config

PROVENANCE = "provenance.json"
GIVEN_UP = "provenance.before.json"  # a user renames provenance.json to it, to go on with another method
COPIES = "user_files"  # folder in the workdir
FUNCTIONS = ("arm", "task.name", "task.grader", *(f"{role}.{name}" for role in ROLES
                                                  for name in ("rewards", "loss.algorithm", "loss.term")))
TEMPLATES = tuple(f"{role}.template" for role in ROLES)
# Of what the verifier reads and how it answers; rl.step_reward takes other rewards from the same judgements.
JUDGING = (*(f"verifier.{name}" for name in ("template", "use_chat", "stop_at_first_error", "max_prompt",
                                             "max_response", "temperature", "top_p", "top_k")),
           "rl.verifications_per_solution")
TURN_SIZES = ("rl.prompts_per_step", "rl.samples_per_prompt", "rl.dynamic_sampling")
_TOLD = ("tango_jax", "commit", "dirty", "source", "python", *LIBRARIES, "platform", "devices", "processes", "cpu")
_RESTORE = "restore it; if you delete it, nobody can tell what made the run, and changes go unnoticed"


@dataclasses.dataclass(frozen=True)
class Provenance:
    facts: dict[str, Any]  # see runtime/process.py
    files: dict[str, Source]  # in the first process, which writes them
    weights: dict[str, str] = dataclasses.field(default_factory=dict)  # see `_weights`
    arm: dict[str, Any] | None = None  # see `stored_arm`
    fork: dict[str, Any] | None = None

    def keep(self, workdir: Path) -> None:
        """Write it into the workdir, unless it is there. Only the first process calls this. Raises OSError."""
        entries, stored = _entries(self.files), read_provenance(workdir)
        attempt = self.facts | {"files": _digests(entries), "weights": self.weights}
        if not stored and (before := _read(workdir / GIVEN_UP)):
            stored = before | {"earlier": method_digests(before)}
        attempts = stored.get("attempts", [])
        if attempts and attempts[-1] == json.loads(json.dumps(attempt)):
            return
        for key, file in self.files.items():
            if not (copy := workdir / entries[key]["copy"]).exists():
                write_atomically(copy, file.content)
        now = {"attempts": [*attempts, attempt], "files": entries, "arm": self.arm}
        now |= {"fork": self.fork} if self.fork else {}
        write_json_atomic(workdir / PROVENANCE, stored | now)


def begin(config: ConfigDict, workdir: Path, console: Console) -> Provenance:
    """`check_method`, and log other changes since the last start. All processes must call this. Raises ValueError."""
    check_method(config, workdir)
    files = {}
    hosts.in_first(lambda: files.update(_user_files(config)))
    method, is_taught = load_method(config), teaches_further_prompts(config)
    further = {role: [*method.taught_prompts(role)] if is_taught else [] for role in ROLES}
    arm = stored_arm(config.arm) | {"further_prompts": further}
    fork = hosts.from_first(_fork(config, workdir, files))
    provenance = Provenance(process_facts(), files, _weights(config), arm, fork)
    if hosts.is_first() and _is_begun(workdir) and (stored := read_provenance(workdir)):
        last, now = stored["attempts"][-1], provenance.facts
        if changed := [key for key in _TOLD if key in last and last[key] != now[key]]:
            then, this = (", ".join(f"{key} {_shown(facts[key])}" for key in changed) for facts in (last, now))
            console.log(f"the last start of this run had {then}; it goes on with {this}")
    return provenance


def check_method(config: ConfigDict, workdir: Path) -> None:
    """Raises ValueError if a file of user functions is changed, missing or new. All processes must call this.
    Templates are compared by their text, in loop/resume.py."""
    hosts.in_first(lambda: _check_method(config, workdir))


def _check_method(config: ConfigDict, workdir: Path) -> None:
    stored = read_provenance(workdir)
    if not stored or not _is_begun(workdir):
        return
    before, files = stored["files"], _entries(_user_files(config))
    then, now = _digests(before), _digests(files)
    differing = [key for key in sorted(then | now) if then.get(key) != now.get(key) and key not in TEMPLATES]
    if differing:
        told = "; ".join(_difference(key, before.get(key), files.get(key), workdir) for key in differing)
        accept = shlex.join(["mv", str(workdir / PROVENANCE), str(workdir / GIVEN_UP)])
        raise ValueError(f"{workdir} holds a run that was begun with another method ({told}): put back what was there, "
                         f"choose another --workdir, or accept the change with `{accept}`; the run is then not "
                         "comparable with runs made by one method")


def _difference(key: str, then: dict | None, now: dict | None, workdir: Path) -> str:
    if then is None:
        return f"{key}: {now['path']} is new"
    if now is None:
        return f"{key}: this start lacks {then['path']}"
    path = Path(now["path"])
    # An object from a Python program has no file: its path is its name (runtime/user_code.py).
    if not path.is_absolute():
        return f"{key}: the text of the object {path.stem} differs from the one stored in {workdir / then['copy']}"
    return f"{key}: {path} has changed; {workdir / then['copy']} is a copy of what it was"


def _user_files(config: ConfigDict) -> dict[str, Source]:
    """{key: file} of functions and templates in the settings. Keys of a function's other files begin with its key."""
    settings, found = flatten(config), {}
    named = {key: settings[key] for key in FUNCTIONS if isinstance(settings[key], str)}
    named |= {f"{key} ({name_of(text)})": text for key in FUNCTIONS if isinstance(settings[key], tuple)
              for text in settings[key]}
    for key, text in named.items():
        for number, source in enumerate(sources(key, text) if is_user_code(text) else ()):
            found[f"{key} ({source.path.name})" if number else key] = source
    for role, key in zip(ROLES, TEMPLATES, strict=True):
        if is_template_file(role, settings[key]):
            path = local_path(key, settings[key]).absolute()
            found[key] = Source(path, path.read_bytes())
    return found


def _entries(files: Mapping[str, Source]) -> dict[str, dict[str, str]]:
    entries = {}
    for key, file in files.items():
        digest = hashlib.sha256(file.content).hexdigest()
        copy = f"{COPIES}/{digest[:12]}-{file.path.name}"
        entries[key] = {"path": str(file.path), "sha256": digest, "copy": copy}
    return entries


def _weights(config: ConfigDict) -> dict[str, str]:
    """{key: digest} of the checkpoints and adapters before stage 1."""
    found = {}
    for role in ROLES:
        checkpoint, adapter = config[role].checkpoint, config[role].adapter
        if checkpoint:
            # The run needs the download anyway.
            place = str(resolve_folder(checkpoint)) if kind_of(checkpoint) == "hub" else checkpoint
            found[f"{role}.checkpoint"] = identify_weights(place, role_of_weights(config, role))[1]
        if adapter not in ("", "generator"):
            found[f"{role}.adapter"] = sampled_digest(sorted(Path(adapter).expanduser().glob("*.safetensors")))
    return found


def _fork(config: ConfigDict, workdir: Path, files: Mapping[str, Source]) -> dict[str, Any] | None:
    """The newest checkpoint of the run that is forked, or the one with which this run began: that run may go on."""
    if not config.fork_of:
        return None
    stored = read_provenance(workdir).get("fork")
    if stored and complete_steps(workdir / "checkpoints"):
        return stored
    place = local_path("fork_of", config.fork_of)
    turn, digest = identify_weights(str(place), "generator")
    here = _subject(config, _digests(_entries(files)))
    there = _subject(read_config(place), _digests(read_provenance(place).get("files", {})))
    return {"run": str(place.absolute()), "turn": turn, "digest": digest,
            **{name: here[name] == there[name] for name in here}}


def _subject(config: ConfigDict, files: Mapping[str, str]) -> dict[str, Any]:
    """What the statistics of a run are about."""
    settings = {key: without_folder(value) for key, value in flatten(config).items()}
    task = {key: value for key, value in settings.items() if key.startswith("task.") and changes_results(key, settings)}
    return {"is_task": (task, {key: digest for key, digest in files.items() if key.startswith("task.")}),
            "is_arm": (arm_name(config.arm), {key: digest for key, digest in files.items() if is_of_arm(key)}),
            "is_judge": ([settings[key] for key in JUDGING], files.get("verifier.template")),
            "is_batch": [settings[key] for key in TURN_SIZES]}


def read_provenance(workdir: Path) -> dict[str, Any]:
    """The stored provenance of a workdir; {} without a file. Raises ValueError for a damaged file."""
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


def is_of_arm(key: str) -> bool:
    """Of a file in `_user_files`."""
    return key == "arm" or key.startswith(("arm ", "arm,"))


def method_digests(stored: Mapping[str, Any]) -> dict[str, str]:
    """{key: digest} of the functions and templates that a run was made with, those given up included."""
    earlier = {f"{key} before": digest for key, digest in stored.get("earlier", {}).items()}
    return _digests(stored.get("files", {})) | earlier


def weights_digest(stored: Mapping[str, Any]) -> str:
    """GENERATOR/VERIFIER/BOTH: digests of their checkpoints and adapters, before stage 1; empty without any."""
    digests = []
    for prefix in (*(f"{role}." for role in ROLES), ""):
        starts = ({key: digest for key, digest in attempt.get("weights", {}).items() if key.startswith(prefix)}
                  for attempt in stored.get("attempts", ()))
        found = dict.fromkeys(json.dumps(weights) for weights in starts if weights)
        digests.append(hashlib.sha256(" ".join(found).encode()).hexdigest()[:12] if found else "")
    return "/".join(digests) if any(digests) else ""


def _digests(files: Mapping[str, Mapping]) -> dict[str, str]:
    """{key: sha256}. Earlier versions also stored the config file, which counts where it changed the package."""
    return {key: entry["sha256"] for key, entry in files.items() if key != "config" or "changes" in entry}


def describe(stored: Mapping[str, Any]) -> list[str]:
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
              for key, digest in attempt.get("files", {}).items()))


def summary_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    names = ("tango_jax", "commit", "dirty", "source", "jax", "platform", "devices")
    last = {name: attempt[name] for attempt in stored.get("attempts", [])[-1:] for name in names}
    return last | {"files": method_digests(stored)}


def _is_begun(workdir: Path) -> bool:
    return (workdir / "config.json").is_file()  # it is written with the first row


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{count} x {kind}" for kind, count in value.items())
    return cut(str(value), 40)
