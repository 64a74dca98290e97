"""Many cases in one world of ranks, which takes seconds to start."""

import traceback
from pathlib import Path

from tests.campaign.cases import Case
from tests.workers.local import Trained, Training, gathered, in_world, train


def run(cases: list[Case], num_ranks: int, folder: Path) -> list[Trained | str]:
    """What each trains, or the error it ends with. A case that ends its world is found by a world for each."""
    try:
        return in_world(num_ranks, attempt, [case.training for case in cases], folder)
    except Exception:
        if len(cases) == 1:
            return [traceback.format_exc()]
    return [made for i, case in enumerate(cases) for made in run([case], num_ranks, folder / str(i))]


def attempt(job: Training) -> Trained | str:
    """An error on all ranks alike is of this job alone; on some of them the others would wait for these for ever."""
    error = ""
    try:
        trained = train(job)
    except Exception:
        error = traceback.format_exc()
    errors = gathered(error)
    if not any(errors):
        return trained
    return next(filter(None, errors))
