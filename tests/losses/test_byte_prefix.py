import itertools

import numpy as np
import pytest
import torch

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses.byte_prefix import byte_prefix
from nemo_opd.losses.prefixes import PrefixRanges

from . import oracle, oracle_prefix

B, S, T = 2, 9, 13
STUDENT = [b"a", b"b", b"c", b"ab", b"abc", b"cab", b"bb", None, b"cc"]
TEACHER = [b"ab", b"b", b"c", b"a", b"ca", b"bc", b"cb", None, b"cab", b"bca", b"b"]
V, W = len(STUDENT), len(TEACHER)
PHI = [3, 1, 2, 0, 2, 1, 2, -1, 5, 1, 1]
"""Students 4 (abc), 6 (bb), 7 and 8 (cc) are not reached."""
MATRIX = oracle_prefix.matrix([], V, W, byte_prefix=PHI, teacher=TEACHER)
CHUNKS = (
    torch.tensor([[-1, 0, 1, 2, 3, 3, 4, 5, 6], [-1, 0, 1, 2, 3, 4, -1, -1, -1]]),
    torch.tensor([[-1, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 6], [-1, 0, 0, 0, 1, 1, 2, 2, 3, -1, 4, 4, -1]]),
)
IDS = (
    torch.tensor([[0, 0, 4, 5, 0, 6, 4, 2, 3], [0, 5, 3, 6, 2, 8, 0, 0, 0]]),
    torch.tensor([[0, 3, 0, 2, 4, 1, 0, 1, 3, 1, 2, 2, 0], [0, 2, 3, 1, 3, 10, 1, 1, 2, 0, 2, 2, 0]]),
)
"""Row 0: a, abc = ab·c, cab = ca·b, a·bb = ab·b, abc = a·b·c, c, ab.
Row 1: cab = c·a·b, ab = a·b, bb = b·b, c, cc = c·c.

The b of the teacher's last ab is its second one, token 10."""
LISTS, ID_LISTS = (tuple(side.tolist() for side in sides) for sides in (CHUNKS, IDS))
COUNT = len(list(oracle_prefix.chunks_of(*LISTS)))


def logits(positions: int, width: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(B, positions, width, generator=generator, dtype=torch.float64)).to(dtype)


def run(student, teacher, matrix=MATRIX, chunks=CHUNKS, ids=IDS, **options):
    return byte_prefix(
        student,
        teacher,
        projection=matrix,
        student_ids=ids[0],
        teacher_ids=ids[1],
        student_chunk_id=chunks[0],
        teacher_chunk_id=chunks[1],
        **options,
    )


def expected(student, teacher, phi=PHI, **options):
    return oracle_prefix.byte_prefix(student.tolist(), teacher.tolist(), ID_LISTS, phi, TEACHER, LISTS, **options)


def test_the_chunks_are_of_equal_bytes():
    for chunk in oracle_prefix.chunks_of(*LISTS):
        student = b"".join(STUDENT[ID_LISTS[0][chunk.b][i]] for i in chunk.student)
        assert student == b"".join(TEACHER[ID_LISTS[1][chunk.b][j]] for j in chunk.teacher)


@pytest.mark.parametrize("seed", range(5))
def test_ranges_equal_the_loop(seed):
    """Equal bytes under several ids, tokens without bytes, prefixes of prefixes."""
    rng = np.random.default_rng(seed)
    strings = [b"".join(parts) for n in range(4) for parts in itertools.product([b"a", b"b", b"\xff"], repeat=n)]
    pieces = [None if i < 0 else strings[i] for i in rng.integers(-1, len(strings), size=60)]
    matrix = oracle_prefix.matrix([], 1, 60, byte_prefix=[-1] * 60, teacher=pieces)
    size = 60 - 15 * (seed % 2)
    ranges = PrefixRanges.of(matrix, size, torch.device("cpu"))
    pieces = pieces[:size]
    order = ranges.place.argsort()
    assert torch.equal(order[ranges.place], torch.arange(size))
    for token, piece in enumerate(pieces):
        found = set(order[ranges.begin[token] : ranges.end[token]].tolist())
        assert found == {t for t in range(size) if oracle_prefix.begins(piece, pieces[t], t == token)}


