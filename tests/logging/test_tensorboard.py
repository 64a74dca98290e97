"""Catches values under wrong tags or steps, and visible steps that a resume should hide."""

from dataclasses import replace
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_opd.logging.trackers import TensorBoardLogger
from tests.logging.synthetic import CLOSING, QUESTIONS, record, summary


def read_back(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_scalars_read_back_and_a_continued_run_hides_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: demo}")
    first = TensorBoardLogger(tmp_path)
    first.start(summary(tmp_path), 0)
    for step in range(1, 6):
        first.log(step, {"train/loss": 100.0 + step})
    first.close()
    second = TensorBoardLogger(tmp_path)
    second.start(summary(tmp_path), 3)
    for step in range(4, 6):
        second.log(step, {"train/loss": 200.0 + step})
    second.summary(replace(CLOSING, scores=QUESTIONS.scores))
    second.close()
    events = read_back(tmp_path)
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert points == [(1, 101.0), (2, 102.0), (3, 103.0), (4, 204.0), (5, 205.0)]
    (result,) = events.Tensors("result/text_summary")
    (text,) = result.tensor_proto.string_val
    assert b"student after | 1.5000" in text
    assert b"| greedy | teacher phi4mini | 90.0 % (80.0 to 95.0 %) |" in text
    assert f"- config: `{tmp_path / 'config.yaml'}`".encode() in text
    assert [b"name: demo" in event.tensor_proto.string_val[0] for event in events.Tensors("config/text_summary")] == [
        True,
        True,
    ]


def test_every_metric_is_a_scalar_of_its_own_name(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.start(summary(tmp_path), 0)
    logger.log(7, record(7))
    logger.close()
    events = read_back(tmp_path)
    assert {tag: events.Scalars(tag)[0].step for tag in events.Tags()["scalars"]} == dict.fromkeys(record(7), 7)
