"""The choice of a transport by a probe, and the probe itself."""

import sys
import time

import pytest

from nemo_opd.config.cluster import HiddenStatesHandoff
from nemo_opd.errors import ConfigError
from nemo_opd.handoff import transport
from nemo_opd.handoff.transport import TRANSPORTS, choose_transport, complaint, hand_over, probe_transport


def never() -> str | None:
    raise AssertionError("the choice does not depend on a probe")


def test_the_probe_decides() -> None:
    auto = HiddenStatesHandoff()
    assert choose_transport(auto, "cuda", lambda: None) == ("cuda_ipc", [])
    name, (warning,) = choose_transport(auto, "cuda", lambda: "GPU 1 has no peer access to GPU 0")
    assert name == "pinned_memory"
    assert warning.startswith("handoff.transport=auto: teachers' output goes through pinned main memory")
    assert "(GPU 1 has no peer access to GPU 0)" in warning
    assert "\n" not in warning


def test_no_probe_if_the_answer_does_not_matter() -> None:
    """Bug: runs on CPUs spend seconds on probing GPUs."""
    through_memory = HiddenStatesHandoff(transport="shared_memory")
    assert choose_transport(HiddenStatesHandoff(), "cpu", never) == ("shared_memory", [])
    assert choose_transport(through_memory, "cpu", never) == ("shared_memory", [])
    assert choose_transport(through_memory, "cuda", never) == ("pinned_memory", [])


def test_cuda_ipc_that_is_set_but_impossible_is_one_error() -> None:
    config = HiddenStatesHandoff(transport="cuda_ipc")
    assert choose_transport(config, "cuda", lambda: None) == ("cuda_ipc", [])
    with pytest.raises(ConfigError) as caught:
        choose_transport(config, "cuda", lambda: "RuntimeError: invalid device context")
    message = str(caught.value)
    assert message.startswith("handoff.transport=cuda_ipc: ")
    assert "(RuntimeError: invalid device context); write handoff.transport=auto or shared_memory" in message
    assert "--pid=host --ipc=host" in message


@pytest.mark.world
def test_a_probe_that_hangs_is_ended() -> None:
    """Bugs: preflight waits for a driver that never answers; a process that the probe has started goes on."""
    begin = time.monotonic()
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert complaint([sys.executable, "-c", child], 1.0) == "no answer in 1 s"
    assert time.monotonic() - begin < 30


@pytest.mark.world
def test_output_that_stays_open_does_not_block_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: after the kill, an endless wait for a process that cannot be killed or has left the session."""
    monkeypatch.setattr(transport, "_CLOSED_S", 0.5)
    begin = time.monotonic()
    assert complaint(["sh", "-c", "echo said; setsid sleep 20 & wait"], 1.0) == "no answer in 1 s"
    assert time.monotonic() - begin < 15


@pytest.mark.world
def test_the_last_line_of_a_failed_probe_is_its_reason() -> None:
    failing = "print('started'); raise SystemExit('RuntimeError: no such handle')"
    assert complaint([sys.executable, "-c", failing], 60) == "RuntimeError: no such handle"
    assert complaint([sys.executable, "-c", "raise SystemExit(3)"], 60) == "exit status 3"
    assert complaint([sys.executable, "-c", "print('fine')"], 60) is None


@pytest.mark.world
@pytest.mark.parametrize(
    "transport", [pytest.param(name, marks=() if name == "shared_memory" else pytest.mark.gpu) for name in TRANSPORTS]
)
def test_buffers_can_be_read_on_this_machine(transport: str) -> None:
    """The full probe, with a larger buffer and a reader for each kind of pair."""
    assert probe_transport(transport, [(0, 0), (0, 1)] if transport == "shared_memory" else [(0, 0)]) is None


@pytest.mark.world
def test_an_error_of_the_reader_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a probe waits until its timeout for a reader that has failed."""

    def fails(*_: object) -> None:
        raise RuntimeError("cannot be mapped\n here")

    monkeypatch.setattr(TRANSPORTS["shared_memory"][1], "_map", fails)
    with pytest.raises(Exception, match="RuntimeError: cannot be mapped here"):
        hand_over("shared_memory", [(0, 0)])
