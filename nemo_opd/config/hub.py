"""Names of repositories on the Hugging Face Hub."""


def require_repo(name: str) -> None:
    """Raise ValueError unless the name is a `user/name` that the hub accepts."""
    from huggingface_hub.utils import validate_repo_id  # takes a second, and few settings need it

    if name.count("/") != 1:
        raise ValueError(f"{name!r} is not a repository of a user or an organization; write user/name")
    try:
        validate_repo_id(name)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{reason}; write user/name") from error
