"""Configurations for a user's models and data are complete and explained, and never overwrite a file."""

import shlex
from pathlib import Path

import pytest
import yaml

import nemo_opd
from nemo_opd.cli.init import SCHEMA, TEMPLATES
from tests.composition import CONFIGS, nothing_is_created
from tests.config.test_schema import refusals
from tests.exit_status import exit_status


@pytest.mark.parametrize(
    ("options", "name", "run"),
    [([], "distil.yaml", nemo_opd.distil), (["--on-policy"], "distil_on_policy.yaml", nemo_opd.distil_on_policy)],
    ids=["off-policy", "on-policy"],
)
def test_a_written_configuration_runs(options: list[str], name: str, run, tmp_path: Path) -> None:
    """Bugs: a configuration does not compose; its models and data do not exist."""
    folder = tmp_path / "mine"
    assert exit_status("init", folder, *options) == 0
    assert (folder / SCHEMA).read_bytes() == (CONFIGS / "schema" / "run.json").read_bytes()
    with nothing_is_created(tmp_path):
        run(folder / name, ["run.dry_run=true", f"run.output_dir={tmp_path / 'out'}"])


@pytest.mark.parametrize("template", sorted(TEMPLATES.glob("*.yaml")), ids=lambda file: file.stem)
def test_editors_accept_it(template: Path) -> None:
    text = template.read_text(encoding="utf-8")
    assert text.startswith(f"# yaml-language-server: $schema={SCHEMA}\n")
    assert refusals("run.json", yaml.safe_load(text.replace("1e-3", "0.001").replace("5e-4", "0.0005"))) == []


def test_a_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "distil.yaml").write_text("mine")
    with nothing_is_created(tmp_path):
        assert exit_status("init", tmp_path) == 1
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "distil.yaml").read_text() == "mine"


def test_the_printed_command_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a path with a space becomes two arguments of the printed command."""
    folder = tmp_path / "my models"
    assert exit_status("init", folder) == 0
    command = shlex.split(capsys.readouterr().out.partition("see what would run: ")[2])
    assert command == ["nemo-opd", "distil", str(folder / "distil.yaml"), "run.dry_run=true"]


def test_a_file_in_the_place_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the system's error without a remedy."""
    (tmp_path / "file").touch()
    assert exit_status("init", tmp_path / "file") == 1
    assert capsys.readouterr().err.rstrip().endswith("could not be written (File exists); name another folder")
