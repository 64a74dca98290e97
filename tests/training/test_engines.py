"""Transfer of the student's weights to a rollout server."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_opd.config.cluster import HiddenStatesHandoff
from nemo_opd.config.rollout import HFRollout, ServerRollout
from nemo_opd.errors import CheckpointError
from nemo_opd.rollout.server import engine as servers
from nemo_opd.training import engines
from nemo_opd.training.models import Models


@dataclass
class FakeServer(servers._StudentServer):
    """A server that records what it loads."""

    version: int = 0
    takes_memory: bool = False
    sees_memory: bool = True
    loaded: list[Path | str] = field(default_factory=list)
    is_closed: bool = False
    rests: int = 0
    retried: int = 0

    def opened(self, _: Any, spec: Any, __: Path, ___: int, student: Any, folder: Path) -> "FakeServer":
        self._student, self._folder, self._dtype = student, folder, spec.dtype
        self._reads_memory = self.takes_memory
        return self

    def update_weights(self, folder: Path, version: int) -> None:
        assert load_file(folder / "model.safetensors")["weights"].all()
        self.loaded.append(folder)
        self.version = version

    def update_from_memory(self, file: str, version: int) -> bool:
        self.loaded.append(file)
        if self.sees_memory:
            self.version = version
        return self.sees_memory

    def rest(self) -> None:
        self.rests += 1

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True


@dataclass
class FakeModels:
    held: list[str] = field(default_factory=list)

    def export(self, folder: Path, served_as: str, average_of: int | None = None) -> None:
        assert served_as == "float32"
        folder.mkdir(parents=True)
        save_file({"weights": torch.ones(3)}, folder / "model.safetensors")

    @contextmanager
    def held_weights(self, served_as: str) -> Iterator[str]:
        assert served_as == "float32"
        self.held.append("held")
        yield "memory"
        self.held.append("released")


class ExportingModels(Models):
    """Models whose workers write a file, or only its beginning."""

    def __init__(self, *, is_cut: bool) -> None:
        self.is_cut = is_cut

    def _on_each_student(self, method: str, *arguments: Any) -> list[Any]:
        assert method == "export"
        arguments[0].mkdir(parents=True)
        file = arguments[0] / "model.safetensors"
        save_file({"weights": torch.ones(3)}, file)
        if self.is_cut:
            os.truncate(file, 70)
        return []


def plan(folder: Path, **rollout: Any) -> Any:
    config = SimpleNamespace(
        rollout=ServerRollout(**rollout) if rollout else HFRollout(),
        train=SimpleNamespace(max_length=8),
        handoff=HiddenStatesHandoff(),
    )
    return SimpleNamespace(
        config=config,
        output_dir=folder,
        device="cpu",
        student_vocab_size=9,
        server_share=None,
        benchmarks=None,
        sampled_end_ids=frozenset({2}),
    )


def test_a_server_follows_and_leaves_only_the_users_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that removes the user's folder with everything in it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "precious").write_text("mine")
    server = FakeServer(3)
    monkeypatch.setattr(servers, "_StudentServer", server.opened)

    with engines.open_engine(plan(tmp_path, weights_folder=shared), FakeModels(), 3) as engine:  # type: ignore[arg-type]
        engine.follow(3)
        assert server.loaded == []
        engine.follow(4)
        engine.follow(5)
        assert engine.version == 5
        assert [Path(entry).name for entry in server.loaded] == ["version_000004", "version_000005"]
        (folder,) = shared.glob("rollout_weights_*")
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.name for path in folder.iterdir()} == {".lock", "version_000005"}

    assert server.is_closed
    assert [entry.name for entry in shared.iterdir()] == ["precious"]


def test_runs_do_not_share_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: two runs with the same rollout.weights_folder sample with each other's weights, and the first to end removes
    both; a killed run's weights stay.
    """
    monkeypatch.setattr(servers, "_StudentServer", lambda *arguments: FakeServer(3).opened(*arguments))
    abandoned = tmp_path / "rollout_weights_killed"
    abandoned.mkdir()
    (abandoned / ".lock").touch()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / ".lock").touch()
    (tmp_path / "rollout_weights_link").symlink_to(precious)
    ours = plan(tmp_path, weights_folder=tmp_path)
    with (
        engines.open_engine(ours, FakeModels(), 3),  # type: ignore[arg-type]
        engines.open_engine(ours, FakeModels(), 3),  # type: ignore[arg-type]
    ):
        assert len(list(tmp_path.glob("rollout_weights_*/version_000003"))) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"precious", "rollout_weights_link"}
    assert (precious / ".lock").exists()


def test_a_server_that_reads_memory_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory that is not released, and initial weights that stay on the disk."""
    server, models = FakeServer(3, takes_memory=True), FakeModels()
    monkeypatch.setattr(servers, "_StudentServer", server.opened)

    with engines.open_engine(plan(tmp_path, program="vllm"), models, 3) as engine:  # type: ignore[arg-type]
        (folder,) = tmp_path.glob("rollout_weights_*")
        assert {path.name for path in folder.iterdir()} == {".lock", "version_000003"}
        engine.follow(4)
        engine.follow(5)

        assert engine.version == 5
        assert server.loaded == ["memory", "memory"]
        assert models.held == ["held", "released"] * 2
        (folder,) = tmp_path.glob("rollout_weights_*")
        assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_server_that_cannot_see_memory_follows_by_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a server in a container. Bug: memory is tried again at every step."""
    server, models = FakeServer(3, takes_memory=True, sees_memory=False), FakeModels()
    monkeypatch.setattr(servers, "_StudentServer", server.opened)

    with engines.open_engine(plan(tmp_path, program="vllm"), models, 3) as engine:  # type: ignore[arg-type]
        engine.follow(4)
        engine.follow(5)

        assert engine.version == 5
        assert [Path(source).name for source in server.loaded] == ["memory", "version_000004", "version_000005"]
        assert models.held == ["held", "released"]


def test_a_server_that_does_not_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no server")

    monkeypatch.setattr(servers, "_StudentServer", refuse)

    opened = engines.open_engine(plan(tmp_path, program="vllm"), FakeModels(), 0)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no server"):
        opened.__enter__()
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_is_cut_does_not_take_the_place_of_a_whole_one(tmp_path: Path) -> None:
    """Bug: a full disk goes unnoticed and replaces a complete model with a part of one."""
    ExportingModels(is_cut=False).export(tmp_path / "final")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing or damaged"):
        ExportingModels(is_cut=True).export(tmp_path / "final")
    assert load_file(tmp_path / "final" / "model.safetensors")["weights"].all()
    assert [entry.name for entry in tmp_path.iterdir()] == ["final"]