@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
@pytest.mark.parametrize("tau", [1.0, 2.5])
def test_value_equals_the_loop(kind, weights, tau):
    """u, its rest cell, the bound of 1:n chunks at every place that it can come from and go to, and τ²."""
    student, teacher = logits(S, V + 2, 0), logits(T, W + 3, 1)
    out = run(student, teacher, divergence=kind, temperature=tau, chunk_size=2, **weights)
    total = expected(student[..., :V], teacher[..., :W], kind=kind, tau=tau, **weights)
    assert out.metrics["kd"].count == COUNT == 12
    # The oracle subtracts the bound from a mass; what is left is above 1e-3 of it here.
    assert out.loss.item() == pytest.approx(total / COUNT, rel=1e-10)
    assert out.metrics["kd"].value() == pytest.approx(total / COUNT, rel=1e-10)


@pytest.mark.parametrize(
    "phi",
    [
        [0 if v < 0 else v for v in PHI],
        [4, 6, 7, 0, 2, 1, 3, 8, 5, 1, 1],
        [4, 6, 7, 0, 2, 1, 3, -1, 5, 1, 1],
    ],
)
@pytest.mark.parametrize(("kind", "weights"), oracle.KINDS)
def test_a_rest_cell_of_one_side_is_dropped(phi, kind, weights):
    """The teacher has no rest; neither has one; and the student's rest is one token, which can be the realised one."""
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    out = run(
        student, teacher, oracle_prefix.matrix([], V, W, byte_prefix=phi, teacher=TEACHER), divergence=kind, **weights
    )
    total = expected(student, teacher, phi, kind=kind, tau=1.0, **weights)
    assert out.loss.item() == pytest.approx(total / COUNT, rel=1e-10)


def test_a_certain_continuation_leaves_what_the_others_had():
    """R = 1 − e^−300: u(φ(y_1)) keeps e^−300 of q(y_1), and the reverse KL says so."""
    student, teacher = logits(S, V, 0), torch.zeros(B, T, W)
    teacher.scatter_(2, torch.cat([IDS[1][:, 1:], IDS[1][:, :1]], 1).unsqueeze(2), 300.0)
    loss = run(student.float(), teacher, divergence="reverse_kl").loss
    assert 100 < loss.item() < 700


def test_what_does_not_fit_is_named():
    student, teacher = logits(S, V, 0), logits(T, W, 1)
    with pytest.raises(ProjectionError, match="add_byte_prefix"):
        run(student, teacher, oracle_prefix.matrix([], V, W))
    with pytest.raises(ProjectionError, match=r"byte order .* nemo_opd\.projection\.add_byte_prefix"):
        run(student, teacher, oracle_prefix.matrix([], V, W, byte_prefix=PHI))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"positions": "some"}, "positions='some'.*choose from starts, all"),
        ({"pieces": "some"}, "pieces='some'.*choose from spelling, longest_prefix"),
        ({"positions": "all", "ends": "some"}, "ends='some'.*choose from drop, cover, rest"),
        ({"positions": "all", "divergence": "jsd"}, "divergence=jsd.*choose divergence=forward_kl or ends=cover"),
        ({"positions": "all", "continuation_weight": 0.5}, "continuation_weight=0.5.*choose positions=starts"),
    ],
)
def test_settings_that_rule_each_other_out_are_named(settings: dict, message: str):
    """Catches a biased target, or a setting that a caller of the function takes for one that does something."""
    with pytest.raises(ConfigError, match=message):
        run(logits(S, V, 0), logits(T, W, 1), **settings)
