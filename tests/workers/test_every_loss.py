"""Every loss that a run may name, in the workers: the same curve whatever the microbatch and the number of ranks.

Tolerance as in test_invariance. The norm of the gradient tells of a wrong one at once, the second step's losses too.
"""

import pytest

from nemo_opd.training.plan import Plan
from tests.tiny import Tiny
from tests.workers.local import Trained, Training, first_batches, in_world, plan_of, train
from tests.workers.test_invariance import RTOL

TERMS = {
    "gold": [],
    "h_kl": ["loss.divergence=reverse_kl"],
    "strict": [],
    "byte_prefix": [],
    "shared_prefix": ["loss.divergence=jsd"],
    "alm": ["loss.temperature=2"],
    "uld": [],
    "p_kl": ["loss.merge=mean"],
}
GRIDS = ((1, 1), (1, 4), (2, 2))
"""Ranks, microbatch size."""
STEPS = 2


def make_plan(tiny: Tiny, term: str, micro_batch_size: int) -> Plan:
    return plan_of(
        [
            *tiny.overrides(f"loss={term}", *TERMS[term]),
            "train.global_batch_size=8",
            f"train.micro_batch_size={micro_batch_size}",
            f"train.max_steps={STEPS}",
            "student.optimizer.lr=1e-2",
            "student.optimizer.eps=1e-3",
            "student.scheduler.warmup_steps=0",
        ]
    )


@pytest.fixture(scope="module")
def curves(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], Trained]:
    folder = tmp_path_factory.mktemp("every_loss")
    batches = first_batches(make_plan(tiny, "gold", 1), STEPS)
    results = {}
    for num_ranks in (1, 2):
        grids = [(term, num_ranks, size) for term in TERMS for ranks, size in GRIDS if ranks == num_ranks]
        jobs = [Training(make_plan(tiny, term, size), batches) for term, _, size in grids]
        results |= dict(zip(grids, in_world(num_ranks, train, jobs, folder / str(num_ranks)), strict=True))
    return results


@pytest.mark.parametrize("term", TERMS)
def test_the_curve_does_not_depend_on_how_a_batch_is_cut(
    curves: dict[tuple[str, int, int], Trained], term: str
) -> None:
    """Catches units counted in another way by the driver than by the loss, and a mean over microbatches."""
    reference, *others = (curves[term, ranks, size] for ranks, size in GRIDS)
    for other in others:
        for expected, actual in zip(reference.curve, other.curve, strict=True):
            for name in ("ce", "kd/cross", "kd/same", "grad_norm"):
                assert actual[name] == pytest.approx(expected[name], rel=RTOL), name
    assert reference.curve[0]["kd/cross"] > 0
