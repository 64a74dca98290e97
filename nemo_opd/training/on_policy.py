"""On-policy distillation: the student learns its teachers' distributions on its own samples (methods.md §10)."""

from rich.console import Console

from nemo_opd.config.run import RunConfig
from nemo_opd.logging.busy import busy
from nemo_opd.training.inputs import require_kind
from nemo_opd.training.launch import driving
from nemo_opd.training.off_policy import train_step
from nemo_opd.training.on_policy_session import OnPolicySession
from nemo_opd.training.preflight import preflight
from nemo_opd.training.summary import print_plan


def distil(config: RunConfig) -> None:
    """Run to the end, to an alarm that stops it, or to a checkpoint when interrupted.

    Raises an OPDError where the run fails.
    """
    require_kind(config, on_policy=True)
    with driving(config.cluster) as is_driver:
        if is_driver:
            drive(config)


def drive(config: RunConfig) -> None:
    """Check the settings, then train in this process."""
    with busy("checking settings, models, tokenizers and prompts"):
        plan = preflight(config)
    if config.run.dry_run:
        print_plan(plan, Console())
        return
    with OnPolicySession(plan) as session:
        session.measure_start()
        for step in session.steps():
            record = train_step(session) | session.rollout_values()
            if session.is_due(config.train.validate_every) and plan.data.validation is not None:
                record |= session.validate()
            if config.evaluation is not None and session.is_due(config.evaluation.every):
                record |= session.evaluate()
            session.loggers.log(step, record)
            session.watch(record)
            if session.is_to_be_saved:
                session.save()
        if session.is_complete:
            session.finish()
        else:
            session.print_how_to_continue()
