"""Names of repositories on the Hugging Face Hub."""


def require_repo(name: str) -> None:
    """Raise ValueError for what is no `user/name` that the hub takes."""
    from huggingface_hub.utils import validate_repo_id  # takes a second, which few settings need

    if name.count("/") != 1:
        raise ValueError(f"{name!r} is no repository of a user or an organization; write user/name")
    try:
        validate_repo_id(name)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{reason}; write user/name") from error
