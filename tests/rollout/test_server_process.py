"""A started server leaves no processes or files behind, however it or the run ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from nemo_opd.cli import settings_verbs
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import RolloutError
from nemo_opd.rollout.engine_interface import EngineSpec, Request, Sampling
from nemo_opd.rollout.server import guard
from nemo_opd.rollout.server.client import Http
from nemo_opd.rollout.server.engine import ServerEngine
from nemo_opd.rollout.server.server_process import cause
from tests.rollout import fake_server
from tests.waiting import wait_until

pytestmark = pytest.mark.server

MARK = "NEMO_OPD_TEST_SERVER"
"""An environment variable that identifies a server's processes."""
AT_ONCE_S = 60.0
"""Far below rollout.request_timeout_s."""


def started(behaviour: str, folder: Path, timeout_s: float = 60) -> ServerEngine:
    settings = ServerRollout(
        command=(sys.executable, fake_server.__file__),
        environment={"FAKE": behaviour, MARK: str(folder)},
        start_timeout_s=timeout_s,
    )
    return ServerEngine(settings, EngineSpec(64, frozenset({0}), "float32", folder), "student")


def processes_of(folder: Path) -> list[int]:
    pids = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


def wait_for_number(count: int, folder: Path) -> None:
    wait_until(lambda: len(processes_of(folder)) == count, f"{count} processes")


def environment(folder: Path) -> dict[str, str]:
    """Return the server's environment variables."""
    line = (folder / "server.log").read_text().splitlines()[0]
    return dict(json.loads(line.removeprefix("environment: ")))


def test_a_server_has_a_clean_environment_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: the server sees the run's variables or secrets; an orphan that ignores SIGTERM stays."""
    foreign = ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "WANDB_API_KEY", "HF_TOKEN", "DATABASE_URL")
    for name in foreign:
        monkeypatch.setenv(name, "1")
    engine = started("has children", tmp_path)

    completions = engine.generate([Request(np.array([5], np.int32), 2, 5)], Sampling())
    assert completions[0].ids.tolist() == [6, 6]
    assert len(processes_of(tmp_path)) == 3  # the guard, the server, the child
    assert all(os.getsid(pid) != os.getsid(0) for pid in processes_of(tmp_path))
    engine.close()

    assert processes_of(tmp_path) == []
    variables = environment(tmp_path)
    assert not Path(variables["TMPDIR"]).exists()
    assert not variables.keys() & set(foreign)
    with pytest.raises(RolloutError, match="closed"):
        engine.generate([], Sampling())


def test_only_this_user_can_connect(tmp_path: Path) -> None:
    """Bug: any user of the machine can sample or load other weights through a port."""
    with started("answers", tmp_path) as engine:
        engine.generate([Request(np.array([5], np.int32), 2, 5)], Sampling())
        folder = Path(environment(tmp_path)["TMPDIR"])
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "http").is_socket()
        processes = map(psutil.Process, processes_of(tmp_path))
        assert not [link for process in processes for link in process.net_connections("inet")]


def test_a_port_needs_a_key_that_only_this_user_can_read(tmp_path: Path) -> None:
    """Bug: any user of the machine can sample or load other weights on an SGLang server."""
    settings = ServerRollout(
        program="sglang", command=(sys.executable, fake_server.__file__), environment={MARK: str(tmp_path)}
    )
    request = [Request(np.array([5], np.int32), 2, 5)]
    with ServerEngine(settings, EngineSpec(64, frozenset({0}), "float32", tmp_path), "student") as engine:
        assert engine.generate(request, Sampling())[0].ids.tolist() == [7, 7]

        folder = Path(environment(tmp_path)["TMPDIR"])
        assert folder.stat().st_mode & 0o777 == 0o700
        key = json.loads((folder / "key.yaml").read_text())["api-key"]
        command_lines = [" ".join(psutil.Process(pid).cmdline()) for pid in processes_of(tmp_path)]
        assert not [line for line in command_lines if key in line]
        assert (tmp_path / "server.log").stat().st_mode & 0o777 == 0o600  # SGLang logs all of its settings
        for path in ("/generate", "/update_weights_from_disk"):
            with pytest.raises(RolloutError, match="401"):
                Http(engine.url, 10, trust_env=False).post(path, {"model_path": "/models/another"})


