"""Folders outside run directories, and the version of this package."""

import os
import subprocess
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nemo_opd.errors import ConfigError

_PACKAGE = Path(__file__).parent
CHECKOUT = _PACKAGE.parent if (_PACKAGE.parent / "pyproject.toml").is_file() else None
"""Root of the project's checkout, with its tests and benchmarks; None if only the package is installed."""
UNKNOWN = "unknown"
"""Commit of a checkout or copy without a repository."""


def cache_dir(*parts: str) -> Path:
    """Create and return a cache folder.

    It is in `$NEMO_OPD_CACHE`, or `$XDG_CACHE_HOME/nemo_opd`, or `~/.cache/nemo_opd`. Raises ConfigError if it cannot
    be created.
    """
    path = _cache_root().joinpath(*parts)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {path} cannot be created ({error.strerror}); set $NEMO_OPD_CACHE to a writable folder"
        ) from error
    return path


def _cache_root() -> Path:
    if root := os.environ.get("NEMO_OPD_CACHE"):
        return Path(root)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_opd"
    except RuntimeError as error:  # a user without an account, as in containers
        raise ConfigError("there is no home folder for the cache; set $NEMO_OPD_CACHE to a folder") from error


def keep_compiled_code_private() -> None:
    """Make PyTorch keep compiled code in the cache folder. Call before anything is compiled.

    PyTorch's default is a folder in /tmp that another user may have created, and its contents are executed. The default
    stays if the cache folder cannot be created; `$TORCHINDUCTOR_CACHE_DIR` takes precedence.
    """
    with suppress(ConfigError):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir("compiled")))


def configs_dir() -> Path:
    """Return the folder of the package's recipes and config groups."""
    installed = _PACKAGE / "configs"
    return installed if CHECKOUT is None else CHECKOUT / "configs"


def package_version() -> str:
    """Return the installed version, or the checkout's if it is on PYTHONPATH without being installed."""
    try:
        return version("nemo-opd")
    except PackageNotFoundError:
        if CHECKOUT is None:
            raise
        return str(tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def commit() -> str:
    """Return the checkout's commit, with `-dirty` if files were changed: `$NEMO_OPD_COMMIT`, or from git.

    Returns `UNKNOWN` without a checkout, or for a copy of it without its repository.
    """
    if from_environment := os.environ.get("NEMO_OPD_COMMIT"):
        return from_environment
    if CHECKOUT is None:
        return UNKNOWN
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
