"""Version of this package, and commit of its checkout."""

import os
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version

from nemo_opd.paths import CHECKOUT

UNKNOWN = "unknown"


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
