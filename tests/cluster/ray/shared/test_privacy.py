"""Other users of the machine or the network cannot use a run's Ray: it needs a token and listens only on loopback."""

import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from nemo_opd.cluster.ray.ray_cluster import RayCluster, RayGroup
from nemo_opd.cluster.ray.ray_session import MODE, TOKEN, TOKEN_PATH, VARIABLES

pytestmark = pytest.mark.ray
JOIN = """
import sys
from nemo_opd.cluster.ray.ray_session import RaySession, probe
if sys.argv[2] == "only ask":
    sys.exit(probe(sys.argv[1]))
RaySession(sys.argv[1], num_cpus=1)
"""


@pytest.fixture(scope="module")
def token(cluster: RayCluster) -> str:
    assert cluster.session._folder is not None
    raylet = next(process for process in cluster.session._folder.processes() if process.name() == "raylet")
    return raylet.environ()[TOKEN]


def test_every_port_is_on_loopback(cluster: RayCluster, group: RayGroup) -> None:
    """Catches a port of Ray, the driver, the ranks' store or gloo on another interface."""
    assert cluster.session._folder is not None
    group.call("sum_of_ranks", [(1,)] * 2)
    listening = {
        (process.name(), socket.laddr.ip.removeprefix("::ffff:"))
        for process in (psutil.Process(), *cluster.session._folder.processes())
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    }
    assert {"gcs_server", "raylet", "ray::RankActor"} <= {name for name, _ in listening}
    assert {ip for _, ip in listening} == {"127.0.0.1"}, listening


def test_the_session_folder_is_closed_to_others(cluster: RayCluster) -> None:
    """Bug: all users can read Ray's folder, with sockets and logs."""
    assert cluster.session._folder is not None
    assert stat.S_IMODE(cluster.session._folder.path.stat().st_mode) == 0o700
    assert any(cluster.session._folder.for_ray.iterdir())


def test_the_token_is_in_no_file_and_on_no_command_line(cluster: RayCluster, token: str, home: Path) -> None:
    """Bug: Ray writes a token into the home folder, which all users can read with the usual umask."""
    assert len(token) == 64
    assert cluster.session._folder is not None
    for process in cluster.session._folder.processes():
        with suppress(psutil.NoSuchProcess):  # a rank of the previous test may just be ending
            assert token not in " ".join(process.cmdline())
    assert not any(name in os.environ for name in VARIABLES), "other child processes need not have it"
    assert not (home / ".ray").exists()
    for file in cluster.session._folder.path.rglob("*"):
        assert not file.is_file() or token.encode() not in file.read_bytes(), file


@pytest.mark.parametrize("token_variables", [{}, {MODE: "token", TOKEN: "0" * 64}], ids=["none", "another"])
@pytest.mark.usefixtures("cluster")
def test_a_client_without_the_token_is_refused(home: Path, token_variables: dict[str, str]) -> None:
    result = client({"HOME": str(home), **token_variables})
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        f"nemo_opd.errors.ClusterError: cluster.address={address()}: the cluster requires a token that this process "
        f"does not have; set {MODE}=token, and {TOKEN_PATH} to the file"
    ), result.stderr


def test_a_client_with_the_token_is_let_in(token: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    result = client({MODE: "token", TOKEN_PATH: str(file)}, "only ask")
    assert result.returncode == 0, result.stderr


def client(environment: dict[str, str], mode: str = "join") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", JOIN, address(), mode],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def address() -> str:
    gcs_address: str = ray.get_runtime_context().gcs_address
    return gcs_address
