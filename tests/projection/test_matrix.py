"""Arrays and files that a projection refuses, and files that it reads back."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from nemo_opd.errors import ProjectionError
from nemo_opd.projection import ProjectionMatrix, build_projection
from nemo_opd.projection.retokenization import byte_order
from tests.projection.conftest import SMALL


def small() -> ProjectionMatrix:
    indices = np.array([[0, -1], [2, 1], [-1, -1]])
    weights = np.array([[1, 0], [0.75, 0.25], [0, 0]])
    return ProjectionMatrix(indices, weights, np.array([True, False, False]), teacher_vocab_size=5)


def small_with_maps() -> ProjectionMatrix:
    return replace(
        small(),
        byte_prefix=[0, -1, 2, 1, 1],
        student_shared_prefix=[0, 0, -1],
        teacher_shared_prefix=[0, -1, 0, 0, 0],
        student_shared_spelling=[0, -1, 0],
        teacher_shared_spelling=[0, 0, -1, 0, 0],
        teacher_byte_order=byte_order([b"a", b"", b"b", b"ab", b"a"]),
        teacher_spellings=[0, 2, 1, 0, 0],
        teacher_spelling_ends=[1, 1, 3, 4, 5],
        teacher_prefix_pieces=[0, 2, 1, 1],
        teacher_prefix_ends=[1, 1, 2, 3, 4],
        student_bytes=[97, 97, 98],
        student_byte_ends=[1, 3, 3],
        teacher_bytes=[97, 98, 97, 98, 97],
        teacher_byte_ends=[1, 1, 2, 4, 5],
    )


def test_from_arrays() -> None:
    matrix = small()
    assert (matrix.indices.dtype, matrix.weights.dtype, matrix.exact.dtype) == (np.int32, np.float32, np.bool_)
    assert (matrix.student_vocab_size, matrix.teacher_vocab_size, matrix.top_k) == (3, 5, 2)
    assert matrix.row_lengths.tolist() == [1, 2, 0]
    assert matrix.shared_pairs.tolist() == [[0, 0]]
    assert (matrix.byte_prefix, matrix.student_shared_prefix, matrix.options.passes) == (None, None, ())


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


@pytest.mark.parametrize(
    ("maps", "reason"),
    [
        ({"byte_prefix": [0, 1]}, r"byte_prefix must be integers \[5\], not int64 \(2,\)"),
        ({"byte_prefix": [0.0] * 5}, "byte_prefix must be integers"),
        ({"byte_prefix": [0, 0, 0, 0, 2**40]}, r"byte_prefix\[4\] is 1099511627776, outside \[-1, 3\)"),
        ({"student_shared_prefix": [0, 0, 0]}, "for one side only"),
        ({"teacher_shared_spelling": [0, 0, 0, 0, 0]}, "for one side only"),
        ({"student_shared_prefix": [0, 0, 0], "teacher_shared_prefix": [0, 0, 0, 0, 1]}, r"outside \[-1, 1\)"),
        ({"teacher_byte_order": [[3, 0, 1]] * 5}, "does not order the 5 teacher tokens"),
    ],
)
def test_maps_refused(maps: dict[str, object], reason: str) -> None:
    with pytest.raises(ProjectionError, match=reason):
        replace(small(), **maps)


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
    """Catches a reader that crashes on a cut file, or accepts one."""
    path = tmp_path / "matrix.safetensors"
    small_with_maps().save(path)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(ProjectionError):
            ProjectionMatrix.load(path)


@pytest.mark.parametrize("name", ["old.pt", "posing.safetensors"])
def test_a_pickle_is_never_run(tmp_path: Path, name: str) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return open, (str(tmp_path / "pwned"), "w")  # type: ignore[return-value]

    (tmp_path / name).write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ProjectionError, match=name):
        ProjectionMatrix.load(tmp_path / name)
    assert not (tmp_path / "pwned").exists()


def test_a_file_of_nemo_rl_is_told_by_its_suffix(tmp_path: Path) -> None:
    """Catches a file that is bound to one tokenizer only, or to the wrong pair."""
    student, teacher = SMALL["three_digits"], SMALL["one_digit"]
    matrix = build_projection(student, teacher)
    path = tmp_path / "old.pt"
    content = {"indices": torch.from_numpy(matrix.indices), "likelihoods": torch.from_numpy(matrix.weights)}
    torch.save(content, path)
    assert np.array_equal(ProjectionMatrix.load(path).indices, matrix.indices)
    bound = ProjectionMatrix.load(path, student, teacher)
    assert (bound.student_fingerprint, bound.teacher_fingerprint) == (
        matrix.student_fingerprint,
        matrix.teacher_fingerprint,
    )
    assert np.array_equal(bound.exact, matrix.exact)
    with pytest.raises(ProjectionError, match="give both"):
        ProjectionMatrix.load(path, student)
    with pytest.raises(ProjectionError, match=r"old\.pt was made for other tokenizers"):
        ProjectionMatrix.load(path, teacher, student)


def rewritten(path: Path, metadata: dict[str, str | None], **arrays: np.ndarray | None) -> None:
    """Rewrite a file with changed header entries and arrays; None removes an entry."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])["__metadata__"] | metadata
    tensors = load_file(path) | arrays
    save_file(
        {name: array for name, array in tensors.items() if array is not None},
        path,
        {name: text for name, text in header.items() if text is not None},
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "other"}, "not a projection"),
        ({"version": "99"}, "format version '99', and this nemo_opd reads version '2'"),
        ({"version": "1"}, "format version '1', and this nemo_opd reads version '2'; build it again"),
        ({"version": None}, "format version None"),
        ({"teacher_vocab_size": "many"}, "damaged header"),
        ({"teacher_vocab_size": "2"}, r"byte_prefix is I32 \(5,\), but its header says I32 \(2,\)"),
        ({"student_vocab_size": "9"}, r"indices is I32 \(3, 2\), but its header says I32 \(9, 2\)"),
        ({"student_vocab_size": "-3"}, "student_vocab_size is '-3', not a size"),
        ({"student_vocab_size": "9" * 5000}, "not a size"),
        ({"student_vocab_size": "٣"}, "not a size"),
        ({"row_width": "3"}, "header says I32"),
        ({"row_width": None}, "row_width is missing"),
        ({"student_fingerprint": None}, "student_fingerprint is missing"),
        ({"arrays": None}, "arrays is missing"),
        ({"arrays": "indices weights"}, "lists the arrays"),
        ({"arrays": "indices weights exact more"}, "lists the arrays"),
        ({"arrays": "indices weights exact"}, "but it holds"),
        ({"options": None}, "options is missing"),
        ({"options": "[" * 100000}, "builder options are damaged"),
        ({"options": "[]"}, "builder options are damaged"),
        ({"options": '{"passes": "exact_map"}'}, "builder options are damaged: passes"),
        ({"options": '{"decay": NaN}'}, "builder options are damaged"),
        ({"options": '{"decay": -0.1}'}, "builder options are damaged: decay"),
        ({"options": '{"top_k": 1e400}'}, "builder options are damaged: top_k"),
        ({"options": '{"__class__": "os"}'}, "builder options are damaged: __class__"),
    ],
)
def test_headers_that_lie(tmp_path: Path, changes: dict[str, str | None], reason: str) -> None:
    path = tmp_path / "matrix.safetensors"
    small_with_maps().save(path)
    rewritten(path, changes)
    with pytest.raises(ProjectionError, match=reason) as caught:
        ProjectionMatrix.load(path)
    assert len(str(caught.value)) < 600 + len(str(path))


