"""Catches metrics under wrong names or steps, lost settings and results, and a second run after a resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_opd.config.run_fields import Logging, Mlflow
from nemo_opd.errors import ConfigError
from nemo_opd.logging.interface import Best
from nemo_opd.logging.loggers import build
from nemo_opd.logging.trackers import MlflowLogger, allowed_name, artefacts, check_trackers, parameters, results
from tests.logging.synthetic import CLOSING, QUESTIONS, record, summary

PASS = "eval/gsm8k/pass@1"
RESULT = replace(CLOSING, scores=QUESTIONS.scores, best=Best(PASS, 3, 0.25))


def run_and_continue(folder: Path, tracker: dict[str, Any]) -> None:
    """Log three steps, resume after the first step, and finish."""
    settings = Logging.model_validate({**tracker, "console": {"enabled": False}})
    (folder / "config.yaml").write_text("run: {name: demo, seed: 7}\nteachers: [{name: a}, {name: b}]")
    for start, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        with build(settings, folder) as loggers:
            loggers.start(summary(folder), start)
            for step in steps:
                loggers.log(step, {**record(step), PASS: step / 12, "val/none": float("nan")})
            if start:
                (folder / "final").mkdir()
                loggers.summary(RESULT)


@pytest.mark.nightly
def test_mlflow_has_one_run_with_settings_metrics_and_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run_and_continue(tmp_path, {"mlflow": {"enabled": True, "tracking_uri": uri, "experiment": "trial"}})
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    assert run.data.params == {"run.name": "demo", "run.seed": "7", "teachers.0.name": "a", "teachers.1.name": "b"}
    history = client.get_metric_history(run.info.run_id, "eval/gsm8k/pass_at_1")
    assert sorted((metric.step, metric.value) for metric in history) == [(n, n / 12) for n in (1, 2, 2, 3, 3)]
    assert run.data.metrics["train/kd/phi4mini"] == 0.5
    assert run.data.metrics["bits_per_byte/student after"] == 1.5
    assert run.data.metrics["score/greedy/teacher phi4mini"] == 0.9
    assert run.data.tags["path.model"] == str(tmp_path / "final")


def test_trackio_has_one_run_with_settings_metrics_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio_database"))
    trackio = pytest.importorskip("trackio")
    run_and_continue(tmp_path, {"trackio": {"enabled": True, "project": "trial"}})
    assert capsys.readouterr().out == ""
    (run,) = trackio.Api().runs("trial")
    assert run.name == (tmp_path / "trackio" / "run_id").read_text()
    assert run.name.startswith("demo-")
    assert run.config["teachers"] == [{"name": "a"}, {"name": "b"}]
    logged = trackio.SQLiteStorage.get_logs("trial", run.name)
    assert [(entry["step"], entry[PASS]) for entry in logged if PASS in entry] == [(n, n / 12) for n in (1, 2, 3, 2, 3)]
    (result,) = [entry for entry in logged if "bits_per_byte/student after" in entry]
    assert result["score/greedy/teacher phi4mini"] == 0.9
    assert str(tmp_path / "final") in str(result["artefacts"])


def test_names_and_settings_in_mlflows_form() -> None:
    assert allowed_name("eval/gsm8k/pass@1") == "eval/gsm8k/pass_at_1"
    assert allowed_name("eval/größe,µ/mean@4") == "eval/größe_µ/mean_at_4"
    assert parameters({"a": {"b": [1, {"c": None}]}, "d": "x" * 9000}) == {
        "a.b.0": "1",
        "a.b.1.c": "None",
        "d": "x" * 6000,
    }


def test_results_and_paths_have_names(tmp_path: Path) -> None:
    """Bug: a score, or the folder of averaged weights, is missing from all trackers."""
    for folder in ("final", "final_ema", "report"):
        (tmp_path / folder).mkdir()
    assert artefacts(tmp_path) == {"model": str(tmp_path / "final"), "final_ema": str(tmp_path / "final_ema")}
    assert results(RESULT) == {
        "bits_per_byte/student before": 2.0,
        "bits_per_byte/student after": 1.5,
        "shared_bits_per_byte/student before": 2.5,
        "shared_bits_per_byte/student after": 1.75,
        "shared_bits_per_byte/phi4mini": 1.25,
        "score/greedy/student before": 0.2,
        "score/greedy/student after": 0.4,
        "score/greedy/teacher phi4mini": 0.9,
        "score/pass@4/student after": 0.6,
        f"best/{PASS}": 0.25,
        "best/step": 3,
    }


@pytest.mark.nightly
def test_a_server_that_does_not_answer_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logger = MlflowLogger(Mlflow(enabled=True, tracking_uri="http://127.0.0.1:9"), tmp_path)
    with pytest.raises(ConfigError, match=r"^logging\.mlflow: the run could not be started .*tracking_uri"):
        logger.start(summary(tmp_path), 0)
    logger.close()


@pytest.mark.nightly
@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "sqlite:///{folder}/file/mlflow.db", "unknown://server"])
def test_a_store_that_cannot_be_used_is_told_before_the_run(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a dry run passes, and the run fails."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "file").touch()
    mlflow = {"enabled": True, "tracking_uri": uri.format(folder=tmp_path)}
    with pytest.raises(ConfigError, match=r"^logging\.mlflow: its store cannot be used .*tracking_uri"):
        check_trackers(Logging.model_validate({"mlflow": mlflow}))
    check_trackers(Logging.model_validate({"mlflow": {**mlflow, "tracking_uri": f"sqlite:///{tmp_path}/new.db"}}))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_trackio_needs_a_folder_or_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a dry run passes, and the run fails."""
    utils = pytest.importorskip("trackio.utils")
    (tmp_path / "file").touch()
    monkeypatch.setattr(utils, "TRACKIO_DIR", tmp_path / "file" / "trackio")
    with pytest.raises(ConfigError, match=r"^logging\.trackio: .*file is a file, .*TRACKIO_DIR"):
        check_trackers(Logging.model_validate({"trackio": {"enabled": True}}))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"^logging\.trackio\.space=me/runs: no token for the hub"):
        check_trackers(Logging.model_validate({"trackio": {"enabled": True, "space": "me/runs"}}))
