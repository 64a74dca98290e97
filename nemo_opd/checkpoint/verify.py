"""Checks that a new checkpoint is complete on disk."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

from nemo_opd.checkpoint.metadata import MetadataError, read_metadata
from nemo_opd.checkpoint.state import rank_file
from nemo_opd.errors import CheckpointError
from nemo_opd.models.folder import damage, safetensors_files

STATE = "state"
STUDENT = "student"


def require_whole(checkpoint: Path, num_ranks: int) -> None:
    """Raise CheckpointError, naming the file, if one is missing or shorter than it should be.

    num_ranks: number of ranks that wrote it. Reads only indices and lengths; values were checked in memory.
    """
    problems = (*wrong_shards(checkpoint / STATE), *_wrong_rank_files(checkpoint / STATE, num_ranks))
    _require_none(checkpoint, [*problems, *_wrong_safetensors(checkpoint / STUDENT)])


def require_whole_export(folder: Path) -> None:
    """Raise CheckpointError, naming the file, if a Hugging Face folder of a model or an adapter is incomplete."""
    _require_none(folder, list(_wrong_safetensors(folder)))


def _require_none(folder: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{folder} was not written correctly: {problems[0]}; it is removed, and older ones are kept: check the "
            "disk, or choose another run.output_dir"
        )


def wrong_shards(state: Path) -> Iterator[str]:
    """Yield a description of each missing or truncated file of a sharded state."""
    try:
        entries = read_metadata(state).storage_data
    except (OSError, MetadataError) as error:
        yield f"{STATE}/.metadata cannot be read ({error})"
        return
    ends: dict[str, int] = {}
    for entry in entries.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in sorted(ends.items()):
        size = (state / name).stat().st_size if (state / name).is_file() else 0
        if size < end:
            yield f"{STATE}/{name} has {size:,} of {end:,} bytes"


def _wrong_rank_files(state: Path, num_ranks: int) -> Iterator[str]:
    for rank in range(num_ranks):
        file = state / rank_file(rank)
        if not file.is_file():
            yield f"{STATE} has no {file.name}"
        elif not zipfile.is_zipfile(file):  # the archive's directory is at its end
            yield f"{STATE}/{file.name} is truncated"


def _wrong_safetensors(folder: Path) -> Iterator[str]:
    try:
        # An adapter's file has another name than a model's files.
        files = safetensors_files(folder) or sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError) as error:
        yield f"{folder.name} has a damaged weight index ({error})"
        return
    if not files:
        yield f"{folder.name} has no weights"
    for file in files:
        if (reason := damage(file)) is not None:
            yield f"{folder.name}/{file.name} is missing or damaged ({reason})"
