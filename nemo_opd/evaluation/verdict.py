"""The verdict on a run: the student's change, whether its teachers helped, and remarks on doubtful results."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_opd.evaluation.estimates import Estimate, ratio_difference
from nemo_opd.logging.interface import (
    STUDENT_BEFORE,
    ClosingTable,
    ScoreRow,
    Verdict,
    amount,
    change,
    difference,
    figure,
    score,
    share,
)
from nemo_opd.logging.metrics import BITS_PER_BYTE
from nemo_opd.logging.records import Records, differing_setting, value_at
from nemo_opd.logging.scores import TextBits

_CONFIDENCE = 0.95
_SAME = 1e-3
"""Largest relative difference that rounding in another layout or dtype may cause."""
_UNKNOWN = "cannot be told"
_MOST_EPOCHS = 10
"""Largest number of epochs without a remark."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A run's validation: the student's bits of each text before the first step, and after the last."""

    name: str
    start: TextBits | None
    end: TextBits | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """As in its config.yaml."""
    rates: Mapping[float, float] = field(default_factory=dict)
    """Learning rate of the steps in its metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Facts of a run that its figures do not tell."""

    teachers: tuple[str, ...]
    """Names."""
    parameters: Mapping[str, int]
    """Number of parameters, keyed by `student` and the teachers' names; only known ones."""
    num_texts: int | None
    """Training texts; None if unknown."""


def judge(closing: ClosingTable, records: Records, setup: Setup, arm: Arm, baseline: Arm | None) -> Verdict:
    """Return the verdict on a run; without sentences if nothing was measured.

    closing: its figures. records: its metrics. baseline: a run without teachers; None if there is none.
    """
    before, after = (None if row is None else row.bits_per_byte for row in (closing.before, closing.after))
    if after is None:
        return _verdict_on_scores(closing, setup)
    if before is None:
        return Verdict(
            (f"The student is at {figure(after)} bits per byte; it was not measured before training, so whether it "
             "improved cannot be told.",)
        )  # fmt: skip
    interval = None if arm.start is None or arm.end is None else _difference(arm.end, arm.start)
    is_worse = interval is not None and interval.low > 0 and after - before > _SAME * before
    sentences = [_student_sentence(before, after, interval, arm), *_gap_sentences(closing)]
    effect = ""
    if setup.teachers:
        effect, sentence = teacher_effect(arm, baseline)
        sentences.append(sentence)
    remarks = [*_student_remarks(before, after, records, arm, is_worse=is_worse), *_teacher_remarks(closing, setup)]
    scores_gain = any(row.before is not None and row.after.value > row.before.value for row in closing.scores)
    all_remarks = (*remarks, *_data_remarks(records, setup))
    return Verdict(tuple(sentences), all_remarks, is_worse=is_worse and not scores_gain, teacher_effect=effect)


def _verdict_on_scores(closing: ClosingTable, setup: Setup) -> Verdict:
    """Return the verdict on a run without validation texts: the first score of each question set."""
    first: dict[str, ScoreRow] = {}
    for row in closing.shown_scores:
        if row.before is not None:
            first.setdefault(row.measure.rpartition("/")[0], row)
    sentences = [_score_sentence(row) for row in first.values()]
    if not sentences or not setup.teachers:
        return Verdict(tuple(sentences))
    sentences.append("Whether the teacher helped cannot be told without validation texts: set data.validation.")
    return Verdict(tuple(sentences), teacher_effect=_UNKNOWN)


def _score_sentence(row: ScoreRow) -> str:
    assert row.before is not None
    before, after = (score(*values, is_share=row.is_share) for values in (row.before, row.after))
    text = f"Student, {row.measure}: {before} → {after}"
    if (gain := row.differences.get(STUDENT_BEFORE)) is None:
        return f"{text}."
    chance = "; chance may explain it" if gain.low <= 0 <= gain.high else ""
    return f"{text} (difference {difference(*gain, is_share=row.is_share)}{chance})."


