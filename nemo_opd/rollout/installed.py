"""Check that the program that samples is installed, without starting or importing anything."""

import shutil
from importlib.util import find_spec

from nemo_opd.config.rollout import Rollouts, ServerRollout
from nemo_opd.errors import ConfigError

MODULES = {"vllm": (), "sglang": ("sglang",), "transformers": ("fastapi", "uvicorn", "openai")}
"""Program → modules that its own command imports in this environment; vLLM is a program on the path."""
INSTALL = {
    "vllm": "tools/rollout/install_vllm.sh makes an environment with it, which rollout.command names",
    "sglang": "install it in another environment, and give its command as rollout.command",
    "transformers": "install nemo-opd[serve]",
}
"""Program → how to install it."""


def require_installed(settings: Rollouts | None) -> None:
    """Raise ConfigError where a server that the run would start is not installed."""
    if not isinstance(settings, ServerRollout) or settings.url is not None:
        return
    program, path = settings.program, settings.environment.get("PATH")
    if settings.command is not None:
        if shutil.which(settings.command[0], path=path) is None:
            raise ConfigError(
                f"rollout.command={settings.command[0]}: there is no such program; {INSTALL[program]}, or give the "
                "rollout.url of a server that runs"
            )
        return
    missing = [name for name in MODULES[program] if find_spec(name) is None]
    if missing or (program == "vllm" and shutil.which("vllm", path=path) is None):
        what = ", ".join(missing) or program
        raise ConfigError(
            f"rollout.program={program}: {what} is not installed here; {INSTALL[program]}, or give the rollout.url of "
            "a server that runs"
        )
