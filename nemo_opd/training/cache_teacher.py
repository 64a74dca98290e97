"""A teacher in the processes that there are, asked about segments for a cache (methods.md §9.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from nemo_opd.cluster.local import LocalCluster
from nemo_opd.cluster.placement import Placement
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.distributed.layout import Layout
from nemo_opd.logits.head import Head
from nemo_opd.models.stored_output import save_head, sparse_layout
from nemo_opd.served.answers import EndpointAnswers
from nemo_opd.teacher_cache.manifest import CacheManifest
from nemo_opd.teacher_cache.shard import Bytes
from nemo_opd.training.batch_grid import leads
from nemo_opd.types import TokenRows
from nemo_opd.workers.caching_teacher import CachingTeacher

_Ids = NDArray[np.int32]
Ask = Callable[[Sequence[Sequence[_Ids]]], Iterator[tuple[_Ids, Bytes]]]
"""Function from the segments of each data-parallel rank to each segment, ids [N], with what is stored, uint8 [N, R]."""


class CacheTeacher:
    """A teacher in this process, and in those that torchrun has started with it, whose data-parallel ranks read
    different segments.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: TeacherBase,
        key: str,
        manifest: CacheManifest,
        layout: Layout,
        device: str,
        folder: Path,
    ) -> None:
        """Load the teacher. key: its model's, for messages. folder: the cache. Raises WorkerError and ClusterError."""
        self._layout, self._folder = layout, folder
        self._sparse = sparse_layout(manifest) if manifest.form == "top_k" else None
        offload = "layers" if settings.offload == "layers" else False  # there is nobody else on the device
        arguments: dict[str, Any] = {
            "settings": settings.model_copy(update={"offload": offload}),
            "key": key,
            "vocab_size": manifest.vocab_size,
            "device": device,
            "transport": "shared_memory",
            "handoff": manifest.handoff,
            "shares_process": True,
        }
        placement = Placement.colocated(num_nodes=1, ranks_per_node=layout.size, num_teachers=1)
        here = config.cluster.model_copy(update={"launcher": "local"})
        with ExitStack() as stack:
            opened = stack.enter_context(LocalCluster(here, device=device, placement=placement))
            name, places = f"teacher {settings.name}", placement.teachers[0]
            self._group = stack.enter_context(opened.group(name, CachingTeacher, arguments, places))
            self._stack = stack.pop_all()

    def ask(self, of_ranks: Sequence[Sequence[_Ids]]) -> Iterator[tuple[_Ids, Bytes]]:
        """Yield each segment with what is stored of it.

        of_ranks: segments that the data-parallel ranks read, each in one forward pass; at most one for each rank.
        Raises WorkerError and ClusterError.
        """
        # All ranks take part in gathering weights: those without segments read others'.
        read = [of_ranks[d % len(of_ranks)] for d in range(self._layout.dp)]
        own = [read[self._layout.coordinates(rank)[0]] for rank in range(self._layout.size)]
        by_rank = self._group.call("answers", [(*_padded(segments), self._sparse, False) for segments in own])
        for segments, rank in zip(of_ranks, leads(self._layout), strict=False):
            for ids, rows in zip(segments, by_rank[rank][0], strict=True):
                yield ids, rows.numpy()

    def write_head(self) -> None:
        """Write the head of hidden states into the cache. Raises WorkerError, ClusterError and StorageError."""
        anything = [np.zeros(2, np.int32)]
        by_rank = self._group.call("answers", [(*_padded(anything), None, True)] * self._layout.size)
        save_head(self._folder, _joined([head for _, head in by_rank[: self._layout.tp]]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _padded(segments: Sequence[_Ids]) -> tuple[TokenRows, tuple[slice, ...]]:
    """Return segments as rows, and the one microbatch that they are."""
    ids = pad_sequence([torch.from_numpy(each.astype(np.int64)) for each in segments], batch_first=True)
    nothing = torch.zeros(ids.shape, dtype=torch.int32)
    tokens = TokenRows(ids, torch.tensor([len(each) for each in segments]), nothing.bool(), nothing)
    return tokens, (slice(0, len(segments)),)


def _joined(parts: Sequence[Head]) -> Head:
    """Return a head of which tensor-parallel ranks have parts."""
    first = parts[0]
    biases = [part.bias for part in parts if part.bias is not None]
    weight = torch.cat([part.weight for part in parts])
    return Head(weight, torch.cat(biases) if biases else None, first.scale, first.soft_cap)


def server_answers(settings: TeacherBase, key: str, manifest: CacheManifest) -> Ask:
    """Return what asks a teacher's servers. key: the teacher's, for messages."""
    assert settings.served is not None
    answers = EndpointAnswers(settings.served, settings.reference, sparse_layout(manifest), key=key)

    def ask(groups: Sequence[Sequence[_Ids]]) -> Iterator[tuple[_Ids, Bytes]]:
        for segments in groups:
            for ids, answered in zip(segments, answers.segments(segments), strict=True):
                yield ids, answered.rows

    return ask
