"""Whether a checkpoint that was just written is there as a whole."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import FileSystemReader

from nemo_opd.errors import CheckpointError

STATE = "state"
STUDENT = "student"


def require_whole(checkpoint: Path) -> None:
    """Raises CheckpointError, naming the file, where one is absent or shorter than what was written to it.

    Reads indices and lengths alone: that values are finite is checked where they are in memory.
    """
    problems = (*wrong_shards(checkpoint / STATE), *wrong_rank_files(checkpoint / STATE))
    require_none(checkpoint, [*problems, *wrong_safetensors(checkpoint / STUDENT)])


def require_whole_export(folder: Path) -> None:
    """The same of a Hugging Face folder of a model or an adapter."""
    require_none(folder, list(wrong_safetensors(folder)))


def require_none(folder: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{folder} is not there as it was written: {problems[0]}; it is not kept, and older ones are not removed: "
            "check the disk, or choose another run.output_dir"
        )


def wrong_shards(state: Path) -> Iterator[str]:
    try:
        entries = FileSystemReader(state).read_metadata().storage_data
    except Exception as error:  # its index is pickled
        yield f"{STATE}/.metadata cannot be read ({error})"
        return
    ends: dict[str, int] = {}
    for entry in entries.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in sorted(ends.items()):
        size = (state / name).stat().st_size if (state / name).is_file() else 0
        if size < end:
            yield f"{STATE}/{name} has {size:,} of {end:,} bytes"


def wrong_rank_files(state: Path) -> Iterator[str]:
    files = sorted(state.glob("rank_*.pt"))
    if not files:
        yield f"{STATE} has no rank_00000.pt"
    for file in files:
        if not zipfile.is_zipfile(file):  # its directory is at the end
            yield f"{STATE}/{file.name} is cut"


def wrong_safetensors(folder: Path) -> Iterator[str]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        yield f"{folder.name} has no weights"
    for file in files:
        try:
            with safe_open(file, framework="numpy"):  # reads the header, and compares the file's length with it
                pass
        except (OSError, SafetensorError) as error:
            yield f"{folder.name}/{file.name} is damaged ({error})"
