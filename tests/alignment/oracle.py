"""The alignment of text tokens by sets of byte ends: slow and written without pointers."""

from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile

from nemo_opd.types import Alignment


@dataclass(frozen=True)
class Chunk:
    student: tuple[int, int]
    teacher: tuple[int, int]
    inexact: bool


def expected_chunks(student: list[bytes], teacher: list[bytes]) -> list[Chunk]:
    """Chunks of two sequences of pieces, none of them empty."""
    s_ends = [0, *accumulate(map(len, student))]
    t_ends = [0, *accumulate(map(len, teacher))]
    s_text, t_text = b"".join(student), b"".join(teacher)
    prefix = _equal(s_text, t_text)
    front = sorted(end for end in set(s_ends) & set(t_ends) if end <= prefix)
    cuts = [(s_ends.index(end), t_ends.index(end)) for end in front]
    if prefix == min(len(s_text), len(t_text)):
        return _between(cuts)
    room = min(len(s_text), len(t_text)) - prefix
    suffix = min(room, _equal(s_text[::-1], t_text[::-1]))
    back = {len(s_text) - end for end in s_ends} & {len(t_text) - end for end in t_ends}
    tail = sorted((rest for rest in back if rest <= suffix), reverse=True)
    rest_cuts = [(s_ends.index(len(s_text) - rest), t_ends.index(len(t_text) - rest)) for rest in tail]
    (i, j), (i_next, j_next) = cuts[-1], rest_cuts[0]
    middle = [Chunk((i, i_next), (j, j_next), True)] if i_next > i and j_next > j else []
    return _between(cuts) + middle + _between(rest_cuts)


def _equal(a: bytes, b: bytes) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _between(cuts: list[tuple[int, int]]) -> list[Chunk]:
    return [Chunk((i, k), (j, m), False) for (i, j), (k, m) in pairwise(cuts)]


def chunks_of(alignment: Alignment) -> list[Chunk]:
    """What the chunk ids say, checked against the bounds."""
    for c, (i, k, j, m) in enumerate(alignment.bounds.tolist()):
        assert (alignment.student_chunk_id == c).nonzero()[0].tolist() == list(range(i, k))
        assert (alignment.teacher_chunk_id == c).nonzero()[0].tolist() == list(range(j, m))
    assert alignment.student_chunk_id.max(initial=-1) == alignment.num_chunks - 1
    return [
        Chunk((i, k), (j, m), bool(inexact))
        for (i, k, j, m), inexact in zip(alignment.bounds.tolist(), alignment.inexact, strict=True)
    ]
