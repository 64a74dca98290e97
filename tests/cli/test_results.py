"""Exit statuses, results as JSON, quiet commands, the list of runs, and finished runs."""

import json
import os
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from nemo_opd.checkpoint.run_directory import RunLock
from nemo_opd.cli import settings_verbs
from nemo_opd.cli.command import output_of
from nemo_opd.cli.main import MEANINGS
from nemo_opd.config.composition import to_yaml
from nemo_opd.config.reference import help_text
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import ModelError
from nemo_opd.logging.provenance import FINISHED, ModelOrigin, Provenance, record_end, write_provenance
from nemo_opd.models.folder import OwnCard, check_folder
from nemo_opd.preflight.summary import _folded
from nemo_opd.training.finished import Finished, finished_before
from tests.composition import CONFIGS, compose
from tests.exit_status import exit_status

ROOT = Path(__file__).resolve().parents[2]
STUDENT = ModelOrigin("student", "demo", "demo", 10, OwnCard())


def written_run(folder: Path, *overrides: str) -> RunConfig:
    """Write the files of a run of two steps that has exported its model, but recorded no end."""
    config = compose(f"run.output_dir={folder}", "train.max_steps=2", "run.resume=auto", *overrides)
    for name in ("final", "checkpoints/step_000002"):
        (folder / name).mkdir(parents=True)
    (folder / "checkpoints/step_000002/manifest.json").write_text("{}")
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "val/bits_per_byte": 2.0}\n{"step": 2, "val/bits_per_byte": 1.5}\n'
    )
    write_provenance(folder, Provenance("nemo-opd distil", {}, STUDENT, (), total_steps=2))
    return config