def _difference(after: TextBits, before: TextBits) -> Estimate | None:
    """Return the difference in bits per byte over the same texts; None if the texts differ or are too few."""
    if after.num_bytes != before.num_bytes:
        return None
    estimate = ratio_difference(after.bits, before.bits, after.num_bytes, _CONFIDENCE)
    return estimate if math.isfinite(estimate.low) else None


def _student_sentence(before: float, after: float, interval: Estimate | None, arm: Arm) -> str:
    text = f"Student: {figure(before)} → {figure(after)} bits per byte, lower is better ({change(after / before - 1)}"
    if interval is None or arm.end is None:
        return f"{text})."
    low, high = (change(bound / before).removesuffix(" %") for bound in (interval.low, interval.high))
    return f"{text}; 95 % interval {low} to {high} % over {len(arm.end.bits):,} texts)."


def _gap_sentences(closing: ClosingTable) -> Iterator[str]:
    """Yield a sentence for each better teacher; over shared bytes, as a teacher has other tokens."""
    before, after = (None if row is None else row.shared_bits_per_byte for row in (closing.before, closing.after))
    for row in closing.teachers:
        bits = row.shared_bits_per_byte
        if bits is not None and before is not None and after is not None and before - bits > _SAME * before:
            yield (
                f"{_capital(row.name)} is at {figure(bits)} over the bytes that all models predict, where the "
                f"student went from {figure(before)} to {figure(after)}: {_closed(before, after, bits)}."
            )


def _closed(before: float, after: float, teacher: float) -> str:
    if abs(after - before) <= _SAME * before:
        return "the gap has not changed"
    if after > before:
        return "the gap has grown"
    if after < teacher:
        return "it passed the teacher"
    return f"{share((before - after) / (before - teacher))} of the gap is closed"


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]


def teacher_effect(arm: Arm, baseline: Arm | None) -> tuple[str, str]:
    """Return whether the teachers helped, as in `Verdict.teacher_effect`, and a sentence with figures or the reason."""
    gain = gain_over(arm, baseline)
    if isinstance(gain, str):
        return _UNKNOWN, f"Whether the teacher helped cannot be told{gain}"
    assert arm.end is not None
    assert baseline is not None
    assert baseline.end is not None
    figures = (
        f"{figure(arm.end.per_byte)} bits per byte with it, {figure(baseline.end.per_byte)} without, after "
        f"{arm.end.step:,} steps each ({_with_interval(gain)})"
    )
    if (reason := _unclear(gain, baseline.end)) is not None:
        return _UNKNOWN, f"Whether the teacher helped cannot be told, as {reason}: {figures}."
    effect = "helped" if gain.value < 0 else "made it worse"
    return effect, f"The teacher {effect}: {figures}."


def _with_interval(gain: Estimate) -> str:
    return f"difference {gain.value:+.4f}, 95 % interval {gain.low:+.4f} to {gain.high:+.4f}"


def _unclear(gain: Estimate, end: TextBits) -> str | None:
    """Return why a difference to `end` does not tell which is better; None if it does."""
    if abs(gain.value) <= _SAME * end.per_byte:
        return f"rounding may cause differences up to {_SAME:.1%}"
    return "the interval includes 0" if gain.low <= 0 <= gain.high else None


def compared(arm: Arm, other: Arm) -> str | None:
    """Say which of two runs ended better, with figures; None without figures of the same validation texts."""
    if arm.end is None or other.end is None or (gain := _difference(arm.end, other.end)) is None:
        return None
    reason = _unclear(gain, other.end)
    answer = (
        f"is {'better' if gain.value < 0 else 'worse'} than {other.name}"
        if reason is None
        else f"may be better or worse than {other.name}, as {reason}"
    )
    return (
        f"{arm.name} {answer}: {figure(arm.end.per_byte)} bits per byte against {figure(other.end.per_byte)} "
        f"({_with_interval(gain)})."
    )


