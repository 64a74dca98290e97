"""Teachers that compute segments for a cache, in the current processes or on servers (methods.md §9.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from nemo_opd.cluster.batch_grid import dp_leader_ranks
from nemo_opd.cluster.local import LocalCluster
from nemo_opd.cluster.placement import Placement
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.distributed.layout import Layout
from nemo_opd.logits.head import Head
from nemo_opd.models.stored_output import save_head, sparse_layout
from nemo_opd.served.answers import EndpointAnswers
from nemo_opd.teacher_cache.shard import Bytes, CacheManifest
from nemo_opd.types import Closing, TokenRows
from nemo_opd.workers.teacher import CachingTeacher

_Ids = NDArray[np.int32]
Ask = Callable[[Sequence[Sequence[_Ids]]], Iterator[tuple[_Ids, Bytes]]]
"""Function from each data-parallel rank's segments to all segments, ids [N], with their stored bytes, uint8 [N, R]."""


class CacheTeacher(Closing):
    """A teacher in this process and the other processes of torchrun; data-parallel ranks read different segments."""

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
        """Load the teacher. key: its model's key in errors. folder: the cache. Raises WorkerError and ClusterError."""
        self._layout, self._folder = layout, folder
        self._sparse = sparse_layout(manifest) if manifest.form == "top_k" else None
        offload = "layers" if settings.offload == "layers" else False  # the device is not shared
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
        local = config.cluster.model_copy(update={"launcher": "local"})
        with ExitStack() as stack:
            cluster = stack.enter_context(LocalCluster(local, device=device, placement=placement))
            name, places = f"teacher {settings.name}", placement.teachers[0]
            self._group = stack.enter_context(cluster.group(name, CachingTeacher, arguments, places))
            self._stack = stack.pop_all()

    def ask(self, rank_groups: Sequence[Sequence[_Ids]]) -> Iterator[tuple[_Ids, Bytes]]:
        """Yield each segment with its stored bytes.

        rank_groups: segments per data-parallel rank, read in one forward pass; at most one group per rank. Raises
        WorkerError and ClusterError.
        """
        # All ranks must join the all-gathers of weights, so ranks without a group repeat another rank's.
        dp_groups = [rank_groups[d % len(rank_groups)] for d in range(self._layout.dp)]
        all_groups = [dp_groups[self._layout.coordinates(rank)[0]] for rank in range(self._layout.size)]
        outputs = self._group.call("answers", [(*_padded(segments), self._sparse, False) for segments in all_groups])
        for segments, rank in zip(rank_groups, dp_leader_ranks(self._layout), strict=False):
            for ids, rows in zip(segments, outputs[rank][0], strict=True):
                yield ids, rows.numpy()

    def write_head(self) -> None:
        """Write the head of hidden states into the cache. Raises WorkerError, ClusterError and StorageError."""
        dummy = [np.zeros(2, np.int32)]
        outputs = self._group.call("answers", [(*_padded(dummy), None, True)] * self._layout.size)
        save_head(self._folder, _concatenated([head for _, head in outputs[: self._layout.tp]]))

    def close(self) -> None:
        self._stack.close()


def _padded(segments: Sequence[_Ids]) -> tuple[TokenRows, tuple[slice, ...]]:
    """Return segments as padded rows in a single microbatch."""
    ids = pad_sequence([torch.from_numpy(segment.astype(np.int64)) for segment in segments], batch_first=True)
    zeros = torch.zeros(ids.shape, dtype=torch.int32)
    tokens = TokenRows(ids, torch.tensor([len(segment) for segment in segments]), zeros.bool(), zeros)
    return tokens, (slice(0, len(segments)),)


def _concatenated(parts: Sequence[Head]) -> Head:
    """Concatenate the tensor-parallel ranks' parts of a head."""
    first = parts[0]
    biases = [part.bias for part in parts if part.bias is not None]
    weight = torch.cat([part.weight for part in parts])
    return Head(weight, torch.cat(biases) if biases else None, first.scale, first.soft_cap)


def server_answers(settings: TeacherBase, key: str, manifest: CacheManifest) -> Ask:
    """Return a function that queries a teacher's servers. key: the teacher's key, for messages."""
    assert settings.served is not None
    answers = EndpointAnswers(settings.served, settings.reference, sparse_layout(manifest), key=key)

    def ask(groups: Sequence[Sequence[_Ids]]) -> Iterator[tuple[_Ids, Bytes]]:
        for segments in groups:
            for ids, answer in zip(segments, answers.segments(segments), strict=True):
                yield ids, answer.rows

    return ask
