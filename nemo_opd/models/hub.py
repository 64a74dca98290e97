"""Upload of a model's folder to the Hugging Face Hub."""

import shlex
from pathlib import Path

from nemo_opd.errors import ConfigError, HubError
from nemo_opd.models.folder import first_line


def require_hub(key: str) -> None:
    """Raise ConfigError, naming `key`, where nothing can be pushed from here: without a token, or offline."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{key}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so nothing is sent to the hub; unset it, or leave "
            "this out and push later with `nemo-opd checkpoint push`"
        )
    if get_token() is None:
        raise ConfigError(f"{key}: there is no token of the hub; set HF_TOKEN, or run `hf auth login`")


def push(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder as one commit and return the address of the repository, which is made where it does not exist.

    private: of a new repository. Raises HubError, with the command that pushes later, where it does not succeed.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload of a model trained with nemo_opd")
    # Of the network, of the hub, of what it thinks of the files: the library has a class for each.
    except Exception as error:
        again = [
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
            f"{folder} was not pushed to {repo} ({first_line(error)}); the folder is whole, so push it later with "
            f"`{shlex.join(again)}`"
        ) from error
    return str(url)
