"""Files of the model hub at a revision that a config pins: `owner/name@revision`.

In: an id as a config or a command line has it. Out: the local folder of a download. A revision is a commit, a tag or a
branch (refs/pr/N and refs/convert/NAME too); only a commit stays what it is, so for anything else one line names the
commit that the files are of, and how to pin it. Stage: before anything else, wherever a checkpoint or data is opened.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

REPO = r"[\w.-]+(?:/[\w.-]+)?"
REVISION = r"(?:refs/(?:convert|pr)/)?[A-Za-z0-9][\w.-]*"
_ID = re.compile(rf"(?P<repo>{REPO})(?:@(?P<revision>{REVISION}))?")
_COMMIT = re.compile("[0-9a-f]{40}")
_log = logging.getLogger(__name__)


class HubId(NamedTuple):
    """A repository of the hub, and which state of it."""

    repo: str
    revision: str | None  # None: whatever its main branch holds


def parse_hub_id(name: str) -> HubId | None:
    """The parts of `owner/name` or `owner/name@revision`; None where it is neither. The hub is not asked.

    Raises:
        ValueError: a repository with something behind its @ that is no commit, tag or branch.
    """
    match = _ID.fullmatch(name)
    if match and ".." not in (match["revision"] or ""):
        return HubId(match["repo"], match["revision"])
    repo, at, revision = name.partition("@")
    if at and re.fullmatch(REPO, repo):
        raise ValueError(f"{name!r}: {revision!r} is no revision; write {repo}@ and a commit (40 hexadecimal digits), "
                         "a tag, or a branch without a slash")
    return None


def download(
    hub_id: HubId, patterns: str | Sequence[str], repo_type: str | None = None, fallback: str | None = None, form="{}"
) -> Path:
    """Fetch the files that match, or find them in the local cache; warns in one line unless a commit is pinned.

    Args:
        repo_type: "dataset"; None: a model.
        fallback: the revision where `hub_id` names none; by default the main branch.
        form: how the config writes the id, with {} for `owner/name@revision`: for the warning.

    Raises:
        OSError, ValueError: those of huggingface_hub: no such repository or revision, no network, no permission.
    """
    import huggingface_hub  # most runs never ask the hub for anything

    repo, revision = hub_id
    kind = {} if repo_type is None else {"repo_type": repo_type}
    folder = Path(huggingface_hub.snapshot_download(
        repo, **kind, revision=revision or fallback, allow_patterns=patterns
    ))  # fmt: skip
    if not _COMMIT.fullmatch(revision or ""):
        # The cache keeps each commit in a folder of its name.
        commit = folder.name if _COMMIT.fullmatch(folder.name) else ""
        named = form.format(repo if revision is None else f"{repo}@{revision}")
        found = f"is at commit {commit} now" if commit else "may be another one next time"
        _log.warning("warning: %s is not pinned to a commit: it %s; write %s for the same files every time", named,
                     found, form.format(f"{repo}@{commit or 'COMMIT'}"))  # fmt: skip
    return folder
