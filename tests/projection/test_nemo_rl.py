"""NeMo-RL's `.pt` files as its tools write them, and files that only look like one."""

import os
import pickle
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_opd.alignment import fingerprint, pieces_of
from nemo_opd.errors import ProjectionError
from nemo_opd.projection import ProjectionMatrix, build_projection, nemo_rl
from tests.projection.conftest import SMALL
from tests.tokenizers_fixture import byte_level

STUDENT, TEACHER = SMALL["three_digits"], SMALL["one_digit"]


def saved(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "map.pt"
    torch.save(content, path)
    return path


def dense(indices: list[list[int]], likelihoods: list[list[float]], **more: object) -> dict[str, object]:
    return {"indices": torch.tensor(indices), "likelihoods": torch.tensor(likelihoods), **more}


def rows(matrix: ProjectionMatrix) -> list[dict[int, float]]:
    """Return the entries of each row, by a loop."""
    pairs = (zip(ids, shares, strict=True) for ids, shares in zip(matrix.indices, matrix.weights, strict=True))
    return [{int(t): float(w) for t, w in row if t >= 0} for row in pairs]


def test_dense_rows_are_normalised_sorted_and_added_up(tmp_path: Path) -> None:
    """Catches unnormalised weights, −1 read as the last id, and a repeated id with two entries."""
    content = dense([[5, 7, -1], [3, 2, 3], [4, 9, 0], [-1, -1, -1]], [[1, 3, 0.2], [2, 6, 4], [1, 0, 0], [0, 0, 0]])
    matrix = nemo_rl.read(saved(tmp_path, content))
    assert rows(matrix) == [{7: 0.75, 5: 0.25}, {2: 0.5, 3: 0.5}, {4: 1.0}, {}]
    assert matrix.indices[:2].tolist() == [[7, 5], [2, 3]]  # heaviest first, ties by id
    assert (matrix.student_vocab_size, matrix.teacher_vocab_size) == (4, 8)
    assert not matrix.exact.any()
    assert matrix.options.passes == (nemo_rl.PASS,)


def test_pair_counts_are_the_same_map(tmp_path: Path) -> None:
    """Catches a difference between the two forms of a map, and counts as ints, floats or tensors."""
    counts = {(0, 5): 1, (0, 7): torch.tensor(3.0), (1, 3): 6.0, (1, 2): 6.0, (2, 4): 1, (2, 9): 0}
    assert rows(nemo_rl.read(saved(tmp_path, counts))) == [{7: 0.75, 5: 0.25}, {2: 0.5, 3: 0.5}, {4: 1.0}]


@pytest.mark.parametrize("keys", [("student_model_id", "teacher_model_id"), ("model_A_id", "model_B_id")])
def test_the_models_are_remembered(tmp_path: Path, keys: tuple[str, str]) -> None:
    content = dense([[1]], [[1.0]], **dict(zip(keys, ("org/a", "org/b"), strict=True)))
    matrix = nemo_rl.read(saved(tmp_path, content))
    assert (matrix.student_name, matrix.teacher_name) == ("org/a", "org/b")


def test_the_scale_column_is_no_part_of_the_map(tmp_path: Path) -> None:
    """Catches mass 0.2 on an unrelated id, and a row with the scale column alone that is not empty."""
    content = dense([[5, 6, 11], [11, 12, 13]], [[0.6, 0.2, 0.2], [0, 0, 1.0]], enable_scale_trick=True)
    matrix = nemo_rl.read(saved(tmp_path, content))
    assert rows(matrix) == [pytest.approx({5: 0.75, 6: 0.25}), {}]
    without = nemo_rl.read(saved(tmp_path, {**content, "enable_scale_trick": False}))
    assert rows(without)[1] == {13: 1.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_all_number_types(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bug: NeMo-RL's bfloat16 likelihoods are refused, as NumPy lacks the type."""
    content = {"indices": torch.tensor([[1, 2]], dtype=torch.int32), "likelihoods": torch.tensor([[3, 1]], dtype=dtype)}
    assert rows(nemo_rl.read(saved(tmp_path, content))) == [{1: 0.75, 2: 0.25}]


def test_long_rows_are_cut(tmp_path: Path) -> None:
    """Catches a matrix as wide as its longest row: counts of the reverse pass have rows with hundreds of entries."""
    counts = {(0, t): float(t) for t in range(1, 201)} | {(1, 3): 1.0}
    matrix = nemo_rl.read(saved(tmp_path, counts))
    heaviest = range(200, 200 - nemo_rl.MAX_WIDTH, -1)
    assert matrix.indices[0].tolist() == list(heaviest)
    np.testing.assert_allclose(matrix.weights[0], [t / sum(heaviest) for t in heaviest], rtol=2**-23)


class Hostile:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_code_is_not_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    for name, write in (("zip", torch.save), ("plain", lambda value, path: path.write_bytes(pickle.dumps(value, 2)))):
        path = tmp_path / f"{name}.pt"
        write({"indices": Hostile(target)}, path)
        with pytest.raises(ProjectionError, match=rf"{name}\.pt names code to run .*mkdir.*projection build"):
            nemo_rl.read(path)
    assert not target.exists()


def test_a_class_of_the_standard_library_is_code_too(tmp_path: Path) -> None:
    """Bug: NeMo-RL's defaultdict of counts, saved unchanged, runs code or fails without a remedy."""
    path = saved(tmp_path, defaultdict(float, {(0, 1): 1.0}))
    with pytest.raises(ProjectionError, match=r"defaultdict.*plain dicts"):
        nemo_rl.read(path)


def test_files_that_are_not_projections(tmp_path: Path) -> None:
    valid = saved(tmp_path, dense([[1, 2]] * 500, [[1.0, 1.0]] * 500)).read_bytes()
    contents = {"empty": b"", "text": b"hello", "truncated": valid[: len(valid) // 2], "zeros": b"\0" * 64}
    for name, content in contents.items():
        path = tmp_path / f"{name}.pt"
        path.write_bytes(content)
        with pytest.raises(ProjectionError, match=rf"{name}\.pt is damaged") as caught:
            nemo_rl.read(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ProjectionError, match="no such file"):
        nemo_rl.read(tmp_path / "nothing.pt")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1, 2], "holds a list"),
        ({}, "empty dict"),
        ({"A_to_B": torch.zeros(2)}, "the keys 'A_to_B'; expected"),
        ({"indices": torch.zeros(2, 2, dtype=torch.long)}, "expected the keys"),
        (dense([[1, 2]], [[1.0]]), r"indices \[1, 2\] and likelihoods \[1, 1\]"),
        (dense([], []), r"indices \[0\]"),
        ({"indices": torch.zeros(0, 4, dtype=torch.long), "likelihoods": torch.zeros(0, 4)}, r"indices \[0, 4\]"),
        ({"indices": [[1]], "likelihoods": [[1.0]]}, "indices must be a dense tensor, not a list"),
        ({"indices": torch.ones(2, 2), "likelihoods": torch.ones(2, 2)}, "must be integers"),
        (dense([[1]], [[1.0 + 1j]]), "tensor of numbers, not torch.complex64"),
        (
            {"indices": torch.ones(2, 2, dtype=torch.long).to_sparse(), "likelihoods": torch.ones(2, 2)},
            "not a torch.sparse_coo tensor",
        ),
        (dense([[1], [2]], [[1.0], [float("nan")]]), "row 1 has a weight that is negative or not finite"),
        (dense([[1], [2]], [[1.0], [float("inf")]]), "row 1 has a weight that is negative or not finite"),
        (dense([[1], [2]], [[1.0], [-0.5]]), "row 1 has a weight that is negative or not finite"),
        (dense([[1], [-2]], [[1.0], [1.0]]), "row 1 leads to an id that no teacher has"),
        (dense([[1], [2**40]], [[1.0], [1.0]]), "row 1 leads to an id that no teacher has"),
        (dense([[1], [-1]], [[0.0], [1.0]]), "no entry has any weight"),
        ({(0, 1): float("nan")}, r"the weight of \(0, 1\) is nan"),
        ({(0, 1): 10**400}, r"the weight of \(0, 1\) is 1000"),
        ({(0, 1): "much"}, r"the weight of \(0, 1\) is 'much'"),
        ({(0, 1): -1}, "row 0 has a weight that is negative"),
        ({(0, -1): 1.0}, r"the key \(0, -1\) is not a pair"),
        ({(2**60, 1): 1.0}, "is not a pair"),
        ({(0, 1.5): 1.0}, r"the key \(0, 1.5\) is not a pair"),
        ({(0, 1): 0.0}, "no entry has any weight"),
    ],
)
def test_impossible_values(tmp_path: Path, content: object, reason: str) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(ProjectionError, match=rf"map\.pt is not a usable NeMo-RL projection: .*{reason}"):
        nemo_rl.read(path)


def test_a_small_file_that_stands_for_terabytes(tmp_path: Path) -> None:
    """Catches memory that a view of one repeated number fills."""
    number = torch.ones(1, dtype=torch.long)
    path = saved(tmp_path, {"indices": number.expand(2**20, 2**20), "likelihoods": number.float().expand(2**20, 2**20)})
    with pytest.raises(ProjectionError, match="larger than what is stored"):
        nemo_rl.read(path)


def exported(matrix: ProjectionMatrix, padding: int = 0) -> dict[str, object]:
    """Return a matrix as NeMo-RL writes it: int64 and bfloat16, rows for the padded head, any id in empty entries."""
    indices = torch.from_numpy(np.where(matrix.indices >= 0, matrix.indices, 3)).long()
    likelihoods = torch.from_numpy(matrix.weights).bfloat16()
    pad = (0, 0, 0, padding)
    return {
        "indices": torch.nn.functional.pad(indices, pad),
        "likelihoods": torch.nn.functional.pad(likelihoods, pad),
    }


def test_bound_to_its_pair_it_is_the_matrix_that_was_exported(tmp_path: Path) -> None:
    """Compare rows, exact flags, sizes and fingerprints with the build; bfloat16 keeps 8 bits of a weight."""
    built = build_projection(STUDENT, TEACHER)
    bound = nemo_rl.bind(nemo_rl.read(saved(tmp_path, exported(built, padding=56))), STUDENT, TEACHER)
    assert bound.exact.tolist() == built.exact.tolist()
    assert [row.keys() for row in rows(bound)] == [row.keys() for row in rows(built)]
    for ours, theirs in zip(rows(bound), rows(built), strict=True):
        assert ours == pytest.approx(theirs, rel=2**-7)  # rounding of the weight and of the row's sum
    assert (bound.student_fingerprint, bound.teacher_fingerprint) == (fingerprint(STUDENT), fingerprint(TEACHER))
    assert bound.teacher_vocab_size == pieces_of(TEACHER).vocab_size


def test_a_row_with_more_than_its_partner_is_not_exact(tmp_path: Path) -> None:
    """Bug: a weight near 1 makes a row exact, and not its bytes."""
    built = build_projection(STUDENT, TEACHER)
    token = int(np.flatnonzero(built.exact & (pieces_of(STUDENT).lengths > 0))[0])
    content = exported(built)
    content["indices"][token, :2] = torch.tensor([built.indices[token, 0], 5])
    content["likelihoods"][token, :2] = torch.tensor([0.99, 0.01])
    bound = nemo_rl.bind(nemo_rl.read(saved(tmp_path, content)), STUDENT, TEACHER)
    assert built.exact[token]
    assert not bound.exact[token]
    assert bound.exact.sum() == built.exact.sum() - 1


def test_missing_rows_are_empty(tmp_path: Path) -> None:
    """Bug: rows after the last student token with counts are missing."""
    token = STUDENT.convert_tokens_to_ids("a")
    counts = {(token, TEACHER.convert_tokens_to_ids("a")): 2.0}
    bound = nemo_rl.bind(nemo_rl.read(saved(tmp_path, counts)), STUDENT, TEACHER)
    assert bound.student_vocab_size == pieces_of(STUDENT).vocab_size
    assert np.flatnonzero(bound.row_lengths).tolist() == np.flatnonzero(bound.exact).tolist() == [token]


def test_other_pairs_are_refused(tmp_path: Path) -> None:
    """Catches a map of another pair by ids out of range and, if all ids fit, by their bytes."""
    built = build_projection(STUDENT, TEACHER)
    matrix = nemo_rl.read(saved(tmp_path, exported(built)))
    with pytest.raises(ProjectionError, match="has entries, but the student's tokenizer has 450 ids"):
        nemo_rl.bind(matrix, TEACHER, TEACHER)
    with pytest.raises(ProjectionError, match=r"leads to teacher id .* but the teacher's tokenizer has 400"):
        nemo_rl.bind(matrix, STUDENT, byte_level(400))
    shuffled = np.random.default_rng(0).permutation(matrix.teacher_vocab_size)
    moved = ProjectionMatrix(np.where(matrix.indices >= 0, shuffled[matrix.indices], -1), matrix.weights)
    with pytest.raises(ProjectionError, match="bytes in common, so it is the projection of another pair"):
        nemo_rl.bind(moved, STUDENT, TEACHER)
