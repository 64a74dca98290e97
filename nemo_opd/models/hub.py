"""Upload of a model's folder to the Hugging Face Hub."""

import shlex
from pathlib import Path

from nemo_opd.errors import ConfigError, HubError
from nemo_opd.models.folder import first_line


def require_hub(key: str) -> None:
    """Raise ConfigError, naming `key`, if nothing can be pushed: without a token, or offline."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{key}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so nothing is sent to the hub; unset it, or leave "
            "this out and push later with `nemo-opd checkpoint push`"
        )
    if get_token() is None:
        raise ConfigError(f"{key}: no token for the hub; set HF_TOKEN, or run `hf auth login`")


def push(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder as one commit and return the repository's address. Creates the repository if it does not exist.

    private: whether a new repository is private. Raises HubError, with the command to push later, if the upload fails.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload of a model trained with nemo_opd")
    # The library raises many types: for the network, the hub, and rejected files.
    except Exception as error:
        command = [
            "nemo-opd",
            "checkpoint",
            "push",
            "--model",
            str(folder),
            "--repo",
            repo,
            *["--public"] * (not private),
        ]
        raise HubError(
            f"{folder} was not pushed to {repo} ({first_line(error)}); the folder is complete, so push it later with "
            f"`{shlex.join(command)}`"
        ) from error
    return str(url)
