"""Which documents make up which batch: a function of the seed and of the batch's place in the run."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch

from nemo_opd.errors import CheckpointError


@dataclass(frozen=True)
class BatchOrder:
    """Endless epochs over `num_documents`, each in its own order; the last batch of an epoch may be short.

    Batch n is the same whatever reads it, and can be reached without reading those before.
    """

    num_documents: int
    batch_size: int
    seed: int
    shuffle: bool

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_documents // self.batch_size)

    def place(self, num_batches: int) -> dict[str, int]:
        """Return the place after `num_batches` batches, with all that it depends on, to be stored."""
        return {"num_batches": num_batches, **{name: int(value) for name, value in asdict(self).items()}}

    def num_batches_at(self, place: Mapping[str, int]) -> int:
        """Return the number of batches at a stored place. Raises CheckpointError for another order."""
        for name, value in self.place(0).items():
            if name != "num_batches" and place.get(name) != value:
                raise CheckpointError(
                    f"the checkpoint's data order has {name}={place.get(name)}, this run has {name}={value}, so the"
                    " next batch is not defined; restore the data settings, or set run.resume=never and a new"
                    " run.output_dir"
                )
        return place["num_batches"]

    def starting_at(self, position: int) -> Iterator[list[int]]:
        """Document indices of batch `position` and all that follow."""
        epoch, step = divmod(position, self.steps_per_epoch)
        while True:
            order = self._epoch_order(epoch)
            for start in range(step * self.batch_size, self.num_documents, self.batch_size):
                yield order[start : start + self.batch_size].tolist()
            epoch, step = epoch + 1, 0

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.num_documents)
        return torch.randperm(self.num_documents, generator=torch.Generator().manual_seed(self.seed + epoch))
