"""Files that are complete or absent and survive a power failure, their errors as one sentence, and plain YAML."""

import errno
import fcntl
import glob
import os
import re
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO, cast

import yaml

from nemo_opd.errors import DataError, OPDError, StorageError

UNSUSPICIOUS = 1 << 30
"""Bytes that any file may unpack to."""
MAX_EXPANSION = 200
"""Limit of a larger file's unpacked size, as a multiple of its size. Logs reach 50, a bomb 1,000 and more."""
FULL = {errno.ENOSPC, errno.EDQUOT}
OF_THE_DISK = FULL | {errno.EIO, errno.EROFS, errno.EFBIG}
"""Never caused by a mistake in the program."""
ELSEWHERE = "choose another run.output_dir"
"""Way out for a run."""
_WAYS_OUT = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or have the quota raised",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f)",
    errno.EIO: "check the disk",
    errno.EROFS: "mount it for writing",
    errno.ELOOP: "remove the symbolic link",
    errno.EACCES: "change its permissions",
    errno.EPERM: "change its permissions",
}
"""Ways out by error number."""
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""End of the errors of safetensors and tokenizers, which are not OSErrors."""
_OLD, _REMOVED = ".old.", ".removed."
"""Part of the name of a folder that another one replaces."""
_RANDOM_CHARACTERS = 8
"""Number of characters that `tempfile` adds to a prefix."""
_MOST_CHARACTERS = 1 << 20
"""A megabyte takes a quarter of a minute to read."""
_LONGEST_INTEGER = 100
"""Characters. YAML's integers of base 60 take quadratic time, and texts of long ones raise ValueError."""