def gain_over(arm: Arm, baseline: Arm | None) -> Estimate | str:
    """Return the difference in bits per byte from the run without teachers, or the reason why there is none."""
    if baseline is None:
        way_out = "" if arm.settings.get("rollout") else ", or to true"
        return f" without the same run without a teacher: set run.baseline to its folder{way_out}."
    if arm.start is None or arm.end is None or baseline.start is None or baseline.end is None:
        lacking = arm if arm.start is None or arm.end is None else baseline
        return f": {lacking.name} has no figures per validation text, of its start and its end."
    if arm.end.step != baseline.end.step:
        return f": {baseline.name} took {baseline.end.step:,} steps and {arm.name} {arm.end.step:,}."
    for step, rate in arm.rates.items():
        if not math.isclose(baseline.rates.get(step, rate), rate, rel_tol=1e-6):
            names = f"{baseline.name} and {arm.name}"
            return f": {names} had different learning rates at step {step:,.0f}, as if one was continued for longer."
    if (differing := differing_setting(baseline.settings, arm.settings)) is not None:
        key, value, other = differing
        return f": {key} is {value} in {baseline.name} and {other} in {arm.name}."
    gain = _difference(arm.end, baseline.end)
    if gain is None:
        return f": {baseline.name} was validated on other texts than {arm.name}, or on a single text."
    start, baseline_start = arm.start.per_byte, baseline.start.per_byte
    if abs(start - baseline_start) > _SAME * start:
        return f": {baseline.name} started at {figure(baseline_start)}, {arm.name} at {figure(start)}."
    return gain


def _student_remarks(before: float, after: float, records: Records, arm: Arm, *, is_worse: bool) -> Iterator[str]:
    if is_worse:
        yield f"The student is worse than before training ({figure(after)} bits per byte, was {figure(before)})."
    validated = [record for record in records if record["step"] and BITS_PER_BYTE in record]
    best = min(validated, key=lambda record: record[BITS_PER_BYTE], default=None)
    if best is not None and best[BITS_PER_BYTE] < min(before, after - _SAME * before):
        yield (
            f"The student was better at step {best['step']:,.0f} ({figure(best[BITS_PER_BYTE])} bits per byte): train "
            "for fewer steps, or set train.keep_best to keep that model."
        )
    every = value_at(arm.settings, "train.validate_every")
    if (
        len(validated) == 1
        and validated[0]["step"] > 1
        and not (isinstance(every, int) and every < validated[0]["step"])
    ):
        yield (
            "It was validated only once after the start, so its course is unknown: set train.validate_every below "
            f"{validated[0]['step']:,.0f}."
        )


def _teacher_remarks(closing: ClosingTable, setup: Setup) -> Iterator[str]:
    before = None if closing.before is None else closing.before.shared_bits_per_byte
    for row in closing.teachers:
        if row.shared_bits_per_byte is not None and before is not None and row.shared_bits_per_byte >= before:
            yield (
                f"{_capital(row.name)} predicts these texts worse than the student did before training "
                f"({figure(row.shared_bits_per_byte)} bits per shared byte, the student {figure(before)})."
            )
    student = setup.parameters.get("student")
    for name in setup.teachers:
        parameters = setup.parameters.get(name)
        if student is not None and parameters is not None and parameters < student:
            yield (
                f"Teacher {name} is smaller than the student ({amount(parameters)} and {amount(student)} parameters)."
            )


def _data_remarks(records: Records, setup: Setup) -> Iterator[str]:
    epochs = 1 + max((record["epoch"] for record in records if "epoch" in record), default=0)
    if epochs > _MOST_EPOCHS:
        texts = "same texts" if setup.num_texts is None else f"same {setup.num_texts:,} texts"
        yield f"The student read the {texts} in {epochs:,.0f} epochs, and may have memorized them."
