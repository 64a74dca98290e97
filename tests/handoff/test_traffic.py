"""Traffic between nodes, computed before models load: hidden states are sent, logits are refused."""

from dataclasses import replace

import pytest

from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError
from nemo_opd.handoff.slices import (
    LayoutPair,
    Payload,
    Readers,
    Traffic,
    check_stays_on_node,
    planned_readers,
    planned_traffic,
)
from tests.handoff.places import colocated, filled

PAYLOAD = Payload(num_sequences=64, length=4096, vocab_size=151_936, hidden_size=2560, itemsize=2)
LOGITS = replace(PAYLOAD, hidden_size=None)
NODE = 8


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        (Layout(16), Layout(16)),
        (Layout(16), Layout(2, 1, 8)),
        (Layout(4, 1, 4), Layout(8, 2, 1)),
        (Layout(16), Layout(1, 4, 4)),  # every context-parallel rank has all positions
    ],
    ids=str,
)
def test_groups_that_fit_a_node_pass(student: Layout, teacher: Layout) -> None:
    sides = colocated(student, teacher, NODE)
    check_stays_on_node("big", sides, LOGITS)
    assert not any(planned_traffic(sides, PAYLOAD))


def test_a_window_over_two_nodes_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"logits stays on a node.*'big'.*node 0 reads \d+\.\d\d GiB.*on node 1.*type=hidden_states, "
    ):
        check_stays_on_node("big", colocated(Layout(16), Layout(1, 1, 16), NODE), LOGITS)


@pytest.mark.parametrize(("cp", "tp"), [(cp, tp) for cp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if cp * tp <= NODE])
def test_the_layouts_that_the_refusal_recommends_pass(cp: int, tp: int) -> None:
    """Bug: a remedy that is refused as well."""
    sides = LayoutPair(Layout(16), Layout(16), filled(16, NODE), filled(16, NODE, first=16))
    with pytest.raises(ConfigError, match=r"or cluster\.placement=colocated with the same parallelism\.tp and "):
        check_stays_on_node("big", sides, LOGITS)

    layout = Layout(32 // (cp * tp), cp, tp)
    check_stays_on_node("big", colocated(layout, layout, NODE), LOGITS)


def test_the_bytes_are_those_of_rows_and_head() -> None:
    """Student rank 0 has 64/16 texts. From each rank of a teacher with tp=16 it reads a sixteenth of the columns."""
    sides = colocated(Layout(16), Layout(1, 1, 16), NODE)
    with pytest.raises(ConfigError) as refused:
        check_stays_on_node("big", sides, LOGITS)

    logits = 64 / 16 * 4096 * 151_936 / 16 * 2 / 2**30
    assert f"student rank 0 on node 0 reads {logits:.2f} GiB of teacher rank 8 on node 1" in str(refused.value)
    assert "and 125 more" in str(refused.value)  # 16 · 8 crossings; three are shown
    # Hidden states are equal over tp, so they come from the own device, but half of the head from the other node.
    assert set(planned_traffic(sides, PAYLOAD)) == {Traffic(0, 151_936 // 2 * 2560 * 2)}


def test_hidden_states_that_cross_are_counted() -> None:
    """Half of the teacher's rows are on each of two nodes; the head is on both."""
    sides = colocated(Layout(1, 1, 16), Layout(16), NODE)

    assert set(planned_traffic(sides, PAYLOAD)) == {Traffic(64 // 2 * 4096 * 2560 * 2, 0)}


def test_readers_are_known_before_the_first_batch() -> None:
    """Bug: exports that no rank takes, which hold GPU memory after their owner has released it."""
    sides = colocated(Layout(4), Layout(2, 1, 2), ranks_per_node=4)

    readers = planned_readers(sides, PAYLOAD)

    # Student ranks 0 and 1 read the rows of teacher part 0, ranks 2 and 3 of part 1; a tp rank serves its own device.
    assert [rank_readers.output for rank_readers in readers] == [(0,), (1,), (2,), (3,)]
    # The first shard is on ranks 0 and 2, the second on 1 and 3; a rank without the shard reads from the lower one.
    assert [rank_readers.head for rank_readers in readers] == [(0, 1, 3), (0, 1, 2), (2,), (3,)]
    assert planned_readers(sides, LOGITS)[0] == Readers((0, 1), ())


def test_a_student_on_another_node_maps_no_buffer() -> None:
    sides = LayoutPair(Layout(2), Layout(1), filled(2, NODE), filled(1, NODE, first=NODE))

    assert planned_readers(sides, PAYLOAD) == (Readers((), (), sends_head=True),)
