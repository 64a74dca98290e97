"""The version of this package, and the commit of its checkout."""

import os
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version

from nemo_opd.paths import CHECKOUT

UNKNOWN = "unknown"


def package_version() -> str:
    """Return the version that is installed, or that a checkout on PYTHONPATH, which is not installed, would have."""
    try:
        return version("nemo-opd")
    except PackageNotFoundError:
        if CHECKOUT is None:
            raise
        return str(tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def commit() -> str:
    """Return the checkout's commit, with `-dirty` if files were changed: `$NEMO_OPD_COMMIT`, else what git says.

    `UNKNOWN` if the package alone is there, or a copy of the checkout without its repository.
    """
    if named := os.environ.get("NEMO_OPD_COMMIT"):
        return named
    if CHECKOUT is None:
        return UNKNOWN
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
