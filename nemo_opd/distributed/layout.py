"""Arrangement of a model's ranks and their devices."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_opd.config.model import Parallelism
from nemo_opd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """Data parallel × context parallel × tensor parallel.

    rank = (d · cp + c) · tp + t: the ranks of a tensor-parallel group are consecutive, to share a node, and so are the
    ranks of a copy of the model.
    """

    dp: int
    cp: int = 1
    tp: int = 1
    replicas: int = 1
    """Copies of the model, each sharded over dp · cp / replicas ranks."""

    def __post_init__(self) -> None:
        if min(self.dp, self.cp, self.tp) < 1:
            raise ConfigError(f"parallelism dp={self.dp}, cp={self.cp}, tp={self.tp}: each must be 1 or more")
        if self.replicas < 1 or self.dp % self.replicas:
            raise ConfigError(f"parallelism dp={self.dp}, replicas={self.replicas}: replicas must divide dp")

    @staticmethod
    def of(num_ranks: int, parallelism: Parallelism) -> Layout:
        """Return the layout of `num_ranks` ranks, which cp · tp · replicas divides. replicas=auto counts as 1."""
        cp, tp, replicas = parallelism.cp, parallelism.tp, parallelism.replicas
        return Layout(num_ranks // (cp * tp), cp, tp, 1 if replicas == "auto" else replicas)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.dp * self.cp * self.tp

    @property
    def num_shards(self) -> int:
        """The number of ranks that each copy of the model, or with tp of a rank's part, is sharded over."""
        return self.dp * self.cp // self.replicas

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return (d, c, t) of a rank. Raises IndexError for a rank outside the layout."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} of a layout with {self.size} ranks")
        fsdp_rank, t = divmod(rank, self.tp)
        d, c = divmod(fsdp_rank, self.cp)
        return d, c, t

    def rank(self, d: int, c: int = 0, t: int = 0) -> int:
        """Return the rank at these coordinates. Raises IndexError for coordinates outside the layout."""
        if not (0 <= d < self.dp and 0 <= c < self.cp and 0 <= t < self.tp):
            raise IndexError(f"coordinates {(d, c, t)} of a layout with dp={self.dp}, cp={self.cp}, tp={self.tp}")
        return (d * self.cp + c) * self.tp + t


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One device of a run; on CPU, a slot for one process of each group at this place."""

    node: int
    """Index of the node, in the order of ranks."""
    device: int
    """Index of the device on its node."""