@pytest.mark.parametrize(
    "name",
    [
        "indices",
        "weights",
        "exact",
        "byte_prefix",
        "student_shared_prefix",
        "teacher_shared_prefix",
        "student_shared_spelling",
        "teacher_shared_spelling",
        "teacher_byte_order",
        "teacher_spellings",
        "teacher_spelling_ends",
        "teacher_prefix_pieces",
        "teacher_prefix_ends",
        "student_bytes",
        "student_byte_ends",
        "teacher_bytes",
        "teacher_byte_ends",
    ],
)
def test_a_missing_or_misshapen_array(tmp_path: Path, name: str) -> None:
    path = tmp_path / "matrix.safetensors"
    array = getattr(small_with_maps(), name)
    for bad in (None, np.zeros((), array.dtype), array[:-1], array.astype(np.int64), array.reshape(-1, 1, 1)):
        small_with_maps().save(path)
        rewritten(path, {}, **{name: bad})
        with pytest.raises(ProjectionError, match="build it again"):
            ProjectionMatrix.load(path)


def test_values_that_no_matrix_has(tmp_path: Path) -> None:
    """Catches a loader that skips the checks of a new matrix."""
    path = tmp_path / "matrix.safetensors"
    small_with_maps().save(path)
    rewritten(path, {}, weights=np.full((3, 2), np.nan, np.float32))
    with pytest.raises(ProjectionError, match="negative or not finite"):
        ProjectionMatrix.load(path)


def test_any_damage_is_an_error_or_a_matrix(tmp_path: Path) -> None:
    """Catches a library's exception that reaches the user, by 500 files with one to three changed bytes."""
    path = tmp_path / "matrix.safetensors"
    small_with_maps().save(path)
    content, generator = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(500):
        damaged = bytearray(content)
        for place in generator.integers(len(content), size=generator.integers(1, 4)).tolist():
            damaged[place] = int(generator.integers(256))
        path.write_bytes(damaged)
        try:
            ProjectionMatrix.load(path)
        except ProjectionError:
            refused += 1
    assert refused > 250


def test_a_file_says_how_it_was_built(tmp_path: Path) -> None:
    """Catches options that come back with lists instead of tuples, and so differ from the original."""
    path = tmp_path / "matrix.safetensors"
    roles = {"<|begin_of_text|>": "opening", "<|im_start|>": ("opening", "bos")}
    matrix = build_projection(SMALL["three_digits"], SMALL["one_digit"], reverse=True, roles=roles)
    matrix.save(path)
    assert ProjectionMatrix.load(path).options == matrix.options
    assert matrix.options.roles == (("<|begin_of_text|>", ("opening",)), ("<|im_start|>", ("opening", "bos")))


def test_a_missing_file_and_an_unwritable_folder(tmp_path: Path) -> None:
    with pytest.raises(ProjectionError, match="cannot read"):
        ProjectionMatrix.load(tmp_path / "nothing.safetensors")
    (tmp_path / "file").touch()
    with pytest.raises(ProjectionError, match="cannot write"):
        small().save(tmp_path / "file" / "matrix.safetensors")


@pytest.mark.parametrize(
    ("value", "reason"), [((0, 0), "the range 0 to 0 of 2"), ((-1, 1), "-1 to 1"), ((1, 3), "1 to 3")]
)
def test_ranges_that_no_byte_order_has(value: tuple[int, int], reason: str) -> None:
    with pytest.raises(ProjectionError, match=reason):
        ProjectionMatrix([[0]], [[1.0]], teacher_vocab_size=2, teacher_byte_order=[[1, 0, 1], [0, *value]])
