"""Catches programs that get out of a sandbox, outlive it, or pass without being right; all of a kind run together."""

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
from tests.sandbox.attacks import BOMBS, CHEATS, PRINTS, REACHED, TESTS, WANTED, Attack, reaching
from tests.waiting import wait_until

pytestmark = pytest.mark.world
KINDS: tuple[Isolation, ...] = ("bubblewrap", "namespaces")
SECRET = "hf_verysecrettoken"
ATTACKS = BOMBS | CHEATS | PRINTS
REACHING = reaching("", "", "", 0, "", 0)
SEVEN = InputOutput((("", "7"),))
RIGHT = f"def answer(n): return {WANTED - 6} + n"
ON_A_BUSY_MACHINE = ("time", "processor time")
ENDLESS = 99
"""Seconds that programs sleep: a process that does is one that was left behind."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """Listen at a port, at a socket in the file system, and at one by name alone."""
    path = str(tmp_path_factory.mktemp("socket") / "s")
    listening = [socket.create_server(("127.0.0.1", 0)), *(socket.socket(socket.AF_UNIX) for _ in range(2))]
    for each, address in zip(listening[1:], (path, "\0" + path), strict=True):
        each.bind(address)
        each.listen()
    yield listening[0].getsockname()[1], path
    for each in listening:
        each.close()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory, servers: tuple[int, str]) -> Iterator[dict[str, Attack]]:
    """Attacks on a home folder, a token in the environment of this process and its parent, and servers."""
    home, written = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("outside")
    (home / "token").write_text(SECRET)
    child = subprocess.Popen(["sleep", str(ENDLESS + 1)], env={"HF_TOKEN": SECRET})
    before = os.environ.get("HF_TOKEN")
    os.environ["HF_TOKEN"] = SECRET
    yield reaching(str(home), SECRET, str(written), *servers, driver=child.pid)
    if before is None:
        del os.environ["HF_TOKEN"]
    else:
        os.environ["HF_TOKEN"] = before
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
    tried: dict[str, tuple[str, Tests]] = {"right": (RIGHT, Assertions(f"assert answer(6) == {WANTED}"))}
    tried |= {name: (each.program, Assertions(each.tests)) for name, each in (BOMBS | CHEATS | outside).items()}
    tried |= {name: (each.program, SEVEN) for name, each in PRINTS.items()}
    tried["prints what is right"] = ("print(7)", SEVEN)
    with Checker(settings, "sandbox") as checker:
        waiting = {name: checker.submit(*each) for name, each in tried.items()}
        return {name: each.result() for name, each in waiting.items()}


def test_right_programs_pass(verdicts: dict[str, Verdict]) -> None:
    """Bug: everything counts as wrong, so that no attack shows."""
    assert verdicts["right"].passed
    assert verdicts["prints what is right"].passed


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_counts_as_wrong(verdicts: dict[str, Verdict], name: str) -> None:
    verdict, wanted = verdicts[name], ATTACKS[name].reasons
    assert not verdict.passed
    assert not wanted or verdict.reason in (*wanted, *ON_A_BUSY_MACHINE)


def test_memory_is_counted_over_processes(verdicts: dict[str, Verdict]) -> None:
    """Bug: a limit of each process alone, so that time ends the bomb."""
    assert verdicts["memory bomb of several processes"].reason == "memory"


@pytest.mark.parametrize("name", REACHING)
def test_what_is_outside_is_out_of_reach(verdicts: dict[str, Verdict], name: str) -> None:
    assert not verdicts[name].passed


def test_no_process_is_left(verdicts: dict[str, Verdict]) -> None:
    """Bug: a daemon, or a child of a bomb, goes on when its program has been judged."""

    def are_gone() -> bool:
        return not any(str(INSIDE).encode() in line for line in _command_lines())

    wait_until(are_gone, "end of all processes of the sandboxes")


def _command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # ended meanwhile
            yield path.read_bytes()


def test_a_sandbox_that_is_ended_while_it_is_made_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: bubblewrap ends by a signal, and its child, which does not know its parent yet, waits for it forever."""
    program, started = tmp_path / "bwrap", tmp_path / "started"
    program.write_text(f"#!/bin/sh\nsleep 999 &\necho $! > {started}.new\nmv {started}.new {started}\nwait\n")
    program.chmod(0o700)
    monkeypatch.setattr(process, "PROGRAM", str(program))
    with SandboxedProcess("bubblewrap", SandboxSettings(), "run.py"):
        wait_until(started.exists, "child")
        child = psutil.Process(int(started.read_text()))
    wait_until(lambda: has_ended(child), "end of the child")


def test_the_attacks_reach_what_is_outside_without_a_sandbox(outside: dict[str, Attack]) -> None:
    """Bug of the tests above: an attack that fails by a mistake of its own shows nothing."""
    attacks = {name: each for name, each in outside.items() if "own files" not in name}
    script = "\n".join(f"{each.program}\nassert answer(6) is True, {name!r}" for name, each in attacks.items())
    seeking = CHEATS["looks for the tests"].program
    for place in ('"/tmp/**", ', ', "../**"'):  # where other tests have much
        seeking = seeking.replace(place, "")
    script += f"\n{seeking}\ntests = {TESTS!r}\nexec(tests)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert REACHED in {each.tests for each in attacks.values()}