@pytest.mark.parametrize(("is_complete", "status"), [(True, 0), (False, 75)])
def test_a_run_that_ended_early_does_not_exit_with_0(
    is_complete: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: to a job script, a run that was stopped early looks finished."""
    verb = replace(settings_verbs.DISTIL, task=lambda _: Finished(tmp_path, is_complete))
    monkeypatch.setattr(settings_verbs, "DISTIL", verb)
    assert exit_status("distil", "off_policy_demo") == status


def test_a_file_of_a_run_is_not_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a message about unknown keys for each section of the file."""
    assert exit_status("evaluate", "off_policy_demo") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "model=FOLDER" in line


def test_the_page_has_all_exit_statuses() -> None:
    """Bug: an outdated table."""
    page = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert {int(status): meaning.replace("`", "") for status, meaning in rows} == MEANINGS


@pytest.mark.parametrize("quiet", [False, True])
def test_json_is_alone_on_stdout(quiet: bool, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Bugs: lines of a child process are mixed into stdout; NaN, which is not JSON."""
    with output_of(Namespace(json=True, quiet=quiet)) as print_json:
        os.system("echo from a child process")
        print_json({"path": tmp_path, "loss": float("nan")})
    os.system("echo afterwards")
    output = capfd.readouterr()
    first, *later = output.out.splitlines()
    assert json.loads(first) == {"path": str(tmp_path), "loss": None}
    assert later == ["afterwards"]
    assert output.err.splitlines() == ([] if quiet else ["from a child process"])


def test_runs_are_listed_with_status_and_change(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bugs: a running or failed run looks finished; a run inside another one, such as a baseline, is not listed."""
    written_run(tmp_path / "a")
    written_run(tmp_path / "a" / "baseline")
    record_end(tmp_path / "a", "failed")
    with RunLock(tmp_path / "a" / "baseline"):
        assert exit_status("runs", tmp_path) == 0
        lines = capfd.readouterr().out.splitlines()
        assert exit_status("runs", tmp_path, "--json") == 0
    assert [line.split()[0] for line in lines] == ["status", "failed", "running"]
    assert lines[2].endswith(f"{tmp_path / 'a' / 'baseline'}")
    assert "2/2   1.5000 (-25.0 %)" in lines[1]
    first, _ = json.loads(capfd.readouterr().out)["runs"]
    assert (first["status"], first["step"], first["results"]["after"]["bits_per_byte"]) == ("failed", 2, 1.5)
    assert exit_status("runs", tmp_path / "nowhere") == 1


def test_scores_from_before_the_first_step_are_no_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bug: the score before training looks like the result of a run that ended early."""
    written_run(tmp_path, "evaluation.every=5")
    score = {"eval/pass@1": 0.25, "eval/pass@1_low": 0.0, "eval/pass@1_high": 0.5}
    records = [{"step": 0, **score}, {"step": 1}, {"step": 2, **score}]
    for number, is_shown in ((2, False), (3, True)):
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records[:number]))
        assert exit_status("runs", tmp_path) == 0
        assert ("pass@1 25.0 % (0.0 to 50.0 %)" in capfd.readouterr().out) == is_shown


def test_a_report_without_settings_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    written_run(tmp_path)
    (tmp_path / "config.yaml").unlink()
    assert exit_status("report", tmp_path) == 0
    assert "config.yaml does not exist, so the report has no table of results" in capfd.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "config.yaml",
        "metrics.jsonl",
        "provenance.json",
        "samples.jsonl",
        "validation.jsonl",
        "projections.json",
    ],
)
def test_a_pipe_among_the_files_of_a_run_is_not_waited_for(name: str, tmp_path: Path) -> None:
    """Bug: `report` on a stranger's folder hangs."""
    written_run(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    for verb in ("report", "runs"):
        assert exit_status(verb, tmp_path) in (0, 1)


def test_a_finished_run_says_so_unless_its_end_would_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bugs: models are loaded although no step remains; a finished run cannot be trained longer."""
    config = written_run(tmp_path / "run")
    assert finished_before(config) is None  # it was killed
    record_end(tmp_path / "run", FINISHED)
    assert finished_before(config) == Finished(tmp_path / "run")
    assert "ended at step 2 of 2" in (printed := capsys.readouterr().out)
    assert "raise train.max_steps" in printed
    resolved = config.student.model_copy(update={"offload": True})
    decided = config.model_copy(update={"student": resolved})
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(decided))  # with `auto` resolved, as a run writes it
    assert finished_before(config) is not None
    fixed = config.student.model_copy(update={"dtype": "float32"})
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config.model_copy(update={"student": fixed})))
    assert finished_before(config) is None  # dtype=auto may be another dtype
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    longer = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 3})})
    assert finished_before(longer) is None
    another = config.model_copy(update={"loss": config.loss.model_copy(update={"kd_weight": 2.0})})
    assert finished_before(another) is None  # which then is refused as another run
    (tmp_path / "run" / "checkpoints" / "step_000002").rename(tmp_path / "run" / "checkpoints" / "step_000001")
    assert finished_before(config) is None  # its last steps are lost
    (tmp_path / "run" / "checkpoints" / "step_000001").rename(tmp_path / "run" / "checkpoints" / "step_000002")
    (tmp_path / "run" / "final").rmdir()
    assert finished_before(config) is None


def test_warnings_of_a_kind_are_one() -> None:
    """Bug: the same sentence for each of eight teachers hides all different warnings."""
    warnings = ["a: only 3 % of the tokens", "b: only 41 % of the tokens", "x.txt is also in data.train", "b: other"]
    assert list(_folded(warnings, {"a", "b"})) == [
        "a: only 3 % of the tokens (the same holds for b)",
        "x.txt is also in data.train",
        "b: other",
    ]


def test_a_mistyped_folder_is_not_looked_for_on_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: minutes of silent retries before an error about the connection."""

    class Session:
        def head(self, *_: object, **__: object) -> None:
            raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    with pytest.raises(ModelError, match=r"^student\.model=models/stduent: there is no such folder, and the hub"):
        check_folder("models/stduent", key="student.model")


def test_help_has_a_line_for_each_loss() -> None:
    """Bugs: a loss without advice; advice that is longer than 80 columns."""
    lines = help_text(RunConfig, CONFIGS, "nemo-opd distil", ["loss"]).splitlines()
    types = {match[1] for line in lines if (match := re.match(r"loss of type=(\w+):", line))}
    advice = {line.split()[0]: line for line in lines if re.match(r"  \w+ +take ", line)}
    assert advice.keys() == types
    assert max(map(len, advice.values())) <= 80
