"""A column of the data names the teacher: from files to the rows of a batch, and errors about the column."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nemo_opd.data.loader import TrainLoader, validation_batches
from nemo_opd.data.order import BatchOrder
from nemo_opd.errors import DataError
from nemo_opd.preflight.corpus import Corpus
from nemo_opd.preflight.plan import Plan, preflight
from tests.composition import compose
from tests.tiny import SENTENCES, Tiny

ROUTES = ["same", "cross", "cross", "same", "same"]


def rows_of(routes: list[str | None]) -> list[dict[str, str | None]]:
    return [{"teacher": route, "text": SENTENCES[i % len(SENTENCES)]} for i, route in enumerate(routes)]


def jsonl(folder: Path, routes: list[str | None]) -> str:
    file = folder / "documents.jsonl"
    file.write_text("\n".join(map(json.dumps, rows_of(routes))), encoding="utf-8")
    return f"data.train.jsonl_files={file}"


def plan_of(tiny: Tiny, source: str, *more: str) -> Plan:
    without = ["data.train.arrow_files=null", "data.validation.arrow_files=null"]
    return preflight(compose(*tiny.overrides(*without, source, "aggregation=routed", "data.shuffle=false", *more)))


def lengths(plan: Plan) -> list[list[int]]:
    """Return the lengths of all documents for each teacher."""
    (batch,) = validation_batches(plan.data.train, plan.data.make_sample, 100)
    return [rows.tokens.lengths.tolist() for rows in batch.teachers]


@pytest.mark.parametrize("cache", ["true", "false"])
def test_a_teacher_has_the_rows_that_name_it(tiny: Tiny, tmp_path: Path, cache: str) -> None:
    plan = plan_of(tiny, jsonl(tmp_path, [*ROUTES]), f"data.cache={cache}")
    for name, text_lengths in zip(("cross", "same"), lengths(plan), strict=True):
        assert [length > 0 for length in text_lengths] == [route == name for route in ROUTES]


def test_a_cached_sample_follows_a_new_route(tiny: Tiny, tmp_path: Path) -> None:
    """Bug: the sample cache keeps the route of the first run."""
    first = lengths(plan_of(tiny, jsonl(tmp_path, [*ROUTES])))
    swapped = {"same": "cross", "cross": "same"}
    second = lengths(plan_of(tiny, jsonl(tmp_path, [swapped[route] for route in ROUTES])))
    for ours, theirs in zip(first, second, strict=True):
        assert all((a > 0) != (b > 0) for a, b in zip(ours, theirs, strict=True))


def test_windows_are_for_the_teacher_of_their_document(tiny: Tiny, tmp_path: Path) -> None:
    """Bug: a teacher reads all windows of a packed row, which has documents of two teachers."""
    plan = plan_of(tiny, jsonl(tmp_path, [*ROUTES] * 4), "train.max_length=12", "train.global_batch_size=100")
    assert isinstance(plan.data, Corpus)
    with plan.data.loader(plan.config) as loader:
        batch = loader.next()
    assert batch.row is not None
    cross, same = (rows.tokens.lengths > 0 for rows in batch.teachers)
    assert torch.equal(cross, ~same)
    assert len(batch) > 4 * len(ROUTES)
    for read in (cross, same):
        assert read.any()
    both = set(batch.row[cross].tolist()) & set(batch.row[same].tolist())
    assert both, "a row with texts of both"


@pytest.mark.world
def test_loader_workers_keep_the_route(tiny: Tiny, tmp_path: Path) -> None:
    plan = plan_of(tiny, jsonl(tmp_path, [*ROUTES]))
    with TrainLoader(
        plan.data.train, plan.data.make_sample, BatchOrder(len(plan.data.train), 5, 0, False), 1
    ) as loader:
        assert [rows.tokens.lengths.tolist() for rows in loader.next().teachers] == lengths(plan)


def test_parquet_and_another_name_of_the_column(tiny: Tiny, tmp_path: Path) -> None:
    """Bug: user columns named `text` and `teacher` are taken for ours although the settings name others."""
    file = tmp_path / "documents.parquet"
    rows = [{"text": row["teacher"], "content": row["text"], "teacher": "x"} for row in rows_of([*ROUTES])]
    pq.write_table(pa.Table.from_pylist(rows), file)
    plan = plan_of(tiny, f"data.train.parquet_files={file}", "aggregation.key=text", "data.text_key=content")
    assert [length > 0 for length in lengths(plan)[0]] == [route == "cross" for route in ROUTES]


def test_without_the_column(tiny: Tiny) -> None:
    with pytest.raises(DataError) as caught:
        preflight(compose(*tiny.overrides("aggregation=routed", "aggregation.key=from")))
    message = str(caught.value)
    assert message.startswith(f"data.train.arrow_files='{tiny.documents}' has no column 'from', in which")
    assert "set aggregation.key to one of its columns (text)" in message


def test_an_unknown_teacher(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        plan_of(tiny, jsonl(tmp_path, ["same", "cross", "crosss"]))
    assert "documents.jsonl') has teacher='crosss', which is not a teacher of this run" in str(caught.value)
    assert "the teachers are cross, same" in str(caught.value)


def test_rows_without_a_teacher(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 of 3 documents have no teacher"):
        plan_of(tiny, jsonl(tmp_path, ["same", None, "cross"]))


def test_a_column_of_numbers(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "documents.parquet"
    pq.write_table(pa.Table.from_pylist([{"text": "a b", "teacher": 1}]), file)
    with pytest.raises(DataError, match="is of type int64, not string"):
        plan_of(tiny, f"data.train.parquet_files={file}")
