"""From counts to milliseconds: the arithmetic of the roofline. Nothing is measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from roofline_hardware import GPU, Assumptions
from roofline_work import Counts, Kind


@dataclass(frozen=True)
class Machine:
    """Equal GPUs of one node."""

    gpu: GPU
    number: int
    assumed: Assumptions = field(default_factory=Assumptions)

    def kernel_s(self, kind: Kind) -> float:
        """Return the time of a kernel: that of its bytes, of its FLOPs, or of the shortest kernel."""
        assumed = self.assumed
        share = assumed.attention if kind.name == "attention" else assumed.products
        of_flops = kind.flops / (share * self.gpu.flops)
        return max(self.bytes_s(kind.num_bytes), of_flops, assumed.shortest_kernel_s)

    def bytes_s(self, num_bytes: float) -> float:
        """Return the time to read and write so many bytes of memory."""
        return num_bytes / (self.assumed.traffic * self.gpu.memory)

    def device_s(self, counts: Counts) -> float:
        return sum(number * self.kernel_s(kind) for kind, number in counts.kernels.items())

    def host_s(self, counts: Counts) -> float:
        """Return the time of the host to ask for it all."""
        assumed = self.assumed
        calls = {"compiled": assumed.compiled_call_s, "triton": assumed.triton_call_s}
        launches = sum(number * calls.get(kind.name, assumed.launch_s) for kind, number in counts.kernels.items())
        return launches + counts.copies * assumed.copy_s

    def exchange_s(self, num_bytes: float, calls: int, ranks: int) -> float:
        """Return the time of all-gathers or reduce-scatters that make, or take, so many bytes on each of some ranks."""
        if ranks == 1:
            return 0.0
        share = (ranks - 1) / ranks
        return share * num_bytes / (self.assumed.links * self.gpu.peer) + calls * self.assumed.collective_s


@dataclass(frozen=True)
class Weights:
    """Parameters of a model, and the units in which FSDP2 gathers them."""

    layers: int
    """Parameters of all layers."""
    rest: int
    units: int

    @property
    def all(self) -> int:
        return self.layers + self.rest


@dataclass(frozen=True)
class Plan:
    """What a step consists of, on each GPU."""

    student: Weights
    teachers: Mapping[str, Weights]
    """Of the weights that a tensor-parallel rank has."""
    parts: Mapping[str, Counts]
    """Of a microbatch."""
    micro_batches: int
    """Of the student."""
    teacher_micro_batches: int
    tp: int = 1
    """Ranks that share a teacher."""
    reduced_bytes: int = 0
    """That each rank of a tensor-parallel teacher sums over its group for a microbatch."""
    reductions: int = 0
    keeps_student: bool = False
    """Weights are gathered, and gradients reduced, once a step."""
    kept_teachers: tuple[str, ...] = ()
    """Teachers whose weights are gathered once a run."""


@dataclass
class Times:
    """Seconds of a step by part. `launches` and `waits` are what they add to the work of the GPU."""

    parts: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_times(plan: Plan, machine: Machine) -> Times:
    """Add up a step: parts follow one another; within one, the longer of the host's launches and the GPU's work.

    Collectives of FSDP2 run beside the pass that they serve: what counts of them is what is longer than that.
    """
    times = Times()
    for name, counts in plan.parts.items():
        number = plan.teacher_micro_batches if name.startswith("teacher ") else plan.micro_batches
        device, host = machine.device_s(counts), machine.host_s(counts)
        part = "teachers" if name.startswith("teacher ") else name
        times.add(part, number * device)
        times.add("launches", number * max(0.0, host - device))
        times.add("waits", number * counts.waits * machine.assumed.wait_s)
    for name, weights in plan.teachers.items():
        if name not in plan.kept_teachers:
            _gather_teacher(times, plan, weights, machine)
    _move_student(times, plan, machine)
    if plan.tp > 1:
        each = 2 * machine.exchange_s(plan.reduced_bytes, plan.reductions, plan.tp)
        times.add("communication", plan.teacher_micro_batches * each)
    _optimize(times, plan, machine)
    return times


def _gather_teacher(times: Times, plan: Plan, weights: Weights, machine: Machine) -> None:
    """FSDP2 gathers bf16 weights for each microbatch, and copies them into and out of what is gathered."""
    ranks = machine.number // plan.tp
    sent = machine.exchange_s(2 * weights.all, weights.units, ranks)
    own = sum(map(machine.device_s, (c for name, c in plan.parts.items() if name.startswith("teacher "))))
    own /= len(plan.teachers)
    copied = machine.bytes_s(4 * _copied(weights.all, ranks))
    times.add("copies of FSDP2", plan.teacher_micro_batches * copied)
    times.add("communication", plan.teacher_micro_batches * max(0.0, sent - own))


def _copied(gathered: float, ranks: int) -> float:
    """Return how many numbers FSDP2 copies to gather so many: into its buffer, and out; alone just once."""
    return gathered if ranks == 1 else gathered / ranks + gathered


def _move_student(times: Times, plan: Plan, machine: Machine) -> None:
    """FSDP2 casts fp32 weights to bf16 and gathers them; gradients it reduces and adds up in fp32."""
    weights, ranks = plan.student, machine.number
    gathered = 2 * weights.layers + weights.rest
    gathers = 1 if plan.keeps_student else plan.micro_batches
    gathered = weights.all if plan.keeps_student else gathered
    copied = machine.bytes_s(6 * gathered / ranks + 4 * _copied(gathered, ranks))
    reduced = machine.bytes_s((2 + 4) * weights.all + 12 * weights.all / ranks)
    times.add("copies of FSDP2", gathers * (copied + reduced))
    if plan.keeps_student:  # gradients of microbatches are added up in fp32
        times.add("copies of FSDP2", (plan.micro_batches - 1) * machine.bytes_s((2 + 8) * weights.all))
    passes = machine.device_s(plan.parts["forward"]) + machine.device_s(plan.parts["backward"])
    sent = machine.exchange_s(2 * gathered, 2 * weights.units, ranks)
    sent += machine.exchange_s(4 * weights.all, weights.units, ranks)
    times.add("communication", gathers * max(0.0, sent - passes))


def _optimize(times: Times, plan: Plan, machine: Machine) -> None:
    """The gradient's norm reads it, clipping reads and writes it; fused AdamW reads four tensors and writes three."""
    own = plan.student.all / machine.number
    times.add("optimizer", machine.bytes_s((4 + 8 + 28) * own))
    times.add("waits", machine.assumed.wait_s)
