"""On-policy distillation: the student learns the teachers' distributions on its own samples (methods.md §10)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_opd.config.run import RunConfig
from nemo_opd.logging.busy import busy
from nemo_opd.training.inputs import require_kind
from nemo_opd.training.launch import driving
from nemo_opd.training.off_policy import train
from nemo_opd.training.on_policy_session import OnPolicySession
from nemo_opd.training.preflight import preflight
from nemo_opd.training.summary import print_plan


def distil(config: RunConfig, callbacks: Sequence[Any] = ()) -> Path | None:
    """Run to the end, or until a checkpoint after an interrupt or an alarm that stops the run.

    Returns the run's directory, or None on ranks other than the driver. Raises an OPDError if the run fails.
    """
    require_kind(config, on_policy=True)
    with driving(config.cluster) as is_driver:
        return drive(config, callbacks) if is_driver else None


def drive(config: RunConfig, callbacks: Sequence[Any] = ()) -> Path:
    """Run preflight, then train with this process as the driver; return the run's directory."""
    with busy("checking settings, models, tokenizers and prompts"):
        plan = preflight(config)
    if config.run.dry_run:
        print_plan(plan, Console())
        return plan.output_dir
    with OnPolicySession(plan, callbacks) as session:
        train(session)
    return plan.output_dir
