"""The roofline's arithmetic against a calculation by hand, and its report of a tiny recipe."""

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
    """Yield the modules of hardware, time and work; they import each other as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import roofline_hardware
        import roofline_time
        import roofline_work

        yield roofline_hardware, roofline_time, roofline_work
        for name in ("roofline_hardware", "roofline_time", "roofline_work"):
            sys.modules.pop(name, None)


@pytest.mark.unit
def test_a_step_equals_a_calculation_by_hand(modules: tuple[ModuleType, ModuleType, ModuleType]) -> None:
    """Bugs: a part counts once a step instead of once a microbatch; bits for bytes; a link without latency."""
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
    seconds = time.step_times(plan, time.Machine(gpu, 2, assumed)).parts

    # A second moves 5 bytes and computes 50 FLOPs of products or 25 of attention; a kernel takes at least 0.1 s.
    assert seconds["teachers"] == pytest.approx(3 * 2 * 500 / 50)
    assert seconds["forward"] == pytest.approx(3 * (100 / 25 + 3 * 1 / 5))
    assert seconds["loss"] == pytest.approx(3 * 2 * 20 / 5)
    assert seconds["backward"] == pytest.approx(3 * 5 * 0.1)
    # The host needs 0.3 s to launch a kernel, 1.5 for Triton's, 2 for a compiled function; only the backward pass takes
    # longer to launch than to run.
    assert seconds["launches"] == pytest.approx(3 * (4 * 0.3 + 1.5 - 5 * 0.1))
    assert seconds["waits"] == pytest.approx(3 * 3 * 4.0 + 4.0)
    # Half of the teacher is copied into the gathered buffer, and all of it out; the student is cast from fp32, and its
    # layers are copied twice.
    of_teacher, gathered = (4 * 4 / 2 + 4 * 4) / 5, 2 * 6 + 2
    of_student = (10 * gathered / 2 + 4 * gathered + 6 * 8 + 12 * 8 / 2) / 5
    assert seconds["copies of FSDP2"] == pytest.approx(3 * (of_teacher + of_student))
    # Half of it comes over the link, at 2 bytes a second; the passes hide a part.
    sent = 0.5 * 2 * gathered / 2 + 4 * 0.01 + 0.5 * 4 * 8 / 2 + 2 * 0.01
    assert seconds["communication"] == pytest.approx(3 * (sent - (4.6 + 0.5)))
    assert seconds["optimizer"] == pytest.approx(40 * 4 / 5)


@pytest.mark.unit
def test_equal_layers_are_added_and_unequal_ones_are_refused(
    modules: tuple[ModuleType, ModuleType, ModuleType],
) -> None:
    """Bug: a model with layers of different kinds is counted as if all were of the second kind."""
    *_, work = modules
    layer, other_kind = (work.Kind(name, 1, 0) for name in ("product", "other"))
    one_layer, two_layers = (work.Counts(Counter({layer: number, other_kind: 2})) for number in (1, 2))
    difference = two_layers.plus(one_layer, -1)

    assert one_layer.plus(difference, 15).kernels == {layer: 16, other_kind: 2}
    with pytest.raises(ValueError, match="not equal"):
        difference.plus(one_layer, -1)


@pytest.mark.world
def test_a_report_of_a_tiny_recipe(tmp_path: Path) -> None:
    """Bug: workers or losses have changed, so that they cannot be counted without values."""
    arguments = ["--tiny", "--output", str(tmp_path)]
    process = Command(ROOT / "benchmarks" / "roofline.py", arguments, dict(os.environ), tmp_path)
    process.wait(300)
    assert process.returncode == 0, process.output()

    report = json.loads((tmp_path / "roofline.json").read_text(encoding="utf-8"))
    assert {row["machine"] for row in report["recipes"]} == {"1 × H100 SXM", "8 × H100 SXM"}
    for machine in ("1 × H100 SXM", "8 × H100 SXM"):
        step_seconds = [sum(row["times"]["parts"].values()) for row in report["changes"] if row["machine"] == machine]
        assert step_seconds == sorted(step_seconds, reverse=True), "each change saves time"
    text = (tmp_path / "roofline.md").read_text(encoding="utf-8")
    assert "not measurement" in text
    assert all(f"| {part} |" in text for part in ("teacher tiny", "forward", "loss", "backward"))
