"""Machines, devices and processes."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nemo_opd.config.base import Settings


class EvaluationCluster(Settings):
    """Machines and processes of an evaluation."""

    launcher: Literal["ray", "local"] = "local"
    """local: no Ray; this process is the only rank, or those that torchrun has started on this machine are the ranks.
    ray: a process for each rank.
    """
    num_nodes: int = Field(1, ge=1)
    """launcher=ray: more than one, of the running Ray cluster that `address` names."""
    gpus_per_node: int | None = Field(None, ge=1)
    """GPUs used on each node; by default all of them with Ray, and one for each process without."""
    cpu_ranks: int = Field(1, ge=1)
    """On CPU, the ranks on all nodes together."""
    address: str | None = None
    """launcher=ray: a running Ray cluster (`auto`, `host:port`); a local one is started and stopped when not given."""
    timeout_s: float = Field(1800, gt=0)
    """Longest wait for what any process does: load its model, answer questions."""

    @model_validator(mode="after")
    def settings_are_those_of_a_run(self) -> Self:
        self.on("auto")
        return self

    def on(self, device: Literal["auto", "cuda", "cpu"]) -> "Cluster":
        """Return the same as settings of a run."""
        return Cluster(device=device, **self.model_dump())


class Cluster(Settings):
    """Machines, devices and processes."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cuda where a GPU is visible."""
    launcher: Literal["ray", "local"] = "ray"
    """ray: a process for each rank of the student and of each teacher. local: no Ray; this process is the one rank of
    them all, or those that torchrun has started on this machine are, and rank 0 drives the run as well.
    """
    num_nodes: int = Field(1, ge=1)
    """More than one: of the running Ray cluster that `address` names."""
    gpus_per_node: int | None = Field(None, ge=1)
    """GPUs used on each node; all of them when not given."""
    cpu_ranks: int = Field(1, ge=1)
    """On CPU, the ranks of the student and of each teacher, on all nodes together."""
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated: student and teachers take turns on the same devices, each with a rank on every one. separate: every
    teacher has separate devices, so that it can read the next batch while the student trains; but one with the
    student's weights is always in the student's processes, and reads a batch after the update before it.
    """
    teacher_ranks: Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """placement=separate: the ranks of each teacher on all nodes together, as one number for all teachers or one for
    each that has separate devices, in their order. A rank is a GPU, and the student has those that are left; when not
    given, the GPUs of a node are shared equally, and the student has what is over as well. On CPU a rank is a process
    in addition to those of the student; as many as `cpu_ranks` for each teacher when not given.
    """
    prefetch: int = Field(1, ge=0)
    """placement=separate, off-policy: batches that the teachers read ahead of the student. Each needs room for one more
    batch of their output; more than one helps where teachers need more time for some batches than for others.
    """
    address: str | None = None
    """A running Ray cluster (`auto`, `host:port`); a local one is started and stopped when not given."""
    timeout_s: float = Field(1800, gt=0)
    """Longest wait for what any process does: load its model, read a batch, take a step, write a checkpoint. Also the
    limit of a collective between the processes of a group.
    """

    @model_validator(mode="after")
    def several_groups_of_processes_need_ray(self) -> Self:
        reasons = {
            f"num_nodes={self.num_nodes}": self.num_nodes > 1 and "processes on several nodes",
            f"address={self.address}": self.address is not None and "a Ray cluster",
            "placement=separate": self.placement == "separate" and "processes of their own for the teachers",
        }
        for setting, needed in reasons.items():
            if self.launcher == "local" and needed:
                raise ValueError(
                    f"{setting}: that needs {needed}, and with cluster.launcher=local student and teachers share their "
                    "processes on this machine; write cluster.launcher=ray, or leave "
                    f"cluster.{setting.partition('=')[0]} out"
                )
        return self

    @model_validator(mode="after")
    def teacher_ranks_need_devices_of_their_own(self) -> Self:
        if self.teacher_ranks is not None and self.placement == "colocated":
            raise ValueError(
                f"teacher_ranks={self.teacher_ranks}: with cluster.placement=colocated every teacher has a "
                "rank on each of the student's devices; write cluster.placement=separate, or leave the key out"
            )
        return self
