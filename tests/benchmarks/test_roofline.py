"""The roofline's arithmetic against the same by hand, and its report of a tiny recipe."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.composition import ROOT
from tests.processes import Command


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType, ModuleType]]:
    """Its hardware, time and work; they import each other as a script's do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import roofline_hardware
        import roofline_time
        import roofline_work

        yield roofline_hardware, roofline_time, roofline_work
        for name in ("roofline_hardware", "roofline_time", "roofline_work"):
            sys.modules.pop(name, None)


@pytest.mark.unit
def test_a_step_is_what_a_hand_makes_of_it(modules: tuple[ModuleType, ModuleType, ModuleType]) -> None:
    """Bugs: a part that counts once a step instead of once a microbatch, bits for bytes, a link's latency forgotten."""
    hardware, time, work = modules
    gpu = hardware.GPU("one", 100.0, 10.0, 1e9, 5.0, "")
    assumed = hardware.Assumptions(0.5, 0.25, 0.5, 0.4, 0.1, 0.3, 2.0, 1.5, 0.7, 4.0, 0.01)
    kind = work.Kind
    parts = {
        "teacher a": work.Counts(Counter({kind("product", 10, 500): 2}), copies=1),
        "forward": work.Counts(Counter({kind("attention", 5, 100): 1, kind("other", 1, 0): 3})),
        "loss": work.Counts(Counter({kind("compiled", 20, 0): 2}), waits=3),
        "backward": work.Counts(Counter({kind("other", 0, 0): 4, kind("triton", 0, 0): 1})),
    }
    student, teacher = time.Weights(layers=6, rest=2, units=2), time.Weights(layers=3, rest=1, units=1)
    plan = time.Plan(student, {"a": teacher}, parts, micro_batches=3, teacher_micro_batches=3)
    found = time.step_times(plan, time.Machine(gpu, 2, assumed)).parts

    # 5 bytes and 50 FLOPs of products, 25 of attention, a second; the shortest kernel is 0.1 s.
    assert found["teachers"] == pytest.approx(3 * 2 * 500 / 50)
    assert found["forward"] == pytest.approx(3 * (100 / 25 + 3 * 1 / 5))
    assert found["loss"] == pytest.approx(3 * 2 * 20 / 5)
    assert found["backward"] == pytest.approx(3 * 5 * 0.1)
    # The host needs 0.3 s for a kernel, 1.5 for Triton's, 2 for a compiled function; only the backward pass is launched
    # more slowly.
    assert found["launches"] == pytest.approx(3 * (4 * 0.3 + 1.5 - 5 * 0.1))
    assert found["waits"] == pytest.approx(3 * 3 * 4.0 + 4.0)
    # Of the teacher half is copied into the buffer that is gathered, and all of it out; of the student, cast from fp32,
    # layers twice.
    of_teacher, gathered = (4 * 4 / 2 + 4 * 4) / 5, 2 * 6 + 2
    of_student = (10 * gathered / 2 + 4 * gathered + 6 * 8 + 12 * 8 / 2) / 5
    assert found["copies of FSDP2"] == pytest.approx(3 * (of_teacher + of_student))
    # Half of it comes over the link, at 2 bytes a second, less what passes hide.
    sent = 0.5 * 2 * gathered / 2 + 4 * 0.01 + 0.5 * 4 * 8 / 2 + 2 * 0.01
    assert found["communication"] == pytest.approx(3 * (sent - (4.6 + 0.5)))
    assert found["optimizer"] == pytest.approx(40 * 4 / 5)


@pytest.mark.unit
def test_layers_are_added_and_what_is_not_alike_is_refused(modules: tuple[ModuleType, ModuleType, ModuleType]) -> None:
    """Bug: a model whose second layer is of another kind, counted as if all were."""
    *_, work = modules
    layer, rest = (work.Kind(name, 1, 0) for name in ("product", "other"))
    one, two = (work.Counts(Counter({layer: number, rest: 2})) for number in (1, 2))
    each = two.plus(one, -1)

    assert one.plus(each, 15).kernels == {layer: 16, rest: 2}
    with pytest.raises(ValueError, match="not equal"):
        each.plus(one, -1)


@pytest.mark.world
def test_a_report_of_a_tiny_recipe(tmp_path: Path) -> None:
    """Bug: workers or losses have changed, so that they cannot be counted without values any more."""
    given = ["--tiny", "--output", str(tmp_path)]
    process = Command(ROOT / "benchmarks" / "roofline.py", given, dict(os.environ), tmp_path)
    process.wait(300)
    assert process.returncode == 0, process.output()

    found = json.loads((tmp_path / "roofline.json").read_text(encoding="utf-8"))
    assert {row["machine"] for row in found["recipes"]} == {"1 × H100 SXM", "8 × H100 SXM"}
    for machine in ("1 × H100 SXM", "8 × H100 SXM"):
        own = [sum(row["times"]["parts"].values()) for row in found["changes"] if row["machine"] == machine]
        assert own == sorted(own, reverse=True), "each change saves time"
    text = (tmp_path / "roofline.md").read_text(encoding="utf-8")
    assert "not measurement" in text
    assert all(f"| {part} |" in text for part in ("teacher tiny", "forward", "loss", "backward"))
