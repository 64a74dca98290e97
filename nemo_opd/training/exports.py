"""Models exported at the end of a run, and their model cards."""

from collections.abc import Iterator, Mapping

from nemo_opd.checkpoint.manager import CheckpointManager
from nemo_opd.checkpoint.verify import STUDENT
from nemo_opd.errors import HubError
from nemo_opd.files import copy_whole
from nemo_opd.logging import ClosingTable
from nemo_opd.logging.base import Best
from nemo_opd.logging.busy import print_line
from nemo_opd.logging.card import Exported, write_card
from nemo_opd.models.hub import push
from nemo_opd.progress import working
from nemo_opd.training.best import BestSteps
from nemo_opd.training.closing import closing_at
from nemo_opd.training.learned_rows import write_learned_rows
from nemo_opd.training.models import Models, export_whole
from nemo_opd.training.plan import Plan


def export_models(plan: Plan, models: Models) -> None:
    """Write the student to final/ and each average of its weights to final_<teacher>/."""
    final = plan.output_dir / "final"
    export_whole(models, final)
    write_learned_rows(plan, final)
    for i, teacher in enumerate(plan.config.active_teachers):
        if teacher.weights == "ema":
            export_whole(models, plan.output_dir / f"final_{teacher.name}", average_of=i)


def export_best(plan: Plan, best: BestSteps, checkpoints: CheckpointManager) -> Best | None:
    """Copy the student of the best existing checkpoint to best/ and return its step, or None without one."""
    settings, saved_steps = plan.config.train.keep_best, set(checkpoints.steps())
    if settings is None:
        return None
    for step, value in best.ranked:
        if step in saved_steps:
            copy_whole(checkpoints.path(step) / STUDENT, plan.output_dir / "best")
            return Best(settings.metric, step, value)
    return None


def push_export(plan: Plan) -> None:
    """Push the model that `run.push_to_hub` names, if set. Raises HubError on failure."""
    settings = plan.config.run.push_to_hub
    if settings is None:
        return
    folder = plan.output_dir / settings.model
    if not folder.is_dir():
        raise HubError(f"run.push_to_hub.model={settings.model}: the run has no {folder}, so nothing was pushed")
    with working(f"pushing {settings.model} to {settings.repo}"):
        url = push(folder, settings.repo, private=settings.private)
    print_line(f"pushed  {url}")


def write_cards(plan: Plan, closing: ClosingTable, bits_per_byte: Mapping[str, float], step: int) -> None:
    """Write README.md into final/, best/ and final_<teacher>/.

    closing: closing table of the student after `step`, the last. bits_per_byte: see `closing_table`.
    """
    for exported in _exported(plan, closing, bits_per_byte, step):
        write_card(plan.output_dir, exported)


def _exported(plan: Plan, closing: ClosingTable, bits_per_byte: Mapping[str, float], step: int) -> Iterator[Exported]:
    config, folder, best = plan.config, plan.output_dir, closing.best
    yield Exported(folder / "final", f"The student after {step:,} steps", step, closing)
    if best is not None:
        description = f"The student after {best.step:,} of {step:,} steps, at its best {best.metric}: {best.value:.4g}"
        at_best = closing_at(config, folder, bits_per_byte, best.step)
        yield Exported(folder / "best", description, best.step, at_best, " (best)")
    for teacher in config.active_teachers:
        if teacher.weights == "ema":
            description = f"An average of the student's weights over {step:,} steps with decay {teacher.ema_decay:g}"
            yield Exported(folder / f"final_{teacher.name}", description, step, suffix=f" ({teacher.name})")
