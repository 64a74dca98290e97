"""Losses in the workers: the same curve for a batch in one microbatch, and in four over two ranks.

One loss of each kind of arguments, units and rows. losses/test_build.py counts the units of all losses;
losses/test_columns.py and losses/test_parallel.py reorder and cut the columns of all. Tolerance as in test_invariance.
A wrong gradient shows in its norm and in the second step's losses.
"""

import pytest
from torch import Tensor

from nemo_opd.preflight.plan import Plan
from tests.tiny import Tiny
from tests.workers.local import RTOL, Trained, Training, first_batches, in_world, plan_of, train

pytestmark = pytest.mark.world

TERMS = {
    "gold": [],
    "byte_prefix": ["loss.positions=all", "loss.ends=cover", "loss.pieces=spelling"],
    "alm": ["loss.temperature=2"],
    "uld": [],
    "p_kl": ["loss.merge=mean"],
    "function": ["loss.function=tests.workers.test_every_loss:difference_of_the_largest"],
}


def difference_of_the_largest(student: Tensor, teacher: Tensor) -> Tensor:
    return (student.log_softmax(1).amax(1) - teacher.log_softmax(1).amax(1)).square()


WHOLE, CUT = (1, 8), (2, 2)
"""Numbers of ranks and microbatch sizes."""
GRIDS = (WHOLE, CUT)
HANDED_OVER = ("gold", "alm", "function")
"""Losses compared for both handoffs and orders of columns. A few are enough: all losses read the same rows."""
STEPS = 2


def make_plan(tiny: Tiny, term: str, micro_batch_size: int, handoff: str = "hidden_states") -> Plan:
    return plan_of(
        [
            *tiny.overrides(f"loss={term}", *TERMS[term], *f"handoff={handoff}".split()),
            "train.global_batch_size=8",
            f"train.micro_batch_size={micro_batch_size}",
            f"train.max_steps={STEPS}",
            "student.optimizer.lr=1e-2",
            "student.optimizer.eps=1e-3",
            "student.scheduler.warmup_steps=0",
        ]
    )


BY_ID = "hidden_states handoff.column_order=teacher"
Curves = dict[tuple[str, int, int, str], Trained]


@pytest.fixture(scope="module")
def curves(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """Return curves, keyed by term, ranks, microbatch size and handoff."""
    folder = tmp_path_factory.mktemp("every_loss")
    batches = first_batches(make_plan(tiny, "gold", 1), STEPS)
    results: Curves = {}
    for num_ranks in (1, 2):
        grids = [(term, num_ranks, size, "hidden_states") for term in TERMS for n, size in GRIDS if n == num_ranks]
        if num_ranks == 1:
            grids += [(term, *WHOLE, "logits") for term in HANDED_OVER]
            grids += [(term, *WHOLE, BY_ID) for term in HANDED_OVER]
        jobs = [Training(make_plan(tiny, term, size, handoff), batches) for term, _, size, handoff in grids]
        results |= dict(zip(grids, in_world(num_ranks, train, jobs, folder / str(num_ranks)), strict=True))
    return results


def check_equal(expected: Trained, actual: Trained) -> None:
    for ours, theirs in zip(expected.curve, actual.curve, strict=True):
        for name in ("ce", "kd/cross", "kd/same", "grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], rel=RTOL), name


@pytest.mark.parametrize("term", TERMS)
def test_the_curve_does_not_depend_on_how_a_batch_is_cut(curves: Curves, term: str) -> None:
    """Bugs: driver and loss count units differently; a mean over microbatches."""
    uncut, cut = (curves[term, *grid, "hidden_states"] for grid in GRIDS)
    check_equal(uncut, cut)
    assert uncut.curve[0]["kd/cross"] > 0


@pytest.mark.parametrize("term", HANDED_OVER)
def test_the_curve_does_not_depend_on_the_handoff(curves: Curves, term: str) -> None:
    """Bugs: a head cut at a wrong column; logits from a neighbouring position's hidden states."""
    check_equal(curves[term, *WHOLE, "logits"], curves[term, *WHOLE, "hidden_states"])


@pytest.mark.parametrize("term", HANDED_OVER)
def test_the_curve_does_not_depend_on_the_order_of_columns(curves: Curves, term: str) -> None:
    """Bug: a loss or a target reads the teacher's ids from reordered logits."""
    check_equal(curves[term, *WHOLE, BY_ID], curves[term, *WHOLE, "hidden_states"])
