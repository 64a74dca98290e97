"""Steps that are skipped because their loss or gradient is not finite (methods.md §12)."""

import math
from collections.abc import Mapping

from nemo_opd.config.run import RunConfig
from nemo_opd.errors import NotFiniteError
from nemo_opd.types import Metrics
from nemo_opd.workers.terms import IS_TAKEN, objective_terms


class SkippedSteps:
    """Counts of skipped steps, in total and in a row, with the reason for the last one."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.total = 0
        self.in_a_row = 0
        self._is_students = False
        """Whether no term of the last skipped step was finite, so the student's logits are the cause."""
        self._last = ""

    def observe(self, step: int, metrics: Metrics) -> str | None:
        """Count a step from its reduced metrics; return a warning if it was skipped, else None."""
        if metrics[IS_TAKEN].value():
            self.in_a_row = 0
            return None
        self.total += 1
        self.in_a_row += 1
        self._is_students = not any(math.isfinite(value) for value in _term_values(self._config, metrics).values())
        self._last = f"step {step}: {cause(self._config, metrics)}"
        return f"{self._last}; the step is skipped, and weights, optimizer and schedule stay as they are"

    def require_progress(self) -> None:
        """Raise NotFiniteError after `train.max_skipped_steps` skipped steps in a row."""
        limit = self._config.train.max_skipped_steps
        if self.in_a_row >= limit:
            raise NotFiniteError(
                f"{self._last}; the last {self.in_a_row} steps were skipped (train.max_skipped_steps={limit}), which "
                "leaves the student's weights as they were before: if the student has diverged, lower "
                f"student.optimizer.lr or set train.gradient_clip{self._hint()}; leave out a teacher whose logits "
                "overflow"
            )

    def require_sound_end(self, validated: float | None) -> None:
        """Raise NotFiniteError if the run would end with a diverged student.

        validated: bits per byte of the student. Without validation (None) the last step decides.
        """
        if validated is None:
            has_diverged, evidence = self.in_a_row > 0 and self._is_students, "the last step was skipped"
        else:
            has_diverged = not math.isfinite(validated)
            evidence = f"the last validation gives {validated} bits per byte"
        if has_diverged:
            raise NotFiniteError(
                f"{evidence}: the student has diverged and is not exported, and the last {self.in_a_row} steps were "
                "skipped; lower student.optimizer.lr or set train.gradient_clip and start again with another "
                "run.output_dir, or export a checkpoint with nemo-opd checkpoint to-hf"
            )

    def _hint(self) -> str:
        in_float16 = [i for i, teacher in enumerate(self._config.active_teachers) if teacher.dtype == "float16"]
        settings = " ".join(f"teachers.{i}.dtype=bfloat16" for i in in_float16)
        return f"; write {settings} if a teacher overflows in float16" if in_float16 else ""

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total, "in_a_row": self.in_a_row, "is_students": int(self._is_students)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.total, self.in_a_row = state.get("total", 0), state.get("in_a_row", 0)
        self._is_students = bool(state.get("is_students", 0))


def _term_values(config: RunConfig, metrics: Metrics) -> dict[str, float]:
    """Return the objective's unweighted terms, keyed by name."""
    return {term.name: term.metric.value() for term in objective_terms(config, metrics)}


def cause(config: RunConfig, metrics: Metrics) -> str:
    """Describe which terms of the objective were not finite, or that only the gradient was not."""
    values = _term_values(config, metrics)
    not_finite = [f"{name} ({value})" for name, value in values.items() if not math.isfinite(value)]
    if not_finite:
        logits = ", so the student's own logits are not" if "CE" in values and not math.isfinite(values["CE"]) else ""
        return f"{', '.join(not_finite)} {'is' if len(not_finite) == 1 else 'are'} not finite{logits}"
    return f"the gradient's norm is {metrics['grad_norm'].value()}, although all terms of the loss are finite"
