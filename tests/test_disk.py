"""A failed write is reported in one line with the file, the reason and the remedy, whichever library wrote."""

import errno
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors
from torch import nn
from torch.optim.lr_scheduler import ConstantLR
from transformers import AutoTokenizer

from nemo_opd.checkpoint.state import save_state
from nemo_opd.errors import CheckpointError, DataError, OPDError, StorageError
from nemo_opd.files import (
    move_into_place,
    put_back,
    read_file,
    replacing,
    require_room,
    require_uncompressed,
    settle,
    storage_errors,
    umask_mode,
    write_atomically,
)
from nemo_opd.logging.loggers import JsonlLogger
from nemo_opd.logging.scores import SampleLog, ShownAnswer
from nemo_opd.projection import ProjectionMatrix
from tests.full_disk import largest_file
from tests.tiny import Tiny

FULL = Path("/dev/full")
"""Fails every write, as a full disk does."""
TOO_LARGE = 100_000
"""Size in bytes, above the limits of these tests."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may have more than 20 kB."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with largest_file(20_000):
        yield
    signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def one_line(error: OPDError) -> str:
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, r"\(No space left on device; 1\.5 kB needed, [\d.]+ \w*B free\); free some space, or"),
        (
            errno.EDQUOT,
            r"\(Disk quota exceeded; 1\.5 kB needed, [\d.]+ \w*B free\); free some space, or have",
        ),
        (errno.EFBIG, r"\(File too large\); raise the limit on a file's size \(ulimit -f\), or"),
        (errno.EIO, r"\(Input/output error\); check the disk, or"),
        (errno.EROFS, r"\(Read-only file system\); mount it for writing, or"),
        (errno.EACCES, r"\(Permission denied\); change its permissions, or"),
        (errno.ENAMETOOLONG, r"\(File name too long\);"),
    ],
)
def test_every_reason_has_its_way_out(number: int, way_out: str, tmp_path: Path) -> None:
    expected = rf"^{re.escape(str(tmp_path))}/a could not be written {way_out}.* choose another run\.output_dir$"
    with pytest.raises(StorageError, match=expected) as caught, storage_errors(tmp_path / "a", needed=1500):
        raise OSError(number, os.strerror(number))
    assert str(pickle.loads(pickle.dumps(caught.value))) == one_line(caught.value)


def test_other_errors_pass(tmp_path: Path) -> None:
    """Bug: an unrelated OSError in `__context__`, already handled, turned another error into a StorageError."""
    for error in (DataError("mine"), ValueError("a bug")):
        with pytest.raises(type(error), match=str(error)), storage_errors(tmp_path):
            raise error
    with pytest.raises(ValueError, match="a bug"), storage_errors(tmp_path):
        raise_while_handling(FileNotFoundError(errno.ENOENT, "absent"), ValueError("a bug"))
    with pytest.raises(RuntimeError, match="no memory"), storage_errors(tmp_path):
        raise_while_handling(PermissionError(errno.EACCES, "denied"), RuntimeError("no memory"))


def raise_while_handling(first: Exception, second: Exception) -> None:
    try:
        raise first
    except type(first):
        raise second  # noqa: B904


def test_an_error_of_the_network_passes(tmp_path: Path) -> None:
    """Bug: a server that was gone became a file that could not be written."""
    with pytest.raises(ConnectionRefusedError), storage_errors(tmp_path):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def test_a_file_system_that_tells_no_size_has_room() -> None:
    """Bug: a run could not start on a network file system that reports no size."""
    require_room(Path("/proc"), 10**6, "the model", instead="")


def test_room_is_asked_for_where_a_folder_is_to_be(tmp_path: Path) -> None:
    require_room(tmp_path / "to" / "be", 1, "this", instead="not")
    with pytest.raises(StorageError, match=r"no room for this \(1\.0 EB needed, .*B free\); free some space, or not"):
        require_room(tmp_path / "to" / "be", 10**18, "this", instead="not")


def test_a_disk_with_room_and_no_further_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: no space left on device, with gigabytes free."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=9, f_favail=0, f_bavail=9, f_frsize=1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**6, free=9000))
    with pytest.raises(StorageError, match=r"device; 9\.0 kB free but no more files can be created\)"):  # noqa: SIM117
        with storage_errors(tmp_path):
            raise OSError(errno.ENOSPC, "full")


def answer() -> ShownAnswer:
    return ShownAnswer(0, 0, "greedy", 0, "prompt", None, "response", 1.0, "stop", 2)


def logged(path: Path) -> None:
    logger = JsonlLogger(path)
    logger._file = path.open("a", encoding="utf-8")
    try:
        logger.log(1, {"train/loss": 1.0})
    finally:
        with pytest.raises(StorageError):
            logger.close()


WRITERS: dict[str, Callable[[Path], None]] = {
    "metrics.jsonl": logged,
    "samples.jsonl": lambda path: SampleLog(path).write([answer()]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_under_a_log(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_NOFOLLOW", 0)  # the link stands for a file on the disk
    (tmp_path / name).symlink_to(FULL)
    with pytest.raises(StorageError, match=rf"/{name} could not be written \(No space left on device; .* free\); free"):
        WRITERS[name](tmp_path / name)


def train(width: int) -> tuple[nn.Module, torch.optim.Optimizer, ConstantLR]:
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, ConstantLR(optimizer)


@pytest.mark.usefixtures("alone", "small_files")
def test_a_training_state_that_does_not_fit(tmp_path: Path) -> None:
    """Bug: torch's archive writer raises `unexpected pos 704 vs 598`, and its collective raises a BaseException."""
    with pytest.raises(CheckpointError) as caught:
        save_state(tmp_path / "state", *train(100))
    assert one_line(caught.value) == (
        f"{tmp_path}/state could not be written (File too large); raise the limit on a file's size (ulimit -f), or "
        "choose another run.output_dir, or keep fewer checkpoints (train.keep_last)"
    )


