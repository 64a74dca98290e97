"""The cache behind `projection: auto`."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nemo_opd.projection import build, build_projection, cached_projection
from tests.projection.conftest import SMALL
from tests.tokenizers_fixture import byte_level

STUDENT, TEACHER = SMALL["three_digits"], SMALL["one_digit"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path))
    return tmp_path / "projection"


def test_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, path = cached_projection(STUDENT, TEACHER)
    monkeypatch.delattr(build, "build_projection")
    second, again = cached_projection(STUDENT, TEACHER)
    assert path == again
    assert second.weights.tolist() == first.weights.tolist()


def test_a_changed_input_of_the_matrix_names_another_file() -> None:
    """Catches a stale matrix after a change of an option, of the pair or of the eos token."""
    tokenizer = byte_level(410, extra=("<|end_of_text|>",))
    paths = [cached_projection(STUDENT, TEACHER, top_k)[1] for top_k in (1, 2)]
    paths += [cached_projection(TEACHER, STUDENT)[1], cached_projection(tokenizer, TEACHER)[1]]
    tokenizer.eos_token = "<|end_of_text|>"
    paths.append(cached_projection(tokenizer, TEACHER)[1])
    paths.append(cached_projection(STUDENT, TEACHER, reverse=True)[1])
    paths += [cached_projection(STUDENT, TEACHER, roles={"<|im_start|>": role})[1] for role in ("bos", "other")]
    assert len(set(paths)) == 8


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_a_damaged_file_is_built_again(content: bytes | None) -> None:
    _, path = cached_projection(STUDENT, TEACHER)
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    matrix, _ = cached_projection(STUDENT, TEACHER)
    assert matrix.weights.tolist() == build_projection(STUDENT, TEACHER).weights.tolist()
    assert cached_projection(STUDENT, TEACHER)[0].exact.any()


def test_writers_at_the_same_time(folder: Path) -> None:
    """Catches a shared temporary name: one writer would rename another's half-written file."""
    with ThreadPoolExecutor(8) as pool:
        matrices = list(pool.map(lambda _: cached_projection(STUDENT, TEACHER)[0], range(8)))
    assert all(matrix.indices.tolist() == matrices[0].indices.tolist() for matrix in matrices)
    assert len(list(folder.iterdir())) == 1
