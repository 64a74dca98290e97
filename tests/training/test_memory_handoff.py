"""The estimate of teachers' output, against the bytes of writers' buffers and of rows copied by readers."""

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import LlamaConfig

from nemo_opd.config import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.handoff.buffer import Sender
from nemo_opd.handoff.outputs import HiddenStatesWriter, LogitsWriter, windows
from nemo_opd.handoff.slices import LayoutPair, Readers
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.preflight.memory import Machine, MemoryInputs, ModelSetup, Phase, estimate
from nemo_opd.preflight.model_info import ModelSize, model_size
from tests.composition import compose
from tests.handoff.counting import CountingReceiver, CountingSender
from tests.handoff.places import filled

HIDDEN, VOCAB, LENGTH, ROWS = 16, 60, 12, 24


@pytest.fixture(scope="module")
def size() -> ModelSize:
    return model_size(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )


@dataclass(frozen=True)
class Job:
    """A teacher whose output is read by a student with `student_dp` data-parallel ranks."""

    config: RunConfig
    setup: ModelSetup
    student_dp: int

    @property
    def rows(self) -> int:
        return -(-ROWS // self.setup.layout.dp)

    def parts(self) -> dict[str, int]:
        """Return bytes of the teacher's output: `over`, handed over in buffers, and `copied` by a student rank."""
        student = replace(self.setup, layout=Layout(self.student_dp))
        teachers = (self.setup,) * len(self.config.teachers)
        inputs = MemoryInputs(student, teachers, Machine("cpu", None, None, 1))
        name = self.config.teachers[0].name
        parts = [part for part in estimate(self.config, inputs).memories[0].parts if name in str(part)]
        return {kind: sum(p.at(Phase.LOSS) for p in parts if p.name.endswith(kind)) for kind in ("over", "copied")}


def job_of(size: ModelSize, layout: Layout, kind: str, micro: int, buffers: int = 1, student_dp: int = 1) -> Job:
    config: RunConfig = compose(
        f"train.max_length={LENGTH}",
        f"train.global_batch_size={ROWS}",
        f"train.micro_batch_size={micro}",
        "teachers.0.dtype=float32",
        f"handoff.type={kind}",
        *([f"cluster.prefetch={buffers - 1}", "cluster.placement=separate"] if buffers > 1 else []),
    )
    return Job(config, ModelSetup(size, VOCAB, layout), student_dp)


def written(job: Job, rank: int, reader: int = 0, buffers: int = 1) -> HiddenStatesWriter | LogitsWriter:
    """Return a writer with the output of a teacher rank: all positions of its rows, and its columns."""
    layout = job.setup.layout
    width = -(-VOCAB // layout.tp)
    columns = range(rank % layout.tp * width, VOCAB)[:width]
    more = {"columns": columns, "readers": Readers((reader,), (reader,)), "num_slots": buffers}
    writer: HiddenStatesWriter | LogitsWriter
    if job.config.handoff.type == "logits":
        writer = LogitsWriter(CountingSender, VOCAB, torch.float32, **more)
        output: TensorLogits | HeadLogits = TensorLogits(torch.zeros(1, job.rows * LENGTH, len(columns)))
    else:
        writer = HiddenStatesWriter(CountingSender, VOCAB, HIDDEN, torch.float32, **more)
        output = HeadLogits(torch.zeros(1, job.rows * LENGTH, HIDDEN), Head(torch.zeros(len(columns), HIDDEN)))
    assert layout.size > rank
    for slot in range(buffers):
        writer.begin(job.rows * LENGTH, slot)
        writer.write(0, output)
    return writer


def held(senders: tuple[Sender, ...]) -> int:
    return sum(sender.last.nbytes for sender in senders if sender.allocation)


@pytest.mark.parametrize("kind", ["hidden_states", "logits"])
@pytest.mark.parametrize("layout", [Layout(1), Layout(2), Layout(1, 1, 2), Layout(1, 2, 1), Layout(2, 2, 2)], ids=str)
@pytest.mark.parametrize("buffers", [1, 2])
def test_buffers_have_the_estimated_size(size: ModelSize, layout: Layout, kind: str, buffers: int) -> None:
    """Bug: hidden states are divided by cp, although each rank hands over all positions."""
    job = job_of(size, layout, kind, micro=4, buffers=buffers)
    writer = written(job, rank=0, buffers=buffers)
    assert held(writer.senders) == job.parts()["over"]
    writer.close()


@pytest.mark.parametrize("micro", [4, 6, 12])
def test_copied_rows_have_the_estimated_size(size: ModelSize, micro: int) -> None:
    """Rows are copied if a microbatch spans two of the three teacher ranks, which have 8 rows each. Bug: all rows."""
    job = job_of(size, Layout(3), "hidden_states", micro, student_dp=2)
    sides = LayoutPair(Layout(2), Layout(3), filled(2, 8), filled(3, 8))
    writers = [written(job, rank, reader=rank // 2) for rank in range(3)]
    # Both student ranks read the middle writer.
    writers[1].close()
    writers[1] = HiddenStatesWriter(
        CountingSender, VOCAB, HIDDEN, torch.float32, columns=range(VOCAB), readers=Readers((0, 1), (0, 1))
    )
    writers[1].begin(8 * LENGTH)
    writers[1].write(0, HeadLogits(torch.zeros(1, 8 * LENGTH, HIDDEN), Head(torch.zeros(VOCAB, HIDDEN))))
    most = 0
    for rank, window in enumerate(windows([writer.handle() for writer in writers], sides, [LENGTH] * ROWS)):
        receiver = CountingReceiver(rank)
        for start in range(0, ROWS // 2, micro):
            copied_bytes = receiver.copied_bytes
            window.hidden.read(receiver, slice(start, start + micro))
            most = max(most, receiver.copied_bytes - copied_bytes)
    assert most == (job.parts()["copied"] if 8 % micro else 0)
    for writer in writers:
        writer.close()


def test_output_in_main_memory_is_not_on_the_gpu(size: ModelSize) -> None:
    """Bug: buffers in main memory count for the GPU, which has only copies of them."""
    job = job_of(size, Layout(1), "hidden_states", micro=4)
    setup = job.setup
    machine = Machine("cuda", 2**30, 2**30, 1)
    near, far = (
        estimate(
            job.config, MemoryInputs(setup, (setup,) * len(job.config.teachers), machine, through_host=through_host)
        )
        for through_host in (False, True)
    )
    positions, teachers = job.config.train.longest_at_a_time(1) * LENGTH, len(job.config.teachers)
    buffers, copies = teachers * job.parts()["over"], teachers * 4 * HIDDEN * (positions + VOCAB)
    device, host = (far.memories[i].total(Phase.LOSS) - near.memories[i].total(Phase.LOSS) for i in range(2))
    assert (device, host) == (copies - buffers, buffers)
