import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_opd.cluster.ray.ray_session import LOCK, SessionFolder, remove_abandoned
from nemo_opd.errors import ClusterError

pytestmark = pytest.mark.world


def test_folder_is_removed_when_closed(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    (folder.path / "session").mkdir()
    folder.close()
    folder.close()
    assert not any(tmp_path.iterdir())


def test_only_folders_of_dead_owners_are_removed(tmp_path: Path) -> None:
    """Bug: a second run on the machine removes the first one's sockets."""
    ours = SessionFolder(tmp_path)
    foreign = tmp_path / "opd_without_lock"
    foreign.mkdir()
    code = (
        "import os, signal, sys; from pathlib import Path; "
        "from nemo_opd.cluster.ray.ray_session import SessionFolder\n"
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


def test_what_a_dying_process_puts_back_is_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a folder that has lost its lock is never removed."""
    folder = SessionFolder(tmp_path)
    (folder.path / "ray").mkdir()
    with monkeypatch.context() as removing:
        removing.setattr(shutil, "rmtree", lambda path, **_: None)
        folder.close()
    assert (folder.path / LOCK).exists()

    remove_abandoned(tmp_path)
    assert not any(tmp_path.iterdir())


def test_what_an_orphan_makes_again_is_removed_later(tmp_path: Path) -> None:
    """Bug: a folder that a process of Ray has created again is never removed."""
    (tmp_path / "opd_again" / "ray" / "session_2026" / "logs").mkdir(parents=True)
    (tmp_path / "opd_mine" / "ray" / "notes").mkdir(parents=True)
    remove_abandoned(tmp_path)
    assert (tmp_path / "opd_again").exists(), "its process may still work"
    for folder in tmp_path.iterdir():
        os.utime(folder, (0, 0))
    remove_abandoned(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["opd_mine"]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"Ray needs a folder for its sockets under .*none, which cannot be created"):
        SessionFolder(tmp_path / "none")


def test_abandoned_folders_are_not_removed_through_links(tmp_path: Path) -> None:
    """Bug: through another user's link in /tmp, this user's files are removed."""
    ours, shared = tmp_path / "ours", tmp_path / "shared"
    for name in ("lock", "again/ray/session_2026/logs"):
        (ours / name).mkdir(parents=True)
    shared.mkdir()
    (ours / "lock" / LOCK).touch()
    (ours / "lock" / "data").mkdir()
    (shared / "opd_folder").symlink_to(ours / "lock")
    (shared / "opd_again").symlink_to(ours / "again")
    (shared / "opd_inside").mkdir()
    (shared / "opd_inside" / "ray").symlink_to(ours / "again" / "ray")
    (shared / "opd_locked").mkdir()
    (shared / "opd_locked" / LOCK).symlink_to(ours / "lock" / LOCK)
    (shared / "opd_locked" / "data").symlink_to(ours / "lock" / "data")
    for folder in (ours / "again", shared / "opd_inside"):
        os.utime(folder, (0, 0))
    entries = sorted(tmp_path.rglob("*"))
    remove_abandoned(shared)
    assert sorted(tmp_path.rglob("*")) == entries


def test_a_folder_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: root removes another user's folder."""
    (tmp_path / "opd_theirs" / "data").mkdir(parents=True)
    (tmp_path / "opd_theirs" / LOCK).touch()
    with monkeypatch.context() as as_another_user:
        as_another_user.setattr(os, "geteuid", lambda: os.getuid() + 1)
        remove_abandoned(tmp_path)
    assert (tmp_path / "opd_theirs" / "data").exists()
