"""Layouts of student and teachers and the transport between them: chosen or refused before a process starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nemo_opd.cluster.placement import Placement
from nemo_opd.config import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError
from nemo_opd.handoff.slices import Traffic
from nemo_opd.preflight import delivery as transfers
from nemo_opd.preflight import ranks as module
from nemo_opd.preflight.delivery import mapped_devices, settle_transport
from nemo_opd.preflight.memory import Phase
from nemo_opd.preflight.plan import preflight
from nemo_opd.preflight.ranks import resolve_layouts
from nemo_opd.preflight.summary import plan_rows
from tests.composition import compose
from tests.tiny import Tiny

Configure = Callable[..., RunConfig]
CLUSTER = ("cluster.device=cuda", "cluster.address=auto", "cluster.num_nodes=2", "cluster.gpus_per_node=4")


@pytest.fixture
def configure(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Configure:
    monkeypatch.setattr(module, "num_cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return lambda *overrides: compose(*tiny.overrides("train.global_batch_size=16", *overrides))


@pytest.fixture
def with_heads(tiny: Tiny, tmp_path: Path) -> str:
    """An override for the tiny student with eight heads in its configuration. Its weights are not loaded."""
    folder = tmp_path / "student"
    shutil.copytree(tiny.student, folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 2}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return f"student.model={folder}"


def test_data_parallel_ranks_are_derived_from_tp_and_cp(configure: Configure) -> None:
    config = configure(
        "student.parallelism.tp=2", "teachers.0.parallelism.tp=4", "teachers.1.parallelism.cp=2", "cluster.cpu_ranks=8"
    )
    placement = Placement.colocated(num_nodes=1, ranks_per_node=8, num_teachers=2)
    assert resolve_layouts(config, placement) == (Layout(4, tp=2), (Layout(2, tp=4), Layout(4, cp=2)))


def test_separate_teachers_have_separate_ranks(configure: Configure) -> None:
    plan = preflight(
        configure("cluster.placement=separate", "cluster.cpu_ranks=2", "cluster.teacher_ranks=[4,1]",
                  "teachers.0.parallelism.tp=2")
    )  # fmt: skip
    assert plan.student_layout == Layout(2)
    assert plan.teacher_layouts == (Layout(2, tp=2), Layout(1))
    assert [len(delivery.readers) for delivery in plan.deliveries] == [4, 1]
    assert plan.lookahead == 1
    assert plan.grid.unit == 2


def test_only_separate_teachers_work_ahead(configure: Configure) -> None:
    assert preflight(configure()).lookahead == 0
    assert preflight(configure("cluster.placement=separate", "loss.kd_weight=0")).lookahead == 0
    assert preflight(configure("cluster.placement=separate", "cluster.prefetch=3")).lookahead == 3


def test_each_rank_of_a_teacher_knows_its_readers(configure: Configure) -> None:
    """Bug: a student rank reads one of two teacher ranks with its rows, or a teacher rank lists one of two readers."""
    plan = preflight(configure("cluster.placement=separate", "cluster.teacher_ranks=[2,1]"))
    assert [[readers.output for readers in delivery.readers] for delivery in plan.deliveries] == [[(0,), (0,)], [(0,)]]
    both = preflight(configure("cluster.placement=separate", "cluster.cpu_ranks=2", "cluster.teacher_ranks=1"))
    assert [delivery.readers[0].output for delivery in both.deliveries] == [(0, 1), (0, 1)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.cpu_ranks=4", "student.parallelism.tp=3"],
            r"^student\.parallelism: tp=3 × cp=1 = 3 does not divide the model.s 4 ranks; write student\.par",
        ),
        (
            ["cluster.cpu_ranks=4", "teachers.1.parallelism.tp=8"],
            r"^teachers\.1\.parallelism: tp=8 .* write teachers\.1\.parallelism\.tp=4",
        ),
        (
            ["cluster.placement=separate", "cluster.teacher_ranks=[3,1]"],
            r"^train\.global_batch_size=16 is not a multiple of the teachers' data-parallel ranks, 3 and 1; write",
        ),
    ],
)
def test_degrees_that_do_not_divide_are_refused_with_a_proposal(
    configure: Configure, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(configure(*overrides))


def test_logits_that_would_cross_nodes_are_refused(configure: Configure, with_heads: str) -> None:
    """A tensor-parallel student over two nodes of four GPUs needs rows of data-parallel teacher ranks on both."""
    with pytest.raises(ConfigError) as caught:
        preflight(configure(*CLUSTER, with_heads, "student.parallelism.tp=8", "handoff.type=logits"))
    message = str(caught.value)
    assert message.startswith("handoff.type=logits stays on a node, but with dp=1, cp=1, tp=8 for the stu")
    assert "reads 0.00 GiB of teacher rank 4 on node 1" in message
    assert "write handoff.type=hidden_states" in message


def test_transport_is_probed_between_devices_that_read(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the transport is not probed, or between all pairs of devices. A sharded head is read from other devices."""
    plan = preflight(configure(*CLUSTER, "teachers.0.parallelism.tp=2"))
    assert plan.transport == "cuda_ipc"  # other machines' GPUs cannot be tried
    # The head's second half is on devices 1 and 3; a reader on device 0 or 2 takes the lower one.
    same, pairs = [(i, i) for i in range(4)], [(0, 1), (0, 3), (1, 0), (1, 2)]
    assert mapped_devices(plan.deliveries, shares_process=False) == sorted([*same, *pairs])
    assert mapped_devices(plan.deliveries, shares_process=True) == pairs
    assert mapped_devices(plan.deliveries[1:], shares_process=True) == []

    tried: list[object] = []
    monkeypatch.setattr(transfers, "probe_transport", lambda *arguments: tried.append(arguments) or "no peer access")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    name, (warning,) = settle_transport(plan.config, "cuda", plan.deliveries)
    assert name == "pinned_memory"
    assert "(no peer access)" in warning
    assert tried == [("cuda_ipc", [(0, 0), (0, 1), (1, 0), (1, 1)])]


def test_hidden_states_that_cross_nodes_are_sent_and_counted(configure: Configure, with_heads: str) -> None:
    """Bug: the summary or the memory estimate misses the half of the rows that each student rank receives."""
    plan = preflight(configure(*CLUSTER, with_heads, "student.parallelism.tp=8"))
    sent = [16 // 2 * width * 24 * 4 for width in plan.survey.widths]
    for delivery, num_bytes in zip(plan.deliveries, sent, strict=True):
        assert delivery.traffic == (Traffic(num_bytes, 0),) * 8
    (part,) = [
        part
        for memory in plan.memory.memories
        for part in memory.parts
        if part.name == "output of teachers on other nodes"
    ]
    assert part.at(Phase.LOSS) == sum(sent)
    rows = plan_rows(plan)
    name = plan.config.active_names[0]
    assert rows[f"{name}, between nodes"] == "0.53 MiB of hidden states per step, 0.00 MiB of heads once, by nccl"


def test_groups_that_stay_on_their_nodes_are_not_refused(configure: Configure, with_heads: str) -> None:
    plan = preflight(configure(*CLUSTER, with_heads, "student.parallelism.tp=4", "teachers.0.parallelism.tp=2"))
    assert plan.student_layout == Layout(2, tp=4)
    for delivery in plan.deliveries:
        for rank, readers in enumerate(delivery.readers):
            nodes = {delivery.sides.student_places[reader].node for reader in (*readers.output, *readers.head)}
            assert nodes <= {delivery.sides.teacher_places[rank].node}
