"""A server that cannot be started here is refused before anything is loaded."""

import shutil
from typing import Literal

import pytest

from nemo_opd import extras
from nemo_opd.config.rollout import HFRollout, ServerRollout
from nemo_opd.errors import ConfigError
from nemo_opd.extras import require_installed


def test_what_is_there_passes() -> None:
    require_installed(None)
    require_installed(HFRollout())
    require_installed(ServerRollout(command=("python",)))
    require_installed(ServerRollout(program="sglang", url="http://localhost:8000"))


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.command=no/vllm: there is no such program; .*install_vllm\.sh"):
        require_installed(ServerRollout(command=("no/vllm", "serve")))


@pytest.mark.parametrize("program", ["vllm", "sglang"])
def test_a_program_that_is_not_there(program: Literal["vllm", "sglang"], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a server that is not installed is noticed after all models are loaded."""
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
def test_an_address_that_is_none(url: str) -> None:
    """Bug: a traceback of the HTTP library once the models were loaded."""
    with pytest.raises(ValueError, match="it is not an address of a server"):
        ServerRollout(url=url)
