"""rollouts.jsonl: the student's training rollouts, one JSON object per line, in files of limited size."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from nemo_opd.config.logging import RolloutFiles
from nemo_opd.data.record import Rollout
from nemo_opd.disk import storage_errors
from nemo_opd.files import write_atomically
from nemo_opd.logging.jsonl import parse_lines

_DIGITS = 6


class RolloutLog:
    """A writer of rollouts.jsonl. A full file is renamed to rollouts.<last step>.jsonl; the oldest are removed."""

    def __init__(self, folder: Path, settings: RolloutFiles) -> None:
        self.path = folder / "rollouts.jsonl"
        self._settings = settings

    def is_due(self, step: int) -> bool:
        return self._settings.every is not None and step % self._settings.every == 0

    def truncate_after(self, step: int) -> None:
        """Drop rollouts of later steps and a torn last line. Raises DataError if a file is damaged."""
        for file in (*self._full_files(), self.path):
            if file == self.path or _last_step(file) > step:
                self._truncate(file, step)

    def _truncate(self, file: Path, step: int) -> None:
        if not file.exists():
            return
        lines = parse_lines(file, file.read_bytes().split(b"\n"), _read_line, "not a rollout")
        remaining = [line for line in lines if line is not None and line.step <= step]
        if remaining:
            # A full file is named after its last step, which may have changed.
            new = file if file == self.path else self._full_file(remaining[-1].step)
            write_atomically(new, b"".join(line.text + b"\n" for line in remaining))
            if new == file:
                return
        file.unlink()

    def write(self, step: int, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> None:
        """Append a step's rollouts. rewards: one per rollout, or empty. Raises StorageError if writing fails."""
        values: Sequence[float | None] = rewards or [None] * len(rollouts)
        lines = (_line(step, rollout, value) for rollout, value in zip(rollouts, values, strict=True))
        with storage_errors(self.path):
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
                size = file.tell()
            if size >= self._settings.file_mb * 10**6:
                os.replace(self.path, self._full_file(step))
                for old in self._full_files()[: -self._settings.keep_files]:
                    old.unlink()

    def _full_file(self, last_step: int) -> Path:
        return self.path.with_name(f"rollouts.{last_step}.jsonl")

    def _full_files(self) -> list[Path]:
        """Return the full files, oldest first."""
        return sorted(self.path.parent.glob("rollouts.*.jsonl"), key=_last_step)


def _last_step(file: Path) -> int:
    return int(file.name.split(".")[1])


def _line(step: int, rollout: Rollout, reward: float | None) -> str:
    record: dict[str, Any] = {
        "step": step,
        "version": rollout.version,
        "prompt": rollout.prompt.index,
        "sample": rollout.sample,
        "reward": None if reward is None else _number(reward),
        "env_reward": None if rollout.env_reward is None else _number(rollout.env_reward),
        "finish_reason": rollout.finish_reason,
        "content": rollout.prompt.content,
        "answer": rollout.prompt.answer,
        "responses": rollout.responses,
        "ids": rollout.ids.tolist(),
        "loss_mask": rollout.loss_mask.astype(int).tolist(),
        "logprobs": list(_numbers(rollout.logprobs)),
        "behaviour_logprobs": list(_numbers(rollout.behaviour_logprobs)),
    }
    # A byte-level tokenizer can produce lone surrogates, which UTF-8 cannot encode.
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode() + "\n"


def _numbers(values: NDArray[Any]) -> Iterator[float | None]:
    return map(_number, values.tolist())


def _number(value: float) -> float | None:
    """Round a number. NaN and infinity, which JSON lacks, become None."""
    return round(value, _DIGITS) if math.isfinite(value) else None


class _Line(NamedTuple):
    """A line of the file, and its step."""

    step: int
    text: bytes


def _read_line(line: bytes) -> _Line | None:
    return _Line(int(json.loads(line)["step"]), line) if line else None