def test_a_server_that_dies_during_a_request_is_noticed_at_once(tmp_path: Path) -> None:
    with started("dies", tmp_path) as engine:
        start = time.monotonic()
        with pytest.raises(RolloutError, match=r"(?s)died \(exit code 3; .*out of memory, says the fake"):
            engine.generate([Request(np.array([5], np.int32), 2, 5)], Sampling())

        assert time.monotonic() - start < AT_ONCE_S
        with pytest.raises(RolloutError, match="died"):
            engine.generate([Request(np.array([5], np.int32), 2, 5)], Sampling())
    assert processes_of(tmp_path) == []


def test_the_last_line_of_a_command_is_the_error_and_not_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def task(_: RunConfig) -> None:
        started("dies at once", tmp_path)

    monkeypatch.setattr(settings_verbs, "run_with_hydra", lambda task, *_, **__: task(None))
    with pytest.raises(SystemExit) as ended:
        settings_verbs.main(task, RunConfig, config_dir=tmp_path, config_name="any")

    *log, last = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 1
    assert any("no such model, says the fake" in line for line in log)
    assert last.startswith("error: the rollout server died (exit code ")
    assert last.endswith(f"its log is {tmp_path / 'server.log'}")


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            (
                "(APIServer pid=26850) WARNING 11-23 [system_utils.py:255] as `OSError: [Errno 24] Too many files`",
                "(VllmWorker-0 pid=27098) ERROR 11-23 [multiproc_executor.py:953] Traceback (most recent call last):",
                "(VllmWorker-0 pid=27098) ERROR 11-23 [multiproc_executor.py:953] ValueError: Available memory is less",
                "  File 'utils.py', line 1431, in wait_for_engine_startup",
                "RuntimeError: Engine core initialization failed. See root cause above.",
            ),
            "ValueError: Available memory is less",
        ),
        (("torch.OutOfMemoryError: CUDA out of memory",), "torch.OutOfMemoryError: CUDA out of memory"),
        (("loading", "no such model", ""), "no such model"),
        ((), "it logged nothing"),
    ],
)
def test_the_cause_is_the_first_error(log: tuple[str, ...], message: str) -> None:
    """Bug: the error shown is only that an engine's start failed, with advice to look above."""
    assert cause(log) == message


def test_a_server_that_dies_at_its_start_is_an_error_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"(?s)died .*no such model, says the fake"):
        started("dies at once", tmp_path)

    assert processes_of(tmp_path) == []


def test_a_server_that_is_never_ready_has_a_limit(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"not ready in 0.5 s \(rollout.start_timeout_s\)"):
        started("is never ready", tmp_path, timeout_s=0.5)

    assert processes_of(tmp_path) == []


def test_a_missing_command_is_named(tmp_path: Path) -> None:
    settings = ServerRollout(command=("no-such-server",))

    with pytest.raises(RolloutError, match=r"(?s)died .*cannot start no-such-server"):
        ServerEngine(settings, EngineSpec(64, frozenset({0}), "float32", tmp_path), "student")


def test_a_server_ends_with_a_killed_run(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from nemo_opd.rollout.server.server_process import ServerProcess\n"
        "_, folder, *command = sys.argv; path = Path(folder); (path / 'temporary').mkdir()\n"
        f"environment = {{'FAKE': 'has children', {MARK!r}: folder}}\n"
        "server = ServerProcess(command, environment, path / 'server.log', path / 'temporary')\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", script, tmp_path, sys.executable, fake_server.__file__, "--port", "0"]
    with subprocess.Popen(command) as run:
        wait_for_number(3, tmp_path)
        temporary = Path(environment(tmp_path)["TMPDIR"])
        assert temporary.exists()
        run.send_signal(signal.SIGKILL)

    wait_for_number(0, tmp_path)
    assert not temporary.exists()


def test_the_shared_memory_of_a_killed_server_is_removed(tmp_path: Path) -> None:
    """Bug: vLLM's segments of 400 MB stay in /dev/shm if it needs too long to end."""
    script = (
        "import signal, time; from multiprocessing.shared_memory import SharedMemory\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); segment = SharedMemory(create=True, size=8)\n"
        "print(segment.name, flush=True); time.sleep(1000)"
    )
    command = [sys.executable, guard.__file__, str(tmp_path / "temporary"), sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        segment = Path("/dev/shm", process.stdout.readline().strip())
        assert segment.exists()
        process.stdin.close()
    assert not segment.exists()
