"""Uploads an exported folder to the Hugging Face hub."""

from pathlib import Path

from tango_jax.runtime.checks import cut, require

TOKENS = "https://huggingface.co/settings/tokens"
LOG_IN = f"make one that may write at {TOKENS}, and log in (hf auth login) or set HF_TOKEN"


def check_push(repo: str) -> None:
    """Before the export. Raises ValueError: `repo` is no owner/name, or there is no token that may write there."""
    import huggingface_hub  # imported here because most exports never contact the hub
    from huggingface_hub import errors
    from huggingface_hub.utils import validate_repo_id

    shown = f"--push={cut(repo)}"
    try:
        validate_repo_id(repo)
        is_name = "/" in repo
    except errors.HFValidationError:
        is_name = False
    require(is_name, f"{shown} is no repository of the Hugging Face hub: write OWNER/NAME, such as me/my_generator")
    require(bool(huggingface_hub.get_token()), f"{shown} needs a token: {LOG_IN}")
    try:
        me = huggingface_hub.HfApi().whoami()
    except Exception as error:  # its own or its HTTP library's: they have no class in common
        raise ValueError(f"{shown}: {_explain(error)}") from error
    owners = [me["name"], *(one["name"] for one in me.get("orgs", ()))]
    owner = repo.partition("/")[0]
    require(owner.lower() in map(str.lower, owners), f"{shown}: the token belongs to {me['name']}, who may write to "
            f"{', '.join(owners)}: name one of these, or log in as {owner}")
    role = me.get("auth", {}).get("accessToken", {}).get("role")
    require(role != "read", f"{shown}: the token of {me['name']} may only read: {LOG_IN}")


def push(folder: Path, repo: str) -> str:
    """Upload the folder as a commit, and return its address. A new repository is private. Raises ValueError."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        address = str(api.create_repo(repo, private=True, exist_ok=True))
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export by tango_jax")
    except Exception as error:
        raise ValueError(f"--push={repo}: {_explain(error)}; {folder} is complete, and `hf upload {repo} {folder}` "
                         "uploads it") from error
    return address


def _explain(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"the hub refuses the token: {LOG_IN}"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"the hub cannot be reached or does not accept it ({type(error).__name__}: {cut(text, 300)})"
