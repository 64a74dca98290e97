import subprocess
import sys
from pathlib import Path

from nemo_opd.cluster.session_folder import SessionFolder, remove_abandoned


def test_folder_is_removed_when_closed(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    (folder.path / "session").mkdir()
    folder.close()
    folder.close()
    assert not any(tmp_path.iterdir())


def test_only_folders_of_dead_owners_are_removed(tmp_path: Path) -> None:
    """Bug: a second run on the machine that takes the first one's sockets away."""
    ours = SessionFolder(tmp_path)
    foreign = tmp_path / "opd_without_lock"
    foreign.mkdir()
    code = (
        "import os, signal, sys; from pathlib import Path; from nemo_opd.cluster.session_folder import SessionFolder\n"
        "folder = SessionFolder(Path(sys.argv[1])); print(folder.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    abandoned = Path(killed.stdout.strip())
    assert abandoned.is_dir()
    assert ours.path.is_dir(), "removed by the other process, although we live"
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([ours.path, foreign])
    ours.close()
