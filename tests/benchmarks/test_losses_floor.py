"""The measurement of the losses' floor on a GPU, and its vocabularies."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from nemo_opd.projection import ProjectionMatrix
from tests.composition import ROOT
from tests.losses.real_sizes import STUDENT, Sides


@pytest.fixture(scope="module")
def floor() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import losses_floor

        yield losses_floor
        sys.modules.pop("losses_floor", None)


def test_a_gpu_is_timed_by_its_own_clock_and_while_it_is_busy(
    floor: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the losses' time includes milliseconds of planning on the host while the GPU waits."""
    done: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: "Event") -> float:
            return 60.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    sides = SimpleNamespace(ids=SimpleNamespace(is_cuda=True))
    seconds = floor.seconds(lambda _: done.append("call"), sides)
    calls = floor.IN_A_ROW
    assert seconds == pytest.approx(0.06 / calls)
    assert done == ["call", "record", *["call"] * calls, "record", "wait"]


def test_heads_have_the_columns_of_the_projections_tokenizers() -> None:
    """Bug: a padded head of 151,936 rows, which is fast, is measured for a tokenizer of 151,669 ids, which is slow."""
    matrix = ProjectionMatrix(
        np.arange(40, dtype=np.int32)[:, None],
        np.ones((40, 1), np.float32),
        np.ones(40, np.bool_),
        teacher_vocab_size=51,
    )
    sides = Sides.of(4, lambda *shape, device: torch.zeros(shape), torch.device("cpu"), STUDENT[0] // 8, matrix)
    assert [len(side.head.weight) for side in (sides.student, sides.same, sides.cross)] == [40, 40, 51]
    assert sides.projection is matrix


def test_a_real_pair_is_taken_where_there_is_one(floor: ModuleType) -> None:
    options = SimpleNamespace(tokenizers=None, divisor=1, pair="a:b")
    assert floor.real_projection(options) is None
    assert floor.real_projection(SimpleNamespace(tokenizers=Path("x"), divisor=64, pair="a:b")) is None
