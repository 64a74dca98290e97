"""The estimate of what is handed over, against the bytes of the buffers that writers make and windows put together."""

from dataclasses import dataclass, replace
from typing import Any

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
    """A teacher's ranks, and the student's on which its output is read."""

    config: RunConfig
    setup: ModelSetup
    student_dp: int

    @property
    def rows(self) -> int:
        return -(-ROWS // self.setup.layout.dp)

    def parts(self, **inputs: Any) -> dict[str, int]:
        """Return the bytes of output by name, `handed over` in buffers and `copied` by a student's rank."""
        student = replace(self.setup, layout=Layout(self.student_dp))
        teachers = (self.setup,) * len(self.config.teachers)
        around = MemoryInputs(student, teachers, Machine("cpu", None, None, 1), **inputs)
        name = self.config.teachers[0].name
        parts = [part for part in estimate(self.config, around).memories[0].parts if name in str(part)]
        return {kind: sum(p.at(Phase.LOSS) for p in parts if p.name.endswith(kind)) for kind in ("over", "copied")}


def job(size: ModelSize, layout: Layout, kind: str, micro: int, buffers: int = 1, student_dp: int = 1) -> Job:
    config: RunConfig = compose(
        f"train.max_length={LENGTH}",
        f"train.global_batch_size={ROWS}",
        f"train.micro_batch_size={micro}",
        "teachers.0.dtype=float32",
        f"handoff.type={kind}",
        *([f"cluster.prefetch={buffers - 1}", "cluster.placement=separate"] if buffers > 1 else []),
    )
    return Job(config, ModelSetup(size, VOCAB, layout), student_dp)


def columns_of(of: Job, rank: int) -> range:
    width = -(-VOCAB // of.setup.layout.tp)
    return range(rank % of.setup.layout.tp * width, VOCAB)[:width]


def written(of: Job, rank: int, reader: int = 0, buffers: int = 1) -> HiddenStatesWriter | LogitsWriter:
    """What a rank of the teacher makes of its rows, all positions of them, and its columns."""
    layout, columns = of.setup.layout, columns_of(of, rank)
    more = {"columns": columns, "readers": Readers((reader,), (reader,)), "num_slots": buffers}
    writer: HiddenStatesWriter | LogitsWriter
    if of.config.handoff.type == "logits":
        writer = LogitsWriter(CountingSender, VOCAB, torch.float32, **more)
        made: TensorLogits | HeadLogits = TensorLogits(torch.zeros(1, of.rows * LENGTH, len(columns)))
    else:
        writer = HiddenStatesWriter(CountingSender, VOCAB, HIDDEN, torch.float32, **more)
        made = HeadLogits(torch.zeros(1, of.rows * LENGTH, HIDDEN), Head(torch.zeros(len(columns), HIDDEN)))
    assert layout.size > rank
    for slot in range(buffers):
        writer.begin(of.rows * LENGTH, slot)
        writer.write(0, made)
    return writer


def held(senders: tuple[Sender, ...]) -> int:
    return sum(sender.last.nbytes for sender in senders if sender.allocation)


@pytest.mark.parametrize("kind", ["hidden_states", "logits"])
@pytest.mark.parametrize("layout", [Layout(1), Layout(2), Layout(1, 1, 2), Layout(1, 2, 1), Layout(2, 2, 2)], ids=str)
@pytest.mark.parametrize("buffers", [1, 2])
def test_buffers_are_what_is_estimated(size: ModelSize, layout: Layout, kind: str, buffers: int) -> None:
    """Bug: hidden states divided by cp, although each of its ranks hands all over."""
    of = job(size, layout, kind, micro=4, buffers=buffers)
    writer = written(of, rank=0, buffers=buffers)
    assert held(writer.senders) == of.parts()["over"]
    writer.close()


@pytest.mark.parametrize("micro", [4, 6, 12])
def test_what_is_put_together_is_what_is_estimated(size: ModelSize, micro: int) -> None:
    """Of a microbatch at most, where one teacher's rows end in its midst: 8 rows a rank of three. Bug: all rows."""
    of = job(size, Layout(3), "hidden_states", micro, student_dp=2)
    sides = LayoutPair(Layout(2), Layout(3), filled(2, 8), filled(3, 8))
    writers = [written(of, rank, reader=rank // 2) for rank in range(3)]
    # The middle one's rows are read by both.
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
            before = receiver.copied_bytes
            window.hidden.read(receiver, slice(start, start + micro))
            most = max(most, receiver.copied_bytes - before)
    assert most == (of.parts()["copied"] if 8 % micro else 0)
    for writer in writers:
        writer.close()


def test_output_in_main_memory_is_not_on_the_gpu(size: ModelSize) -> None:
    """Bug: buffers that count for a memory in which they are not; the host's is larger by them, the GPU's by copies."""
    of = job(size, Layout(1), "hidden_states", micro=4)
    setup = of.setup
    machine = Machine("cuda", 2**30, 2**30, 1)
    near, far = (
        estimate(of.config, MemoryInputs(setup, (setup,) * len(of.config.teachers), machine, through_host=through_host))
        for through_host in (False, True)
    )
    positions, teachers = of.config.train.longest_at_a_time(1) * LENGTH, len(of.config.teachers)
    buffers, copies = teachers * of.parts()["over"], teachers * 4 * HIDDEN * (positions + VOCAB)
    device, host = (far.memories[i].total(Phase.LOSS) - near.memories[i].total(Phase.LOSS) for i in range(2))
    assert (device, host) == (copies - buffers, buffers)
