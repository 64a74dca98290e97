"""Catches a push that loses a run, omits files, makes a repository public, or cannot be repeated later."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from nemo_opd.config.run_fields import PushToHub
from nemo_opd.errors import ConfigError, HubError
from nemo_opd.logging.provenance import read_provenance
from nemo_opd.models import folder as pushing
from nemo_opd.preflight.inputs import check_inputs
from tests.composition import compose
from tests.exit_status import exit_status
from tests.models.fake_hub import TOKEN, FakeHub, fake_hub
from tests.tiny import Tiny
from tests.training.launch import run_here

REPO = "me/small-student"
PUSH = f"++run.push_to_hub={{repo: {REPO}}}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A fake hub for this process; HF_ENDPOINT would only redirect a new one."""
    with fake_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.mark.world
def test_a_run_whose_push_fails_is_whole_and_its_command_pushes_later(
    hub: FakeHub, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path / "cache"))
    hub.refuses = True
    with pytest.raises(HubError, match=rf"final was not pushed to {REPO} .*403.*the folder is complete") as failed:
        run_here(tmp_path / "run", tiny.overrides(PUSH, "train.max_steps=1", teachers=1))
    assert (tmp_path / "run" / "report" / "report.html").exists()
    provenance = read_provenance(tmp_path / "run")
    assert provenance is not None
    assert [entry.role for entry in provenance.models] == ["student", "teacher cross"]
    assert any("overlap" in line for line in provenance.teachers[0].audit)
    assert provenance.command

    hub.refuses = False
    _, command, _ = str(failed.value).split("`")
    program, *words = shlex.split(command)
    assert (program, exit_status(*words)) == ("nemo-opd", 0)
    assert f"{tmp_path / 'run' / 'final'} to {hub.address}/{REPO}" in capsys.readouterr().out
    assert hub.is_private == {REPO: True}
    assert hub.tokens == {f"Bearer {TOKEN}"}
    final = tmp_path / "run" / "final"
    assert hub.files == {entry.name: entry.read_bytes() for entry in final.iterdir()}
    assert "model.safetensors" in hub.files
    assert "distillation" in ModelCard(hub.files["README.md"].decode()).data.tags


def test_a_public_repository_is_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert exit_status("checkpoint", "push", f"--model={tmp_path}", "--repo=me/open", "--public") == 0
    assert hub.is_private == {"me/open": False}
    assert hub.files == {"adapter_config.json": b"{}"}


@pytest.mark.parametrize(
    ("model", "repo", "message"),
    [
        ("run", REPO, "there is no config.json or adapter_config.json; its model is RUN/run/final"),
        ("absent", REPO, "name a folder such as RUN/final"),
        ("run/final", "student", "'student' is not a repository of a user or an organization; write user/name"),
        ("run/final", "me/-student", "write user/name"),
    ],
)
def test_a_folder_or_repository_that_cannot_be_pushed_is_one_clear_error(
    model: str, repo: str, message: str, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "config.json").touch()
    assert exit_status("checkpoint", "push", f"--model={tmp_path / model}", f"--repo={repo}") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message.replace("RUN/run", str(tmp_path / "run")) in line
    assert not hub.is_private


def test_a_push_that_cannot_work_is_refused_before_the_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a run of days ends with an error that could be seen at its start."""
    config = compose(*tiny.overrides(PUSH))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=rf"^run\.push_to_hub\.repo={REPO}: HF_HUB_OFFLINE"):
        check_inputs(config, on_policy=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="no token for the hub; set HF_TOKEN"):
        check_inputs(config, on_policy=False)
    with pytest.raises(ConfigError, match="no token for the hub"):
        check_inputs(compose(*tiny.overrides(PUSH, "run.dry_run=true")), on_policy=False)
    with pytest.raises(ValueError, match="write user/name"):
        PushToHub(repo="no/such/form")
    with pytest.raises(ConfigError, match=r"run\.push_to_hub\.model=best: the run keeps no best checkpoint"):
        compose(*tiny.overrides(PUSH.replace("}", ", model: best}")))


def test_a_hub_that_cannot_be_reached_is_the_same_kind_of_error(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=f"--repo {REPO} --public`"):
        pushing.push(tmp_path, REPO, private=False)
