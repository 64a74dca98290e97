"""The end of Ray's own processes is noticed at once, on this machine and elsewhere."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from nemo_opd.cluster.ray.services import Services, end, processes_of_sessions
from nemo_opd.errors import ClusterError

pytestmark = pytest.mark.world


def test_a_process_that_ended_is_missed() -> None:
    """Bug: a zombie counts as alive; Ray's processes are the driver's children."""
    with subprocess.Popen(["sleep", "60"]) as process:
        services = Services([psutil.Process(process.pid)])
        services.require_alive()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ClusterError, match=r"^Ray's own sleep ended, .*run.resume=auto continues from the last ch"):
            services.require_alive()
    assert not services.are_alive


def test_a_head_that_does_not_answer_is_missed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        services = Services(address=address)
        services.require_alive()
    with pytest.raises(ClusterError, match=f"^the Ray cluster's head at {address} ended"):
        services.require_alive()


def test_without_anything_to_ask_all_is_well() -> None:
    assert Services().are_alive


def test_orphans_are_found_by_their_session() -> None:
    """Bug: a process that Ray has just started outlives the run and creates its session's folder again."""
    script = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
    assert [process.pid for process in processes_of_sessions({parent.pid})] == [orphan]
    end(processes_of_sessions({parent.pid}))
    assert processes_of_sessions({parent.pid}) == []
