"""Downloads files from the Hugging Face hub at a revision: `owner/name@revision`.

A revision is a commit, a tag or a branch (also refs/pr/N and refs/convert/NAME).
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
    repo: str
    revision: str | None  # None: the main branch


def parse_hub_id(name: str) -> HubId | None:
    """Parse `owner/name` or `owner/name@revision`; None for other text. Raises ValueError for a wrong revision."""
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
    """Download the matching files, or find them in the cache. A file enters the cache when it is whole.

    Args:
        repo_type: "dataset", or None for a model.
        fallback: the revision if `hub_id` has none; default: the main branch.
        form: how messages show `owner/name@revision`, which replaces {}.

    Raises ValueError with the repository, the reason and the fix.
    """
    import huggingface_hub  # imported here because most runs never contact the hub

    repo, revision = hub_id
    named = form.format(repo if revision is None else f"{repo}@{revision}")
    try:
        folder = Path(huggingface_hub.snapshot_download(
            repo, repo_type=repo_type, revision=revision or fallback, allow_patterns=patterns
        ))
    except Exception as error:  # its own, its HTTP library's, hf_xet's or the disk's: they have no class in common
        reason, fix = _explain(error, hub_id, repo_type, fallback)
        raise ValueError(f"{named}: could not be fetched from the hub ({reason}): {fix}") from error
    if not _COMMIT.fullmatch(revision or ""):
        pinned = form.format(f"{repo}@{folder.name}")  # the cache names the folder by the commit
        warning = (f"warning: {named} is not pinned to a commit: it is now at commit {folder.name}; write "
                   f"{pinned} for the same files every time")
        if warning not in _told:
            _told.add(warning)
            _log.warning("%s", warning)
    return folder


def _explain(error: Exception, hub_id: HubId, repo_type: str | None, fallback: str | None) -> tuple[str, str]:
    from huggingface_hub import constants, errors

    is_data = repo_type == "dataset"
    page = f"{constants.ENDPOINT}/{'datasets/' * is_data}{hub_id.repo}"
    elsewhere = "or download it elsewhere and give its path"
    # Where the cache is empty, the client's message hides the cause.
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    text = " ".join(str(cause).split()) or type(cause).__name__
    if isinstance(cause, errors.RevisionNotFoundError):
        other = ", or name one of its files" if is_data else ""
        return f"it has no revision {hub_id.revision or fallback}", f"name a commit, tag or branch that it has{other}"
    is_refused = isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code in (401, 403)
    here = "" if is_data else "no folder of that name is here, and "
    if is_refused or isinstance(cause, errors.RepositoryNotFoundError):
        return (f"{here}the hub has no such {'data set' if is_data else 'model'}, or you may not read it",
                f"check the name, ask for access at {page}, and log in (hf auth login) or set HF_TOKEN, {elsewhere}")
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return f"{here}HF_HUB_OFFLINE is set, and its files are not in the cache", f"unset it, {elsewhere}"
    if isinstance(cause, errors.HFValidationError):
        return text, "check the name"
    if isinstance(cause, OSError) and cause.errno is not None:
        return text, f"free space at {constants.HF_HUB_CACHE}, or set HF_HOME to another folder, {elsewhere}"
    return f"{type(cause).__name__}: {text}", f"check the network and repeat the command, {elsewhere}"
