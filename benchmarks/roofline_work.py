"""Work that a GPU is asked for: kernels, waits and copies."""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Kind:
    """Kernels that are alike."""

    name: str
    """product, attention, compiled, triton, or other."""
    num_bytes: int
    flops: int


@dataclass
class Counts:
    """What a part of a microbatch asks for."""

    kernels: Counter[Kind]
    waits: int = 0
    copies: int = 0

    def plus(self, other: "Counts", times: int = 1) -> "Counts":
        """Add a number of times what the other asks for; it may be negative, but what is left may not."""
        kernels = Counter(self.kernels)
        for kind, number in other.kernels.items():
            kernels[kind] += times * number
        if any(number < 0 for number in kernels.values()):
            raise ValueError("layers are not equal: one that is counted alone has kernels that are not among two")
        return Counts(+kernels, self.waits + times * other.waits, self.copies + times * other.copies)

    def padded(self, useful: float) -> "Counts":
        """Return the same kernels on rows of which this share are tokens."""
        kernels: Counter[Kind] = Counter()
        for kind, number in self.kernels.items():
            kernels[Kind(kind.name, round(kind.num_bytes / useful), round(kind.flops / useful))] += number
        return Counts(kernels, self.waits, self.copies)

    def only(self, names: set[str]) -> "Counts":
        """Return the kernels of these names alone."""
        kept = {kind: number for kind, number in self.kernels.items() if kind.name in names}
        return Counts(Counter(kept), self.waits, self.copies)

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()

    @property
    def num_bytes(self) -> int:
        return sum(kind.num_bytes * number for kind, number in self.kernels.items())

    @property
    def flops(self) -> int:
        return sum(kind.flops * number for kind, number in self.kernels.items())