@pytest.mark.world
@pytest.mark.usefixtures("alone")
def test_a_training_state_on_a_full_disk(small_disk: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        save_state(small_disk / "state", *train(200))
    message = r"/state could not be written \(No space left on device; 482\.4 kB needed, [\w. ]+ free\); free some"
    assert re.search(message, one_line(caught.value)), caught.value


@pytest.mark.world
def test_every_writer_on_a_full_disk(small_disk: Path, tiny: Tiny) -> None:
    """Bug: a full disk is not recognised, as libraries in Rust do not raise OSError."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.student)
    (small_disk / "fill").write_bytes(bytes(200 * 1024))
    writers: list[Callable[[Path], object]] = [
        lambda path: save_tensors({"a": torch.zeros(TOO_LARGE)}, path),
        lambda path: save_file({"a": torch.zeros(TOO_LARGE).numpy()}, path),
        lambda path: write_atomically(path, bytes(TOO_LARGE)),
        lambda path: [tokenizer.save_pretrained(path / str(i)) for i in range(50)],
    ]
    for write in writers:
        with pytest.raises(StorageError, match=r"No space left on device; .* free\)") as caught:  # noqa: SIM117
            with storage_errors(small_disk / "out"):
                write(small_disk / "out")
        one_line(caught.value)


def test_the_umask_where_the_kernel_does_not_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: no file could be written in a sandbox."""
    expected = umask_mode()
    monkeypatch.setattr(Path, "read_text", lambda *_: "Name: python\n")
    assert umask_mode() == expected


def test_files_get_the_mode_of_the_umask(tmp_path: Path) -> None:
    """Bug: weights that colleagues cannot read, since safetensors writes through a private temporary file."""
    matrix = ProjectionMatrix([[0], [1]], [[1.0], [1.0]])
    for mask, mode in ((0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
        folder = tmp_path / f"{mask:o}"
        (folder / "inside").mkdir(parents=True)
        previous = os.umask(mask)
        try:
            save_tensors({"a": torch.zeros(2)}, folder / "inside" / "model.safetensors")
            write_atomically(folder / "page.html", b"page")
            matrix.save(folder / "projection.safetensors")
            settle(folder / "inside")
        finally:
            os.umask(previous)
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
        assert modes == dict.fromkeys(("model.safetensors", "page.html", "projection.safetensors"), mode)


def test_a_folder_with_files_that_cannot_be_removed_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a file in use on NFS left half of the old folder, and the new one was thrown away."""
    folder = tmp_path / "final"
    for content in ("old", "new"):
        with monkeypatch.context() as busy, replacing(folder) as temporary:
            temporary.mkdir()
            (temporary / "model").write_text(content)
            busy.setattr(shutil, "rmtree", lambda *_, **__: None)
    assert (folder / "model").read_text() == "new"
    with replacing(folder) as temporary:
        temporary.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["final"], "the old one is removed later"


@pytest.mark.parametrize("failing", [1, 2], ids=["the old one aside", "the new one in"])
def test_the_old_folder_stays_until_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Bug: the old folder was removed before the new one had its name."""
    folder, renames = tmp_path / "final", []
    folder.mkdir()
    (folder / "model").write_text("old")

    def rename(path: Path, target: object) -> Path:
        renames.append(path)
        if len(renames) == failing:
            raise OSError(errno.EIO, "Input/output error")
        os.rename(path, str(target))
        return Path(str(target))

    new = tmp_path / "new"
    new.mkdir()
    with monkeypatch.context() as disk:
        disk.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="Input/output"):
            move_into_place(new, folder)
    assert (folder / "model").read_text() == "old"


@pytest.mark.world
def test_the_old_folder_comes_back_after_a_kill_between_the_renames(tmp_path: Path) -> None:
    """Bug: both folders were left under temporary names."""
    code = (
        "import os, sys; from pathlib import Path; from nemo_opd.files import replacing\n"
        "folder, rename = Path(sys.argv[1]), Path.rename\n"
        "Path.rename = lambda path, target: os._exit(0) if target == folder else rename(path, target)\n"
        "with replacing(folder) as temporary: temporary.mkdir()\n"
    )
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "model").write_text("old")
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    assert not folder.exists()
    put_back(tmp_path)
    assert (folder / "model").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"final", ".final.incomplete"}


