"""Runs of many cases in one world of ranks, which takes seconds to start."""

import traceback
from pathlib import Path

from nemo_opd.cluster.placement import Processes
from tests.campaign.cases import Case
from tests.workers.local import Trained, Training, in_world, train


def run(cases: list[Case], num_ranks: int, folder: Path) -> list[Trained | str]:
    """Return each case's result or traceback. If a case ends the world, each gets a world of its own."""
    try:
        return in_world(num_ranks, attempt, [case.training for case in cases], folder)
    except Exception:
        if len(cases) == 1:
            return [traceback.format_exc()]
    return [trained for i, case in enumerate(cases) for trained in run([case], num_ranks, folder / str(i))]


def attempt(job: Training) -> Trained | str:
    """An error of several ranks ends their world."""
    try:
        return train(job)
    except Exception:
        if Processes.started().size > 1:
            raise
        return traceback.format_exc()
