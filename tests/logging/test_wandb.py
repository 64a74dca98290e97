"""Catches a prompt for a key, a run that needs the network, a dry run that passes although the run cannot log in, and a
resumed run with a new id."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_opd.errors import ConfigError
from nemo_opd.preflight.inputs import check_inputs
from tests.composition import compose
from tests.tiny import Tiny

RUN = """
import sys
from pathlib import Path
from nemo_opd.config.run_fields import Logging
from nemo_opd.logging.loggers import build
from nemo_opd.logging.trackers import check_credentials
from tests.logging.synthetic import CLOSING, record, summary
folder, mode = Path(sys.argv[1]), sys.argv[2]
settings = Logging.model_validate({"wandb": {"enabled": True, "mode": mode}, "console": {"enabled": False}})
check_credentials(settings.wandb)
for step in (0, 2):
    with build(settings, folder) as loggers:
        loggers.start(summary(folder), step)
        loggers.log(step + 1, record(step + 1))
        loggers.log(step + 2, record(step + 2))
        loggers.summary(CLOSING)
"""
ROOT = Path(__file__).parents[2]
# A proxy that does not exist: requests to the network fail.
NO_NETWORK = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")


def run_in_a_terminal(folder: Path, mode: str) -> tuple[int, str]:
    """Return exit status and output of a run without key and network, at a terminal that does not answer prompts."""
    without_wandb = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    home = folder / "home"
    home.mkdir()
    environment = {**without_wandb, **NO_NETWORK, "HOME": str(home), "WANDB_CONFIG_DIR": str(home), "TERM": "xterm"}
    terminal, end = os.openpty()
    try:
        command = [sys.executable, "-c", RUN, str(folder / "run"), mode]
        done = subprocess.run(command, env=environment, cwd=ROOT, stdin=end, stdout=end, stderr=end, timeout=60)
        os.set_blocking(terminal, False)
        try:
            return done.returncode, os.read(terminal, 1 << 16).decode()
        except BlockingIOError:
            return done.returncode, ""
    finally:
        os.close(end)
        os.close(terminal)


@pytest.mark.world
def test_offline_writes_a_run_and_a_continued_run_keeps_its_id(tmp_path: Path) -> None:
    code, output = run_in_a_terminal(tmp_path, "offline")
    assert (code, output) == (0, "")
    identity = (tmp_path / "run" / "wandb" / "run_id").read_text()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2
    assert all(b"train/grad_norm" in file.read_bytes() for file in files)


@pytest.mark.world
def test_online_without_a_key_is_one_clear_error_before_anything_is_written(tmp_path: Path) -> None:
    code, output = run_in_a_terminal(tmp_path, "online")
    assert code == 1
    last = output.strip().splitlines()[-1]
    assert last.startswith("nemo_opd.errors.ConfigError: logging.wandb.mode=online needs an API key")
    assert "logging.wandb.mode=offline" in last
    assert output.startswith("Traceback")  # a prompt would come before it
    assert not (tmp_path / "run").exists()


def test_a_dry_run_needs_the_key_that_the_run_needs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "short")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    overrides = ("run.dry_run=true", "logging.wandb.enabled=true")
    with pytest.raises(ConfigError, match="the API key is not usable"):
        check_inputs(compose(*tiny.overrides(*overrides)), on_policy=False)
    check_inputs(compose(*tiny.overrides(*overrides, "logging.wandb.mode=offline")), on_policy=False)
