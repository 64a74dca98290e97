"""Catches programs that escape a sandbox, outlive it, or pass without being right."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nemo_opd.cluster.ray.services import has_ended
from nemo_opd.config.reward import Isolation, SandboxSettings
from nemo_opd.errors import ConfigError
from nemo_opd.sandbox import process
from nemo_opd.sandbox.checker import Assertions, Checker, InputOutput, Tests, Verdict, isolation_of
from nemo_opd.sandbox.process import INSIDE, SandboxedProcess
from tests.sandbox.attacks import BOMBS, CHEATS, EXPECTED, PRINTS, REACHED, TESTS, Attack, reaching
from tests.waiting import wait_until

pytestmark = pytest.mark.world
KINDS: tuple[Isolation, ...] = ("bubblewrap", "namespaces")
SECRET = "hf_verysecrettoken"
ATTACKS = BOMBS | CHEATS | PRINTS
REACHING = reaching("", "", "", 0, "", 0)
SEVEN = InputOutput((("", "7"),))
RIGHT = f"def answer(n): return {EXPECTED - 6} + n"
ON_A_BUSY_MACHINE = ("time", "processor time")
ENDLESS = 99
"""Seconds that programs sleep. A process with this argument was left behind."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """Listen on a port, on a Unix socket in the file system, and on an abstract Unix socket."""
    path = str(tmp_path_factory.mktemp("socket") / "s")
    listening = [socket.create_server(("127.0.0.1", 0)), *(socket.socket(socket.AF_UNIX) for _ in range(2))]
    for server, address in zip(listening[1:], (path, "\0" + path), strict=True):
        server.bind(address)
        server.listen()
    yield listening[0].getsockname()[1], path
    for server in listening:
        server.close()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory, servers: tuple[int, str]) -> Iterator[dict[str, Attack]]:
    """Yield attacks on a home folder, on a token in the environment of this process and a child, and on servers."""
    home, written = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("outside")
    (home / "token").write_text(SECRET)
    child = subprocess.Popen(["sleep", str(ENDLESS + 1)], env={"HF_TOKEN": SECRET})
    previous = os.environ.get("HF_TOKEN")
    os.environ["HF_TOKEN"] = SECRET
    yield reaching(str(home), SECRET, str(written), *servers, driver=child.pid)
    if previous is None:
        del os.environ["HF_TOKEN"]
    else:
        os.environ["HF_TOKEN"] = previous
    child.kill()
    child.wait()


def obstacle(kind: Isolation) -> str | None:
    """Return why a kind of sandbox does not work here."""
    try:
        isolation_of(SandboxSettings(isolation=kind), "sandbox")
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture(scope="module", params=KINDS)
def verdicts(request: pytest.FixtureRequest, outside: dict[str, Attack]) -> dict[str, Verdict]:
    """Run all attacks in each kind of sandbox."""
    kind: Isolation = request.param
    if reason := obstacle(kind):
        pytest.skip(reason)
    settings = SandboxSettings(isolation=kind, timeout_s=1, memory_mb=256, scratch_mb=4, output_kb=64, workers=4)
    programs: dict[str, tuple[str, Tests]] = {"right": (RIGHT, Assertions(f"assert answer(6) == {EXPECTED}"))}
    programs |= {
        name: (attack.program, Assertions(attack.tests)) for name, attack in (BOMBS | CHEATS | outside).items()
    }
    programs |= {name: (attack.program, SEVEN) for name, attack in PRINTS.items()}
    programs["prints what is right"] = ("print(7)", SEVEN)
    with Checker(settings, "sandbox") as checker:
        futures = {name: checker.submit(*program) for name, program in programs.items()}
        return {name: future.result() for name, future in futures.items()}


def test_right_programs_pass(verdicts: dict[str, Verdict]) -> None:
    """Bug: every program counts as wrong, which hides attacks that pass."""
    assert verdicts["right"].passed
    assert verdicts["prints what is right"].passed


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_counts_as_wrong(verdicts: dict[str, Verdict], name: str) -> None:
    verdict, reasons = verdicts[name], ATTACKS[name].reasons
    assert not verdict.passed
    assert not reasons or verdict.reason in (*reasons, *ON_A_BUSY_MACHINE)


def test_memory_is_counted_over_processes(verdicts: dict[str, Verdict]) -> None:
    """Bug: a limit for each process alone, so the bomb ends only by its time."""
    assert verdicts["memory bomb of several processes"].reason == "memory"


@pytest.mark.parametrize("name", REACHING)
def test_targets_outside_cannot_be_reached(verdicts: dict[str, Verdict], name: str) -> None:
    assert not verdicts[name].passed


def test_no_process_is_left(verdicts: dict[str, Verdict]) -> None:
    """Bug: a daemon, or a child of a bomb, goes on after its program's verdict."""

    def are_gone() -> bool:
        return not any(str(INSIDE).encode() in line for line in _command_lines())

    wait_until(are_gone, "end of all processes of the sandboxes")


def _command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # ended meanwhile
            yield path.read_bytes()


def test_a_sandbox_that_ends_during_its_start_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a signal ends bubblewrap, and its new child, which does not yet watch its parent, waits forever."""
    program, started = tmp_path / "bwrap", tmp_path / "started"
    program.write_text(f"#!/bin/sh\nsleep 999 &\necho $! > {started}.new\nmv {started}.new {started}\nwait\n")
    program.chmod(0o700)
    monkeypatch.setattr(process, "PROGRAM", str(program))
    with SandboxedProcess("bubblewrap", SandboxSettings(), "run.py"):
        wait_until(started.exists, "child")
        child = psutil.Process(int(started.read_text()))
    wait_until(lambda: has_ended(child), "end of the child")


def test_attacks_reach_their_targets_without_a_sandbox(outside: dict[str, Attack]) -> None:
    """Catches attacks that always fail, so the tests above would pass without a sandbox."""
    attacks = {name: attack for name, attack in outside.items() if "own files" not in name}
    script = "\n".join(f"{attack.program}\nassert answer(6) is True, {name!r}" for name, attack in attacks.items())
    seeking = CHEATS["looks for the tests"].program
    for place in ('"/tmp/**", ', ', "../**"'):  # folders that may hold many files of other tests
        seeking = seeking.replace(place, "")
    script += f"\n{seeking}\ntests = {TESTS!r}\nexec(tests)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert REACHED in {attack.tests for attack in attacks.values()}
