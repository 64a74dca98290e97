"""Compiling decoder layers changes only the speed, and happens once.

The backend is aot_eager: compiling C++ code takes a minute.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.tiny import Tiny
from tests.workers.local import RTOL, Training, evaluate, first_batches, in_world, opened, plan_of, train_step

pytestmark = pytest.mark.world

STEPS = 4


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear the compiled graphs."""
    compile_in_place = nn.Module.compile

    def without_code(module: nn.Module, **options: Any) -> None:
        compile_in_place(module, backend="aot_eager", **options)

    monkeypatch.setattr(nn.Module, "compile", without_code)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@dataclass(frozen=True)
class Result:
    curve: list[dict[str, float]]
    evaluation: dict[str, float]
    graphs: list[int]
    """Number of graphs after each step, and after the evaluation."""


def train(job: Training) -> Result:
    curve, graphs = [], []
    with opened(job.plan) as models:
        for batch in job.batches:
            curve.append(train_step(models, batch))
            graphs.append(counters["stats"]["unique_graphs"])
        evaluation = evaluate(models, job.batches[0])
        graphs.append(counters["stats"]["unique_graphs"])
    return Result(curve, evaluation, graphs)


RECOMPUTED_WITH_ADAPTERS = ("student.activation_checkpointing=true", "student.lora={rank:4,target_modules:[q_proj]}")
"""Wrappers around the student's layers; the teachers' layers have none."""


def test_the_curve_is_the_same_and_every_length_has_one_graph(tiny: Tiny, tmp_path: Path, fresh: None) -> None:
    """Bugs: a graph per layer or per length; no graph, since a wrapper hides the layer from the compiler."""
    plan = plan_of(tiny.overrides(f"train.max_steps={STEPS}", "data.packing=false", *RECOMPUTED_WITH_ADAPTERS))
    batches = first_batches(plan, STEPS)
    student = plan.config.student.model_copy(update={"compile": True})
    with_compiler = replace(plan, config=plan.config.model_copy(update={"student": student}))
    plain, compiled = in_world(1, train, [Training(plan, batches), Training(with_compiler, batches)], tmp_path)
    assert plain.graphs == [0] * (STEPS + 1)
    assert len({batch.student.ids.shape[1] for batch in batches}) > 1
    in_training, in_all = compiled.graphs[0], compiled.graphs[-1]
    assert 0 < in_training == compiled.graphs[STEPS - 1]
    assert in_training < in_all <= 3, "one more graph without gradients, two with recomputation"
    assert not counters["graph_break"]
    for expected, actual in zip([*plain.curve, plain.evaluation], [*compiled.curve, compiled.evaluation], strict=True):
        for name in expected.keys() & {"ce", "kd/cross", "kd/same", "grad_norm", "bits_per_byte"}:
            assert actual[name] == pytest.approx(expected[name], rel=RTOL), name


def test_teachers_are_compiled_too(tiny: Tiny, tmp_path: Path, fresh: None) -> None:
    plan = plan_of(tiny.overrides("train.max_steps=1", "data.packing=false"))
    batches = first_batches(plan, 1)
    teachers = tuple(teacher.model_copy(update={"compile": True}) for teacher in plan.config.teachers)
    with_compiler = replace(plan, config=plan.config.model_copy(update={"teachers": teachers}))

    plain, compiled = in_world(1, train, [Training(plan, batches), Training(with_compiler, batches)], tmp_path)

    assert plain.graphs[0] == 0 < compiled.graphs[0]
    for name in ("kd/cross", "kd/same", "grad_norm"):
        assert compiled.curve[0][name] == pytest.approx(plain.curve[0][name], rel=RTOL), name
