"""The files of the user that take part in a run: the configuration in; paths, contents and changes of the package out.

They are the files that settings name (functions of the user, templates), under the key of the setting, and the config
file, under `config`, with what it changes in the package (runtime/package_changes.py). A function that it has put there
and that is written in another file brings that file, under the function's name. Used where a run is begun.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.config import ROLES, flatten
from tango_jax.runtime.checks import local_path
from tango_jax.runtime.package_changes import ConfigSource, executed_configs
from tango_jax.runtime.user_code import is_user_code, sources
from tango_jax.text.templates import is_template_file

COPIES = "user_files"  # folder in the workdir
FUNCTIONS = ("arm", "task.name", "task.grader", *(f"{role}.{name}" for role in ROLES
                                                  for name in ("reward", "loss.algorithm", "loss.term")))  # fmt: skip
TEMPLATES = tuple(f"{role}.template" for role in ROLES)
CONFIG = "config"


@dataclasses.dataclass(frozen=True)
class UserFile:
    """A file of the user that takes part in a run, or the text of an object that a Python program hands over. This
    file makes it; provenance.py reads it."""

    path: Path
    content: bytes
    changes: dict[str, str] = dataclasses.field(default_factory=dict)  # of the package: name -> the new value

    @property
    def entry(self) -> dict[str, Any]:
        """What provenance.json has of it."""
        sha256 = hashlib.sha256(self.content).hexdigest()
        entry = {"path": str(self.path), "sha256": sha256, "copy": f"{COPIES}/{sha256[:12]}-{self.path.name}"}
        return entry | ({"changes": self.changes} if self.changes else {})


def user_files(config: ConfigDict) -> dict[str, UserFile]:
    """{key: file} of all files of the user that take part in a run of this process."""
    settings, found = flatten(config), {}
    named = {key: settings[key] for key in FUNCTIONS if is_user_code(settings[key])}
    for key, text in named.items():
        for number, source in enumerate(sources(text)):
            name = f"{key} ({source.path.name})" if number else key
            found[name] = UserFile(source.path, source.content)
    for role, key in zip(ROLES, TEMPLATES, strict=True):
        if is_template_file(role, settings[key]):
            path = local_path(key, settings[key]).absolute()
            found[key] = UserFile(path, path.read_bytes())
    return found | config_files()


def config_files() -> dict[str, UserFile]:
    """The config file that this process has executed last, unless it is a shipped one; others if they have changed the
    package; and the files of functions that they have put there."""
    found, sources = {}, executed_configs()
    for source in reversed(sources):
        if source.content is not None and (source.changes or (source is sources[-1] and not source.is_shipped)):
            key = f"{CONFIG} ({Path(source.path).name})" if source is not sources[-1] else CONFIG
            changes = {change.name: change.text for change in sorted(source.changes, key=lambda change: change.name)}
            found |= {key: UserFile(Path(source.path), source.content, changes)} | _files_of_changes(source)
    return found


def _files_of_changes(source: ConfigSource) -> dict[str, UserFile]:
    """{name of what is changed: file of the new function}, where it is written in another file than the config."""
    paths = {change.name: Path(change.file) for change in source.changes if change.file not in ("", source.path)}
    return {name: UserFile(path, path.read_bytes()) for name, path in paths.items()}
