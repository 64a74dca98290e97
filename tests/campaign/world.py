"""Many cases in one world of ranks, which takes seconds to start."""

import traceback
from pathlib import Path

from nemo_opd.cluster.placement import Processes
from tests.campaign.cases import Case
from tests.workers.local import Trained, Training, in_world, train


def run(cases: list[Case], num_ranks: int, folder: Path) -> list[Trained | str]:
    """What each trains, or the error it ends with. A case that ends its world is found by a world for each."""
    try:
        return in_world(num_ranks, attempt, [case.training for case in cases], folder)
    except Exception:
        if len(cases) == 1:
            return [traceback.format_exc()]
    return [made for i, case in enumerate(cases) for made in run([case], num_ranks, folder / str(i))]


def attempt(job: Training) -> Trained | str:
    """An error of several ranks ends their world."""
    try:
        return train(job)
    except Exception:
        if Processes.started().size > 1:
            raise
        return traceback.format_exc()
