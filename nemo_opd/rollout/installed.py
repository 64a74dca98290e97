"""A check that the rollout program is installed, without starting or importing anything."""

import shutil
from importlib.util import find_spec

from nemo_opd.config.rollout import Rollouts, ServerRollout
from nemo_opd.errors import ConfigError

HOW_TO_INSTALL = {
    "vllm": "run tools/rollout/install_vllm.sh and set rollout.command to the vllm that it installs",
    "sglang": "install it in another environment and set rollout.command to its command there",
}
"""Keyed by `rollout.program`."""


def require_installed(settings: Rollouts | None) -> None:
    """Raise ConfigError if the server that the run would start is not installed."""
    if not isinstance(settings, ServerRollout) or settings.url is not None:
        return
    program, path = settings.program, settings.environment.get("PATH")
    way_out = f"{HOW_TO_INSTALL[program]}, or set rollout.url to a running server"
    if settings.command is not None:
        if shutil.which(settings.command[0], path=path) is None:
            raise ConfigError(f"rollout.command={settings.command[0]}: there is no such program; {way_out}")
        return
    # The default command of SGLang is a module of this environment.
    location = find_spec("sglang") if program == "sglang" else shutil.which("vllm", path=path)
    if location is None:
        raise ConfigError(f"rollout.program={program}: it is not installed here; {way_out}")
