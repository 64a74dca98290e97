"""A check that the rollout program is installed, without starting or importing anything."""

import shutil
from importlib.util import find_spec

from nemo_opd.config.rollout import Rollouts, ServerRollout
from nemo_opd.errors import ConfigError

REQUIREMENTS: dict[str, tuple[tuple[str, ...], str]] = {
    "vllm": ((), "run tools/rollout/install_vllm.sh and set rollout.command to the vllm that it installs"),
    "sglang": (("sglang",), "install it in another environment and set rollout.command to its command there"),
    "transformers": (("fastapi", "uvicorn", "openai"), "install nemo-opd[serve]"),
}
"""Program → modules that its default command imports in this environment, and how to install it. vLLM must be on the
path instead.
"""


def require_installed(settings: Rollouts | None) -> None:
    """Raise ConfigError if the server that the run would start is not installed."""
    if not isinstance(settings, ServerRollout) or settings.url is not None:
        return
    program, path = settings.program, settings.environment.get("PATH")
    modules, install = REQUIREMENTS[program]
    if settings.command is not None:
        if shutil.which(settings.command[0], path=path) is None:
            raise ConfigError(
                f"rollout.command={settings.command[0]}: there is no such program; {install}, or set rollout.url to a "
                "running server"
            )
        return
    missing = [name for name in modules if find_spec(name) is None]
    if missing or (program == "vllm" and shutil.which("vllm", path=path) is None):
        raise ConfigError(
            f"rollout.program={program}: {', '.join(missing) or program} is not installed here; {install}, or set "
            "rollout.url to a running server"
        )
