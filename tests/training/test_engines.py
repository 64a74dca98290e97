"""The student's weights on their way to a server."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_opd.config.rollout import HFRollout, ServerRollout
from nemo_opd.training import engines
from nemo_opd.training.prompts import Prompts
from nemo_opd.training.respondents import Respondent


@dataclass
class FakeServer:
    """Notes what it is given."""

    version: int
    loaded: list[Path] = field(default_factory=list)
    is_closed: bool = False
    retried: int = 0

    def update_weights(self, folder: Path, version: int) -> None:
        assert (folder / "weights").read_text() == "whole"
        self.loaded.append(folder)
        self.version = version

    def close(self) -> None:
        self.is_closed = True


class FakeModels:
    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text("whole")


def plan(folder: Path, **rollout: Any) -> Any:
    prompts = Prompts(*[None] * 3, Respondent(None, frozenset({2}), 8), (), None, ())  # type: ignore[arg-type]
    config = SimpleNamespace(
        rollout=ServerRollout(**rollout) if rollout else HFRollout(), train=SimpleNamespace(max_length=8)
    )
    return SimpleNamespace(
        config=config, data=prompts, output_dir=folder, device="cpu", student=SimpleNamespace(vocab_size=9)
    )


def test_a_server_follows_and_leaves_only_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder of the user's that is removed with everything in it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "precious").write_text("mine")
    server = FakeServer(3)
    monkeypatch.setattr(engines, "ServerEngine", lambda *_, model, **__: server)

    with engines.open_engine(plan(tmp_path, weights_folder=shared), FakeModels(), 3) as engine:  # type: ignore[arg-type]
        engine.follow(3)
        assert server.loaded == []
        engine.follow(4)
        engine.follow(5)
        assert engine.version == 5
        assert [folder.name for folder in server.loaded] == ["version_000004", "version_000005"]
        assert [each.name for each in server.loaded[-1].parent.iterdir()] == ["version_000005"]

    assert server.is_closed
    assert [each.name for each in shared.iterdir()] == ["precious"]


def test_a_server_that_does_not_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no server")

    monkeypatch.setattr(engines, "ServerEngine", refuse)

    opened = engines.open_engine(plan(tmp_path, program="vllm"), FakeModels(), 0)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no server"):
        opened.__enter__()
    assert list(tmp_path.iterdir()) == []
