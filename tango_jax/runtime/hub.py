"""Downloads files from the Hugging Face hub at a pinned revision: `owner/name@revision`.

Takes an id from a config or a command line and returns the local folder of the download. A revision is a commit, a tag
or a branch (also refs/pr/N and refs/convert/NAME). Only a commit is immutable, so for anything else a one-line warning
names the commit of the files and how to pin it. Runs before anything else that opens a checkpoint or data.
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
_told: set[str] = set()  # warnings that were given; a checkpoint is looked up more than once


class HubId(NamedTuple):
    """A repository on the hub and its revision."""

    repo: str
    revision: str | None  # None: the main branch


def parse_hub_id(name: str) -> HubId | None:
    """Parse `owner/name` or `owner/name@revision`; None if the text is neither. Does not contact the hub.

    Raises:
        ValueError: the text after the @ of a repository is not a valid commit, tag or branch.
    """
    match = _ID.fullmatch(name)
    if match and ".." not in (match["revision"] or ""):
        return HubId(match["repo"], match["revision"])
    repo, at, revision = name.partition("@")
    if at and re.fullmatch(REPO, repo):
        raise ValueError(f"{name!r}: {revision!r} is not a revision; write {repo}@ and a commit (40 hexadecimal "
                         "digits), a tag, or a branch without a slash")
    return None


def download(
    hub_id: HubId, patterns: str | Sequence[str], repo_type: str | None = None, fallback: str | None = None, form="{}"
) -> Path:
    """Download the matching files, or find them in the local cache. Warns in one line unless a commit is pinned.

    Args:
        repo_type: "dataset", or None for a model.
        fallback: the revision to use if `hub_id` has none; default: the main branch.
        form: how the config writes the id, with {} for `owner/name@revision`; used in the warning.

    Raises:
        OSError, ValueError: raised by huggingface_hub: no such repository or revision, no network, no permission.
    """
    import huggingface_hub  # imported here because most runs never contact the hub

    repo, revision = hub_id
    kind = {} if repo_type is None else {"repo_type": repo_type}
    folder = Path(huggingface_hub.snapshot_download(
        repo, **kind, revision=revision or fallback, allow_patterns=patterns
    ))  # fmt: skip
    if not _COMMIT.fullmatch(revision or ""):
        # The cache stores each commit in a folder named by it.
        commit = folder.name if _COMMIT.fullmatch(folder.name) else ""
        named = form.format(repo if revision is None else f"{repo}@{revision}")
        found = f"is now at commit {commit}" if commit else "may point to another commit next time"
        pinned = form.format(f"{repo}@{commit or 'COMMIT'}")
        warning = (f"warning: {named} is not pinned to a commit: it {found}; write "
                   f"{pinned} for the same files every time")
        if warning not in _told:
            _told.add(warning)
            _log.warning("%s", warning)
    return folder
