"""Where things live on disk that no run directory owns."""

import os
from pathlib import Path

from nemo_opd.errors import ConfigError


def cache_dir(*parts: str) -> Path:
    """A folder, created here, for what is computed once and reused.

    `$NEMO_OPD_CACHE`, else `$XDG_CACHE_HOME/nemo_opd`, else `~/.cache/nemo_opd`. Raises ConfigError where that is
    impossible.
    """
    root = os.environ.get("NEMO_OPD_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_opd"
    path = base.joinpath(*parts)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {path} cannot be made ({error.strerror}); set $NEMO_OPD_CACHE to a folder that can be "
            "written to"
        ) from error
    return path