def write_atomically(path: Path, content: bytes, *, instead: str = ELSEWHERE) -> None:
    """Replace `path` atomically: readers, even after a kill, see the old file or the new one, never a part.

    Raises StorageError if it cannot be written. instead: an alternative for the user.
    """
    with storage_errors(path, instead=instead):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = _locked_temporary(path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(temporary, umask_mode())
                os.replace(temporary, path)  # while it is locked
            sync(path.parent)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _locked_temporary(path: Path) -> tuple[int, str]:
    """Create a temporary file for `path`, locked while its handle is open if the file system has locks."""
    while True:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, temporary
        os.close(handle)  # it was removed as abandoned before it was locked


def remove_abandoned(folder: Path, names: str) -> None:
    """Remove files that a killed `write_atomically` left in a folder, but no files of a live writer.

    names: pattern of the final file names.
    """
    for path in folder.glob(f".{names}.{'?' * _RANDOM_CHARACTERS}"):
        # Kept on file systems without locks, and if owned by another user.
        with suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a path for a folder that atomically replaces `folder` at the end; an error in the block keeps the old
    folder.

    Raises StorageError if that is not possible.
    """
    temporary = folder.with_name(f".{folder.name}.incomplete")
    if temporary.is_symlink():
        temporary.unlink()
    shutil.rmtree(temporary, ignore_errors=True)
    put_back(folder.parent, glob.escape(folder.name))
    try:
        yield temporary
        with storage_errors(folder):
            move_into_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def move_into_place(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`, and remove the folder that was there, or keep it if renaming fails. Raises OSError.

    Files that cannot be removed, in use on NFS, stay in a hidden folder until the next call of `put_back`.
    """
    old = None
    if folder.exists():
        old = folder.rename(tempfile.mkdtemp(prefix=f".{folder.name}{_OLD}", dir=folder.parent))
    try:
        new.rename(folder)
    except OSError:
        if old is not None:
            with suppress(OSError):
                old.rename(folder)
        raise
    sync(folder.parent)
    if old is not None:
        _remove(old)


def put_back(parent: Path, name: str = "*") -> None:
    """Undo what a killed `move_into_place` left: restore old folders without a new one, and remove the others.

    name: pattern of the folders' names.
    """
    for removed in parent.glob(f".{name}{_REMOVED}*"):
        if _OLD not in removed.name.rpartition(_REMOVED)[2]:  # else this is part of the folder's own name
            shutil.rmtree(removed, ignore_errors=True)
    for old in parent.glob(f".{name}{_OLD}*"):
        folder = parent / old.name[1:].rpartition(_OLD)[0]
        with suppress(OSError):
            if folder.exists():
                _remove(old)
            else:
                old.rename(folder)


def _remove(old: Path) -> None:
    """Remove an old folder under a name from which it is never put back, as files in use on NFS may stay."""
    with suppress(OSError):
        old = old.rename(old.with_name(old.name.replace(_OLD, _REMOVED)))
    shutil.rmtree(old, ignore_errors=True)


def copy_whole(source: Path, folder: Path) -> None:
    """Replace a folder by a copy of another. Raises StorageError if it cannot be written."""
    with replacing(folder) as temporary, storage_errors(folder):
        shutil.copytree(source, temporary)
        settle(temporary)


def open_unlinked(path: Path, mode: str, permissions: int = 0o666) -> TextIO:
    """Open a text file. Raises OSError for a symbolic link. A named pipe is never waited for.

    permissions: mode of a new file, which the umask restricts.
    """

    def open_without_links(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, permissions)

    return cast(TextIO, open(path, mode, encoding="utf-8", opener=open_without_links))


def read_file(path: Path, *, follow_link: bool = False) -> bytes:
    """Return the content of a regular file.

    Raises OSError for anything else, such as a named pipe, which may never end, and for a file with large holes.
    """
    extra_flags = os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra_flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > max(UNSUSPICIOUS, MAX_EXPANSION * 512 * status.st_blocks):
            raise OSError(errno.EFBIG, "almost all of it is a hole", str(path))
        return file.read()


def require_uncompressed(file: Path | IO[bytes]) -> None:
    """Raise ValueError for a file of torch.save with compressed parts, which PyTorch does not write."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("it has compressed parts, which PyTorch does not write")


def read_data(path: Path) -> bytes:
    """Return the content of a file of a run; empty if it does not exist. Raises DataError if it cannot be read."""
    try:
        return read_file(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); remove it, or change its permissions") from error


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and return when it is on the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def settle(folder: Path) -> None:
    """Give all files below `folder` the umask's mode, and wait until all are on the disk, the folders last.

    Some libraries write through temporary files, which are private.
    """
    mode = umask_mode()
    for path in files_below(folder):
        if path.stat().st_mode & 0o777 != mode:
            with suppress(PermissionError):  # some file systems have one mode for all files
                path.chmod(mode)
        sync(path)
    for path in (*(path for path in sorted(folder.rglob("*"), reverse=True) if path.is_dir()), folder):
        sync(path)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync folders
            raise
    finally:
        os.close(handle)


def files_below(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def size_below(folder: Path) -> int:
    """Return the total bytes of the files below a folder; files may vanish meanwhile."""
    total = 0
    for path in files_below(folder):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def umask_mode() -> int:
    """Return the mode of a new file."""
    # os.umask can only be read by setting it, which would affect other threads, so ask the kernel first.
    with suppress(OSError):
        if match := re.search(r"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_text(), re.MULTILINE):
            return 0o666 & ~int(match.group(1), 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


@contextmanager
def storage_errors(
    path: Path,
    kind: type[OPDError] = StorageError,
    *,
    needed: int | None = None,
    instead: str = ELSEWHERE,
) -> Iterator[None]:
    """Turn an operating system error in the block into `kind`, with one sentence about `path`.

    needed: total bytes, if known. instead: an alternative for the user. Other errors pass, including network errors.
    """
    try:
        yield
    except (OPDError, ConnectionError, TimeoutError):
        raise
    except Exception as error:
        if (number := error_number(error)) is None:
            raise
        raise kind(refusal(path, number, needed=needed, instead=instead)) from error


def error_number(error: BaseException | None) -> int | None:
    """Return the system's error number of `error` or of its cause, or None for other errors."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if (match := _RUST_ERROR.search(str(error))) is not None:
        return int(match.group(1))
    # After a write error, torch's archive writer raises a second error.
    cause = None if error is None else error.__cause__ or error.__context__
    number = None if cause is None else error_number(cause)
    return number if number in OF_THE_DISK else None


def refusal(path: Path, number: int, *, needed: int | None = None, instead: str = ELSEWHERE) -> str:
    """Return why `path` could not be written, and the way out."""
    reason = os.strerror(number)
    if number in FULL:
        reason += f"; {_free_room(path, needed)}"
    way_out = f"{_WAYS_OUT[number]}, or {instead}" if number in _WAYS_OUT else instead
    return f"{path} could not be written ({reason}); {way_out}"


def require_room(path: Path, needed: int, what: str, *, instead: str, kind: type[OPDError] = StorageError) -> None:
    """Raise `kind` if the file system of `path` has less free space than `needed` bytes."""
    if free_bytes(path) < needed:
        raise kind(f"{path}: no room for {what} ({_free_room(path, needed)}); free some space, or {instead}")


def _free_room(path: Path, needed: int | None) -> str:
    """Return the bytes needed, if known, and the bytes free, with a note if the file system has no inodes left."""
    free = f"{_decimal(free_bytes(path))} free"
    files = os.statvfs(existing(path))
    if files.f_files and not files.f_favail:
        free += " but no more files can be created"
    return free if needed is None else f"{_decimal(needed)} needed, {free}"


def _decimal(number: int) -> str:
    """Return a number of bytes in units of 1,000, such as `1.5 kB`."""
    if number < 1000:
        return f"{number} bytes"
    power = min((len(str(number)) - 1) // 3, 6)
    return f"{number / 1000**power:,.1f} {' kMGTPE'[power]}B"


def free_bytes(path: Path) -> int:
    """Return the bytes that an ordinary user may still write at `path`, or sys.maxsize without a limit."""
    usage = shutil.disk_usage(existing(path))
    return usage.free if usage.total else sys.maxsize


def existing(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    # Path.exists raises if a parent folder is not accessible.
    return next(folder for folder in (path, *path.absolute().parents) if os.path.exists(folder))


def write_obstacle(path: Path) -> str | None:
    """Return why no file can be created in a folder, or in its nearest existing parent: `/data is not writable (…)`.

    Returns None if one can be. Creates no folder.
    """
    parent = existing(path)
    if parent.is_file():
        return f"{parent} is a file, so it cannot be a folder"
    try:
        with suppress(FileNotFoundError):
            path.stat()
        with tempfile.TemporaryFile(dir=parent):
            return None
    except OSError as error:
        return f"{parent} is not writable ({os.strerror(error.errno) if error.errno else error})"


class _Loader(yaml.SafeLoader):
    """A loader without long integers and without aliases, of which a few nested lines stand for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not read; write the value itself", mark)
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > _LONGEST_INTEGER:
            raise yaml.constructor.ConstructorError(None, None, "this integer is too long", node.start_mark)
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises YAMLError, also for aliases, deep nesting and more than 1 MiB."""
    if len(text) > _MOST_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters, and at most {_MOST_CHARACTERS:,} are read")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, MemoryError):
        raise
    except Exception as error:  # constructors raise many, such as for a date with 13 months
        raise yaml.YAMLError(str(error)) from error


def load_front_matter(text: str) -> Any:
    """Return the value of the YAML block that begins a card; None without one. Raises YAMLError as `load_yaml` does."""
    # Imported here, since the import takes as long as all others of a command.
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    block = REGEX_YAML_BLOCK.search(text)
    return load_yaml(block[2]) if block else None
