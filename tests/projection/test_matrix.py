"""What a projection refuses to be made from, and to be loaded from."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from nemo_opd.errors import OPDError, ProjectionError
from nemo_opd.projection import ProjectionMatrix, build_projection
from tests.projection.conftest import SMALL


def small() -> ProjectionMatrix:
    indices = np.array([[0, -1], [2, 1], [-1, -1]])
    weights = np.array([[1, 0], [0.75, 0.25], [0, 0]])
    return ProjectionMatrix(indices, weights, np.array([True, False, False]), teacher_vocab_size=5)


def test_from_arrays() -> None:
    matrix = small()
    assert (matrix.indices.dtype, matrix.weights.dtype, matrix.exact.dtype) == (np.int32, np.float32, np.bool_)
    assert (matrix.student_vocab_size, matrix.teacher_vocab_size, matrix.top_k) == (3, 5, 2)
    assert matrix.row_lengths.tolist() == [1, 2, 0]


def test_defaults_from_arrays() -> None:
    matrix = ProjectionMatrix([[0], [3]], [[1.0], [1.0]])
    assert matrix.teacher_vocab_size == 4
    assert not matrix.exact.any()


@pytest.mark.parametrize(
    ("indices", "weights", "exact", "reason"),
    [
        ([[0, 1]], [[0.5]], None, "must both be"),
        ([0, 1], [0.5, 0.5], None, "must both be"),
        ([[0.0]], [[1.0]], None, "integers"),
        ([[5]], [[1.0]], None, r"outside \[-1, 5\)"),
        ([[-2]], [[1.0]], None, r"outside \[-1, 5\)"),
        ([[2**40]], [[1.0]], None, r"outside \[-1, 5\)"),
        ([[0, 1]], [[1.5, -0.5]], None, "negative"),
        ([[0]], [[float("nan")]], None, "not finite"),
        ([[0]], [[float("inf")]], None, "not finite"),
        ([[-1]], [[1.0]], None, "empty entry"),
        ([[1, 1]], [[0.5, 0.5]], None, "twice"),
        ([[0, 1]], [[0.5, 0.4]], None, "not 1"),
        ([[0]], [[0.0]], None, "not 1"),
        ([[0]], [[1.0]], [1], "exact must be bool"),
        ([[0]], [[1.0]], [True, False], "exact must be bool"),
        ([[0, 1]], [[0.5, 0.5]], [True], "not exactly one entry"),
        ([[0], [0]], [[1.0], [1.0]], [True, True], "two rows flagged exact"),
    ],
)
def test_refused(indices: object, weights: object, exact: object, reason: str) -> None:
    with pytest.raises(ProjectionError, match=reason):
        ProjectionMatrix(indices, weights, exact, teacher_vocab_size=5)  # type: ignore[arg-type]


def test_saved_and_loaded(tmp_path: Path) -> None:
    student, teacher = SMALL["three_digits"], SMALL["one_digit"]
    matrix = build_projection(student, teacher)
    matrix.save(tmp_path / "new" / "matrix.safetensors")
    loaded = ProjectionMatrix.load(tmp_path / "new" / "matrix.safetensors", student, teacher)
    for name in ProjectionMatrix.__slots__:
        assert np.array_equal(getattr(loaded, name), getattr(matrix, name)), name
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["matrix.safetensors"]


def test_pickled_for_another_process() -> None:
    assert pickle.loads(pickle.dumps(small())).weights.tolist() == small().weights.tolist()


def test_a_file_of_another_pair_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "matrix.safetensors"
    build_projection(SMALL["three_digits"], SMALL["one_digit"]).save(path)
    with pytest.raises(ProjectionError, match="another teacher tokenizer"):
        ProjectionMatrix.load(path, SMALL["three_digits"], SMALL["nfc"])
    with pytest.raises(ProjectionError, match="another student tokenizer"):
        ProjectionMatrix.load(path, student_tokenizer=SMALL["one_digit"])


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """At any length: catches a reader that crashes or takes half a file for a whole one."""
    path = tmp_path / "matrix.safetensors"
    small().save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ProjectionError):
            ProjectionMatrix.load(path)


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return open, (str(tmp_path / "pwned"), "w")  # type: ignore[return-value]

    (tmp_path / "old.pt").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ProjectionError, match="damaged or no projection"):
        ProjectionMatrix.load(tmp_path / "old.pt")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "other"}, "no projection"),
        ({"version": "99"}, "format version '99'"),
        ({"teacher_vocab_size": "many"}, "damaged header"),
        ({"teacher_vocab_size": "2"}, r"outside \[-1, 2\)"),
        ({"student_vocab_size": "9"}, "header for 9 rows"),
    ],
)
def test_headers_that_lie(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    path = tmp_path / "matrix.safetensors"
    small().save(path)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    matrix = small()
    arrays = {"indices": matrix.indices, "weights": matrix.weights, "exact": matrix.exact}
    save_file(arrays, path, metadata | changes)
    with pytest.raises(ProjectionError, match=reason):
        ProjectionMatrix.load(path)


@pytest.mark.parametrize("name", ["indices", "weights", "exact"])
def test_a_missing_or_misshapen_array(tmp_path: Path, name: str) -> None:
    path = tmp_path / "matrix.safetensors"
    small().save(path)
    content = path.read_bytes()
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    matrix = small()
    arrays = {"indices": matrix.indices, "weights": matrix.weights, "exact": matrix.exact}
    for bad in ({**arrays, name: np.zeros((), arrays[name].dtype)}, {k: v for k, v in arrays.items() if k != name}):
        save_file(bad, path, metadata)
        with pytest.raises(ProjectionError):
            ProjectionMatrix.load(path)


def test_a_missing_file_and_an_unwritable_folder(tmp_path: Path) -> None:
    with pytest.raises(ProjectionError, match="cannot read"):
        ProjectionMatrix.load(tmp_path / "nothing.safetensors")
    (tmp_path / "file").touch()
    with pytest.raises(ProjectionError, match="cannot write"):
        small().save(tmp_path / "file" / "matrix.safetensors")


def test_errors_are_our_own() -> None:
    assert issubclass(ProjectionError, OPDError)
