"""The demo corpus: its content, and that repeated or concurrent builds give the same bytes."""

import multiprocessing
import os
import sysconfig
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset

from nemo_opd.demo import python_sources
from nemo_opd.errors import DataError

SPLITS: tuple[python_sources.Split, ...] = ("train", "validation")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMO_OPD_CACHE", str(cache))
    return cache


def write_library(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def rows_of(path: Path) -> list[dict[str, str]]:
    with pa.ipc.open_stream(pa.OSFile(str(path))) as reader:
        return reader.read_all().to_pylist()


def test_both_splits_are_datasets_of_text_and_path(own_cache: Path) -> None:
    """Bug: `Dataset.from_file` cannot read the file (it needs Arrow's stream format), or finds different columns."""
    for split in SPLITS:
        rows = Dataset.from_file(str(python_sources.arrow_file(split)))
        assert rows.column_names == ["text", "path"]
        assert all(text.strip() for text in rows["text"])


def test_splits_share_no_file_and_have_several(own_cache: Path) -> None:
    """Bug: the split is by document, so that validation continues training text."""
    train, validation = (set(Dataset.from_file(str(python_sources.arrow_file(split)))["path"]) for split in SPLITS)
    assert not train & validation
    assert len(validation) >= 5
    assert len(validation) < len(train) / 10
    assert not any({"test", "tests", "site-packages"} & set(path.split("/")) for path in train | validation)


def test_every_line_is_in_exactly_one_document(own_cache: Path) -> None:
    """Bug: a lost or repeated line at a cut. Oracle: the uncut file."""
    parts: dict[str, list[str]] = {}
    for split in SPLITS:
        for row in rows_of(python_sources.arrow_file(split)):
            parts.setdefault(row["path"], []).append(row["text"])
    root = Path(sysconfig.get_paths()["stdlib"])
    for path, texts in parts.items():
        with (root / path).open(encoding="utf-8", newline="") as file:
            assert "".join(texts) == file.read()
        assert all(text.endswith("\n") for text in texts[:-1])


def test_documents_are_about_as_long_as_asked(own_cache: Path) -> None:
    """Bug: very short documents at file ends. A cut moves by less than a line, so a part is off by less than two."""
    for row in rows_of(python_sources.arrow_file("validation")):
        longest_line = max(len(line) for line in row["text"].split("\n")) + 1
        assert len(row["text"]) <= python_sources.DOCUMENT_CHARS + longest_line


@pytest.mark.parametrize(
    "text",
    ["a", "\n", "x = 1\n" * 700, "y" * 5_000, "y" * 2_500 + "\nz\n", "form\x0cfeed\u2028sep\r\n" * 300],
    ids=["one character", "one newline", "short lines", "one long line", "long then short", "other separators"],
)
def test_cut_keeps_the_text_and_cuts_after_newlines_only(text: str) -> None:
    """Bugs: cuts inside a line, at characters that only Python's `splitlines` counts as line ends; empty parts."""
    parts = python_sources.cut(text)
    assert "".join(parts) == text
    assert all(parts)
    assert all(part.endswith("\n") for part in parts[:-1])


def test_build_is_deterministic_and_skips_unsuitable_files(tmp_path: Path) -> None:
    """Bugs: bytes depend on directory order or time; rows of blank, non-UTF-8, test or installed files."""
    used = {f"package/m{i}.py": b"# line\n" * (i + 1) for i in range(120)}
    unused = {
        "blank.py": b"\n \n",
        "latin.py": b"# \xe9\n",
        "notes.txt": b"text\n",
        "test/test_a.py": b"a\n",
        "package/tests/b.py": b"b\n",
        "site-packages/c.py": b"c\n",
    }
    forward = write_library(tmp_path / "forward", used | unused)
    backward = write_library(tmp_path / "backward", dict(reversed((used | unused).items())))
    for root in (forward, backward):
        out = tmp_path / f"{root.name}_out"
        out.mkdir()
        python_sources.build(root, python_sources.source_files(root), out)
    for split in SPLITS:
        first, second = (tmp_path / f"{name}_out" / f"{split}.arrow" for name in ("forward", "backward"))
        assert first.read_bytes() == second.read_bytes()
    rows = [row for split in SPLITS for row in rows_of(tmp_path / "forward_out" / f"{split}.arrow")]
    assert {row["path"] for row in rows} == set(used)
    assert python_sources.cache_key(python_sources.source_files(forward)) == python_sources.cache_key(
        python_sources.source_files(backward)
    )


def test_other_sources_have_another_cache_key(tmp_path: Path) -> None:
    """Bug: an upgraded interpreter reads the old corpus."""
    root = write_library(tmp_path, {"a.py": b"a\n", "b.py": b"b\n"})
    key = python_sources.cache_key(python_sources.source_files(root))
    (root / "b.py").write_bytes(b"bb\n")
    assert python_sources.cache_key(python_sources.source_files(root)) != key


def test_an_interpreter_without_sources_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"demo:train has no source files"):
        python_sources.build(tmp_path, python_sources.source_files(tmp_path), tmp_path)


def test_an_unknown_split_is_explained(own_cache: Path) -> None:
    with pytest.raises(DataError, match=r"demo:test .*demo:train, demo:validation"):
        python_sources.arrow_file("test")


def _build_and_read(cache: str, ready: Barrier, results: "Queue[dict[python_sources.Split, bytes]]") -> None:
    os.environ["NEMO_OPD_CACHE"] = cache
    ready.wait()
    results.put({split: python_sources.arrow_file(split).read_bytes() for split in SPLITS})


@pytest.mark.world
def test_concurrent_builds_are_complete_and_leave_nothing_behind(tmp_path: Path, own_cache: Path) -> None:
    """Bugs: a half-written file is read; temporary files stay."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(2), context.Queue()
    builders = [context.Process(target=_build_and_read, args=(str(tmp_path), ready, results)) for _ in range(2)]
    for builder in builders:
        builder.start()
    seen = [results.get(timeout=120) for _ in builders]
    for builder in builders:
        builder.join(timeout=60)
    expected = {split: python_sources.arrow_file(split).read_bytes() for split in SPLITS}
    assert seen == [expected, expected]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"train.arrow", "validation.arrow"}