def test_folders_that_only_look_removed_stay(tmp_path: Path) -> None:
    """Bugs: a folder whose name has `.removed.` loses its old model; the target of a stranger's link is deleted."""
    old, linked = tmp_path / ".model.removed.x.old.abc", tmp_path / "other"
    for folder in (old, linked):
        folder.mkdir()
        (folder / "weights").write_text("kept")
    (tmp_path / ".final.removed.abc").symlink_to(linked)
    put_back(tmp_path)
    assert (tmp_path / "model.removed.x" / "weights").read_text() == (linked / "weights").read_text() == "kept"


def test_only_regular_files_without_holes_are_read(tmp_path: Path) -> None:
    """Bugs: secrets that a stranger's link leads to are read; an empty file of 20 GB fills the memory."""
    secret, link, hole = tmp_path / "secret", tmp_path / "link", tmp_path / "hole"
    secret.write_bytes(b"s")
    link.symlink_to(secret)
    hole.touch()
    os.truncate(hole, 20 << 30)
    for path in (link, hole):
        with pytest.raises(OSError, match=path.name):
            read_file(path)
    assert read_file(secret) == read_file(link, follow_link=True) == b"s"


def test_compressed_tensors_are_refused(tmp_path: Path) -> None:
    """Bug: a checkpoint of 200 kB fills gigabytes of memory."""
    torch.save({"a": torch.zeros(1000)}, tmp_path / "stored.pt")
    require_uncompressed(tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored, zipfile.ZipFile(tmp_path / "bomb.pt", "w", 8) as bomb:
        for name in stored.namelist():
            bomb.writestr(name, stored.read(name))
    with pytest.raises(ValueError, match="compressed parts"):
        require_uncompressed(tmp_path / "bomb.pt")
