"""Check that the program that samples is installed, without starting or importing anything."""

import shutil
from importlib.util import find_spec

from nemo_opd.config.rollout import Rollouts, ServerRollout
from nemo_opd.errors import ConfigError

REQUIREMENTS: dict[str, tuple[tuple[str, ...], str]] = {
    "vllm": ((), "tools/rollout/install_vllm.sh makes an environment with it, which rollout.command names"),
    "sglang": (("sglang",), "install it in another environment, and give its command as rollout.command"),
    "transformers": (("fastapi", "uvicorn", "openai"), "install nemo-opd[serve]"),
}
"""Program → modules that its own command imports in this environment, and how to install it. vLLM is a program on the
path.
"""


def require_installed(settings: Rollouts | None) -> None:
    """Raise ConfigError where a server that the run would start is not installed."""
    if not isinstance(settings, ServerRollout) or settings.url is not None:
        return
    program, path = settings.program, settings.environment.get("PATH")
    modules, install = REQUIREMENTS[program]
    if settings.command is not None:
        if shutil.which(settings.command[0], path=path) is None:
            raise ConfigError(
                f"rollout.command={settings.command[0]}: there is no such program; {install}, or give the "
                "rollout.url of a server that runs"
            )
        return
    missing = [name for name in modules if find_spec(name) is None]
    if missing or (program == "vllm" and shutil.which("vllm", path=path) is None):
        what = ", ".join(missing) or program
        raise ConfigError(
            f"rollout.program={program}: {what} is not installed here; {install}, or give the rollout.url of "
            "a server that runs"
        )
