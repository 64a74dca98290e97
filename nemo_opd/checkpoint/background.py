"""Writing of a copy of the training state while training continues, and checks that it is complete on disk."""

import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from nemo_opd.checkpoint.state import MetadataError, State, rank_file, read_metadata, write_state
from nemo_opd.errors import CheckpointError
from nemo_opd.models.folder import damage, safetensors_files


class BackgroundWriter:
    """Writer of one state at a time in a thread on every rank; the threads communicate over a separate group."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None

    def begin(self, folder: Path, state: State) -> None:
        """Copy the state to host memory and start writing it. Collective."""
        if self._group is None:
            # Training uses the default group's collectives at the same time; gloo sends host tensors.
            self._group = dist.new_group(backend="gloo")
        folder.mkdir(parents=True, exist_ok=True)
        copied = State(tree_map_only(torch.Tensor, HostCopies(), state.shared), state.per_rank)
        self._written = self._thread.submit(write_state, folder, copied, group=self._group)

    def is_done(self) -> bool:
        """Return whether writing has finished or failed."""
        return self._written is None or self._written.done()

    def end(self) -> None:
        """Wait until the state is written. Raises the errors of writing."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """Wait for a write in progress, and end the thread."""
        if self._written is not None:
            wait([self._written])
        self._thread.shutdown()


class HostCopies:
    """Function that copies a tensor with its sharding to host memory, and a tied tensor only once."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = local.data_ptr(), tensor.shape
        if place not in self._by_place:
            self._by_place[place] = tensor.detach().to("cpu", copy=True)
        return self._by_place[place]


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
