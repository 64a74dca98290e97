"""Catches invalid JSON, records that outlive a resume, and lines lost to a killed process."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_opd.errors import DataError
from nemo_opd.logging.loggers import JsonlLogger, read
from tests.logging.synthetic import summary

ROOT = Path(__file__).parents[2]


def logged(path: Path, steps: range, start: int = 0) -> None:
    logger = JsonlLogger(path)
    logger.start(summary(path.parent), start)
    for step in steps:
        logger.log(step, {"train/loss": step / 2, "val/loss": math.nan, "train/student_tokens": 7})
    logger.close()


def refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_lacks_become_null(tmp_path: Path, value: float) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.start(summary(tmp_path), 0)
    logger.log(3, {"train/loss": value, "train/kd": 0.1})
    logger.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse_constant) == {"step": 3, "train/loss": None, "train/kd": 0.1}
    (back,) = read(tmp_path / "metrics.jsonl")
    assert math.isnan(back["train/loss"])


def test_a_resumed_run_drops_records_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logged(path, range(11))
    expected = path.read_bytes()
    logged(path, range(7, 11), start=6)
    assert path.read_bytes() == expected
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_starting_afresh_drops_the_records_of_an_earlier_run(tmp_path: Path) -> None:
    logged(tmp_path / "metrics.jsonl", range(5))
    logged(tmp_path / "metrics.jsonl", range(2))
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize("cut", range(1, 20, 3))
def test_a_torn_last_line_is_left_out_and_removed_on_resume(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    logged(path, range(4))
    path.write_bytes(path.read_bytes()[: -1 - cut])
    assert [record["step"] for record in read(path)] == [0, 1, 2]
    logged(path, range(3, 5), start=3)
    assert [record["step"] for record in read(path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"step": "1"}', "step: input should be a valid number"),
        (b'{"step": null}', "step: it is None"),
        (b'{"step": -1}', "step: it is -1"),
        (b'{"step": 1.5}', "step: it is 1.5"),
        (b'{"step": 1e400}', "step: it is inf"),
        (b'{"step": true}', "step: input should be a valid"),
        (b'{"train/loss": 1.0}', "no step"),
        (b'{"step": 1, "train/loss": "x"}', "train/loss: input should be a valid number, not 'x'"),
        (b'{"step": 1, "train/loss": [1]}', "train/loss: input should be a valid number"),
        (b'{"step": 1, "\xff": 1}', "invalid JSON"),
        (b'{"step":' + b"[" * 100_000, "invalid JSON: recursion limit exceeded"),
        (b"[1]", "input should be an object"),
        (b"\0" * 100, "invalid JSON"),
    ],
    ids=lambda value: value[:30].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_a_line_of_another_form_is_named_with_its_key(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "train/loss": 2}\n' + line + b'\n{"step": 3, "train/loss": NaN}\n')
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert re.match(rf"{path}, line 2 is not a metrics record \({reason}.*\); remove or repair it$", message), message


@pytest.mark.world
def test_every_finished_line_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = (
        "import sys; from pathlib import Path\n"
        "from nemo_opd.logging.loggers import JsonlLogger; from tests.logging.synthetic import summary\n"
        "path = Path(sys.argv[1]); logger = JsonlLogger(path); logger.start(summary(path.parent), 0)\n"
        "[logger.log(step, {'train/loss': 1.0}) for step in range(5)]; print('logged', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script, str(path)], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == b"logged\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [record["step"] for record in read(path)] == [0, 1, 2, 3, 4]
