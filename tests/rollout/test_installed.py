"""Catches a server that is found missing only after models are loaded."""

import shutil
from typing import Literal

import pytest

from nemo_opd import extras
from nemo_opd.config.rollout import HFRollout, ServerRollout
from nemo_opd.errors import ConfigError
from nemo_opd.extras import require_installed


def test_installed_programs_pass() -> None:
    require_installed(None)
    require_installed(HFRollout())
    require_installed(ServerRollout(command=("python",)))
    require_installed(ServerRollout(program="sglang", url="http://localhost:8000"))


def test_a_missing_command_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.command=no/vllm: there is no such program; .*install_vllm\.sh"):
        require_installed(ServerRollout(command=("no/vllm", "serve")))


@pytest.mark.parametrize("program", ["vllm", "sglang"])
def test_a_missing_program_is_refused(program: Literal["vllm", "sglang"], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")
    monkeypatch.setattr(extras, "find_spec", lambda name: name)
    require_installed(ServerRollout(program=program))

    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"rollout\.program={program}: it is not installed here; "):
        require_installed(ServerRollout(program=program))


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://127.0.0.1:99999", "http://h:x", "http://", "ftp://h", "[::1"]
)
def test_an_invalid_address_is_refused(url: str) -> None:
    """Bug: a traceback of the HTTP library after the models are loaded."""
    with pytest.raises(ValueError, match="it is not an address of a server"):
        ServerRollout(url=url)
