"""A command whose standard streams its caller has closed."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.world

CODE = """
import os, subprocess, sys
from nemo_opd.cli.command import standard_streams
with standard_streams():
    print(sys.stdin.read(), end="")
    print("said", file=sys.stderr)
    subprocess.run(["sh", "-c", "echo heard; echo said >&2"], check=True)
    with open(sys.argv[1], "w") as file:
        file.write(f"{sorted({sys.stdin.fileno(), sys.stdout.fileno(), sys.stderr.fileno()})}")
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=["stdin", "stdout", "stderr", "all"])
def test_closed_streams_lead_nowhere(closed: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bugs: a command without stdout ended in a traceback; a file gets stdout's number, and the printed text."""
    result = tmp_path_factory.mktemp("streams") / "result"
    closing = " ".join(f"{number}<&-" if number == 0 else f"{number}>&-" for number in closed)
    command = f'"$0" -c "$1" "$2" {closing}'
    ended = subprocess.run(["sh", "-c", command, sys.executable, CODE, str(result)], stdin=subprocess.DEVNULL)
    assert ended.returncode == os.EX_OK
    assert result.read_text() == "[0, 1, 2]"
