"""Folders outside run directories."""

import os
from contextlib import suppress
from pathlib import Path

from nemo_opd.errors import ConfigError


def cache_dir(*parts: str) -> Path:
    """Create and return a folder for what is computed once and reused.

    `$NEMO_OPD_CACHE`, else `$XDG_CACHE_HOME/nemo_opd`, else `~/.cache/nemo_opd`. Raises ConfigError where that is
    impossible.
    """
    path = _cache_root().joinpath(*parts)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {path} cannot be made ({error.strerror}); set $NEMO_OPD_CACHE to a folder that can be "
            "written to"
        ) from error
    return path


def _cache_root() -> Path:
    if root := os.environ.get("NEMO_OPD_CACHE"):
        return Path(root)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_opd"
    except RuntimeError as error:  # of a user that the machine does not know, as in containers
        raise ConfigError("there is no home folder for the cache; set $NEMO_OPD_CACHE to a folder") from error


def keep_compiled_code_private() -> None:
    """Let PyTorch keep what it compiles in the cache folder; to be called before it is imported.

    Its own choice is a folder in /tmp that another user may have made first, and what lies there is executed. It stays
    where there is no cache folder; `$TORCHINDUCTOR_CACHE_DIR` goes before both.
    """
    with suppress(ConfigError):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir("compiled")))


_PACKAGE = Path(__file__).parent
CHECKOUT = _PACKAGE.parent if (_PACKAGE.parent / "pyproject.toml").is_file() else None
"""Root of the project's checkout, with its tests and benchmarks; None where the package alone is installed."""


def configs_dir() -> Path:
    """Return the folder of the recipes and config groups that come with the package."""
    installed = _PACKAGE / "configs"
    return installed if CHECKOUT is None else CHECKOUT / "configs"
