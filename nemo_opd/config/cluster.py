"""Machines, devices and processes, and the handoff of the teachers' outputs to the student."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_opd.config.settings import MayChange, Needs, Settings

_Ray = Needs("launcher", ("ray",))
_Ranks = Annotated[int, Field(ge=1)]


class Cluster(Settings):
    """Machines, devices and processes."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cuda if a GPU is visible."""
    launcher: Literal["ray", "local"] = "ray"
    """ray: a process for each rank. local: no Ray; the ranks are this process alone, or the processes that torchrun
    started. The option `cluster=local` is a file with `device: auto`, and does not change this key.
    """
    num_nodes: Annotated[int, _Ray] = Field(1, ge=1)
    """Number of nodes. More than one needs a running Ray cluster, named by `address`."""
    gpus_per_node: int | None = Field(None, ge=1)
    """GPUs used on each node; by default all."""
    cpu_ranks: int = Field(1, ge=1)
    """On CPU, the ranks of the student and of each teacher, over all nodes."""
    placement: Annotated[Literal["colocated", "separate"], _Ray] = "colocated"
    """colocated: student and teachers take turns on the same devices. separate: every teacher has its own devices and
    can read the next batch while the student trains.
    """
    teacher_ranks: Annotated[_Ranks | tuple[_Ranks, ...] | None, Needs("placement", ("separate",))] = None
    """placement=separate: the ranks of each teacher over all nodes, one number for all teachers or a list in their
    order. On GPUs the student gets the remaining GPUs; by default the GPUs of a node are shared equally. On CPU these
    processes are added to the student's; by default `cpu_ranks`.
    """
    prefetch: int = Field(1, ge=0)
    """placement=separate, off-policy: batches that the teachers read ahead of the student, each with memory for its
    output.
    """
    address: Annotated[str | None, _Ray] = None
    """A running Ray cluster (`auto`, `host:port`); by default a local one is started and stopped."""
    timeout_s: float = Field(1800, gt=0)
    """Longest wait, in seconds, for any process or collective. It covers loading the largest models from a slow disk; a
    process that dies ends the run at once.
    """


class EvaluationCluster(Settings):
    """Machines and processes of an evaluation."""

    launcher: Literal["ray", "local"] = "local"
    """local: no Ray; this process is the only rank, or the ranks are those that torchrun started on this machine. ray:
    a process for each rank.
    """
    num_nodes: Annotated[int, _Ray] = Field(1, ge=1)
    """Number of nodes. More than one needs launcher=ray and a running Ray cluster, named by `address`."""
    gpus_per_node: int | None = Field(None, ge=1)
    """GPUs used on each node; by default all with Ray, and one per process without."""
    cpu_ranks: int = Field(1, ge=1)
    """On CPU, the total ranks over all nodes."""
    address: Annotated[str | None, _Ray] = None
    """launcher=ray: a running Ray cluster (`auto`, `host:port`); by default a local one is started and stopped."""
    timeout_s: float = Field(1800, gt=0)
    """Longest wait, in seconds, for any process: loading its model, answering questions."""

    def on(self, device: Literal["auto", "cuda", "cpu"]) -> Cluster:
        """Return these settings as a run's cluster."""
        return Cluster(device=device, **self.model_dump())


class HandoffBase(Settings):
    transport: MayChange[Literal["auto", "cuda_ipc", "shared_memory"]] = "auto"
    """auto: on CPUs shared_memory; on GPUs cuda_ipc, or shared_memory with a warning if a test before the run finds
    that processes cannot read each other's GPU memory.
    """


class HiddenStatesHandoff(HandoffBase):
    """Final hidden states, and the head once; the student computes logits from them chunk by chunk."""

    type: Literal["hidden_states"] = "hidden_states"
    column_order: MayChange[Literal["student", "teacher"]] = "student"
    """Order of the rows of a head from a teacher with another tokenizer. student: by student token, so that losses read
    the teacher's logits of paired tokens from neighbouring columns. teacher: by id, as always if the head is cut by
    tensor parallelism or not handed over, with `projection_lr`, and with loss.type=function.
    """


class LogitsHandoff(HandoffBase):
    """Full-vocabulary logits: the reference, for any head."""

    type: Literal["logits"] = "logits"


Handoff = Annotated[HiddenStatesHandoff | LogitsHandoff, Field(discriminator="type")]
