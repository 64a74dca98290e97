"""The student on one data-parallel rank."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from nemo_opd.aggregation import TERMS, Divisor, TermName, build_objective
from nemo_opd.checkpoint.manager import STATE, STUDENT
from nemo_opd.checkpoint.state import BackgroundWriter, load_state, read_state, save_state
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.collectives import gathered
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.process_group import build_mesh, fsdp_axis
from nemo_opd.distributed.transfer import to_device
from nemo_opd.evaluation import likelihoods
from nemo_opd.evaluation.validation import TokenLosses, joined_losses
from nemo_opd.handoff.buffer import Handle
from nemo_opd.handoff.link import StudentLinks
from nemo_opd.handoff.outputs import Window
from nemo_opd.handoff.shared_memory import FileDescriptor
from nemo_opd.handoff.transport import TRANSPORTS
from nemo_opd.kernels.launch import compiling
from nemo_opd.logging.metrics import merge
from nemo_opd.logits import blockwise
from nemo_opd.logits.planned import PlannedLoss, UnitLossRecorder, compute_together
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.sources import Packing
from nemo_opd.losses.logit_metrics import AccuracyRecorder, plan_bits_per_byte
from nemo_opd.models.causal_model import reading_model
from nemo_opd.models.parallelize import free_gathered, sharded_units
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.rollout.engine_interface import BatchLimit, Completion, Request, Sampling
from nemo_opd.rotary import RotaryLimit
from nemo_opd.types import Batch, Last, Max, Metric, Normalizers, Sum, TokenRows
from nemo_opd.workers.average import OwnTeachers
from nemo_opd.workers.frozen import WorkerSampler
from nemo_opd.workers.offload import DeviceOffload
from nemo_opd.workers.optimizer import add_gradients, build_optimizer, build_scheduler, gradient_metrics, take_gradients
from nemo_opd.workers.out_of_memory import (
    ARRIVALS,
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    ROLLOUT,
    needs_memory,
    peak_memory_gb,
)
from nemo_opd.workers.step import (
    IS_TAKEN,
    POSITIONS,
    Phases,
    StudentStep,
    is_finite_everywhere,
    objective_terms,
    with_numbers,
)
from nemo_opd.workers.student_model import Exports, LearnedProjections, load_student


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """Consecutive rows of a step."""

    batch: Batch
    packing: Packing
    """Packing of the student's sequences."""
    teacher_logits: list[LogitRows]
    """Logits of each teacher [b, T, W], read from its buffers."""
    divisors: tuple[Divisor, ...]
    """Divisors of these rows, one per part of KD."""

    @property
    def plan_arguments(self) -> tuple[list[LogitRows], Batch, tuple[Divisor, ...]]:
        """Arguments of `TrainingObjective.plan` after the student's logits."""
        return self.teacher_logits, self.batch, self.divisors


class StudentWorker:
    """Worker that trains the student on this rank's rows with the teachers' output.

    Communicates over the student's group: FSDP2's all-gathers and reduce-scatters, one all-reduce for the gradient
    norm, one for the finiteness of the step, and the collectives of checkpoints. Output of teachers on other nodes
    arrives over separate links.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        projections: Sequence[ProjectionMatrix | None],
        total_steps: int,
        vocab_size: int,
        teacher_vocab_sizes: Sequence[int],
        device: str,
        transport: str,
        block_bytes: int,
        empties_cache: bool = False,
        end_ids: Collection[int] = (),
        own_teachers: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Load the model. Vocabulary sizes are tokenizer sizes. Raises ModelError and ClusterError.

        projections: None for a teacher with the student's tokenizer. block_bytes: memory budget of a block of logits,
        the same on all ranks. empties_cache: release cached device memory after use. end_ids: tokens
        that end a sampled sequence. own_teachers: see `OwnTeachers`.
        """
        self.config = config
        self.learned = LearnedProjections(config, projections, device)
        self.objective = build_objective(
            config, self.learned.projections, student_vocab_size=vocab_size, teacher_vocab_sizes=teacher_vocab_sizes
        )
        self.vocab_size = vocab_size
        self.device = device
        self.phases = Phases(device)
        self.mesh = mesh = build_mesh(Layout.of(dist.get_world_size(), config.student.parallelism), device)
        self.averaged_over = fsdp_axis(mesh).size()
        self.model, adapters = load_student(config.student, mesh, device=device, seed=config.run.seed)
        parallelism = config.student.parallelism
        self.logit_rows = reading_model(
            self.model, config.handoff.type, key="student.model", mesh=mesh, parallelism=parallelism
        )
        self.logit_rows.block_bytes = block_bytes
        self.exports = Exports(config.student, self.model, adapters)
        self.optimizer = build_optimizer(config.student.optimizer, self.model)
        self._residence = DeviceOffload(
            self.model,
            device,
            offload=config.student.offload is True,
            empties_cache=empties_cache,
            optimizer=self.optimizer,
        )
        self.scheduler = build_scheduler(config.student.scheduler, self.optimizer, total_steps)
        self.background = BackgroundWriter()
        self.end_ids = end_ids
        self._sampler = WorkerSampler(
            config.student,
            self.model,
            mesh,
            key="student",
            vocab_size=vocab_size,
            device=device,
            rounds_logits=config.handoff.type == "logits",
        )
        self.own_teachers = OwnTeachers(own_teachers or {}, self.model, mesh, self.logit_rows, self._residence)
        self.receiver = TRANSPORTS[transport][1](dist.get_rank())
        self.links = StudentLinks(self.receiver, device)

    def reading_form(self) -> tuple[bool, RotaryLimit | None]:
        """Return whether the model reads packed sequences, so that padding is free, and its rotary factors' limit."""
        return self.logit_rows.reads_packed, self.logit_rows.rotary

    def train_step(self, step: StudentStep) -> dict[str, Metric]:
        """Run one optimizer step and return this rank's share of the metrics.

        If loss or gradient is not finite on any rank, no rank changes anything, and IS_TAKEN is 0.
        """
        self.phases.begin()
        with self._residence.use(optimizer=True):
            return self._train_step(step)

    def _train_step(self, step: StudentStep) -> dict[str, Metric]:
        self.model.train()
        metrics = self._compared_gradients(step) if step.compare_gradients else self._gradient(step, TERMS)
        with self.phases("optimizer"), needs_memory(OPTIMIZER):
            limit = math.inf if self.config.train.gradient_clip is None else self.config.train.gradient_clip
            grad_norm = gathered(clip_grad_norm_(self.model.parameters(), limit))
            projection_norms = self.learned.sum_gradients(self.averaged_over)
            is_taken = is_finite_everywhere(objective_terms(self.config, metrics), grad_norm, *projection_norms)
        metrics["grad_norm"] = Last(grad_norm)
        metrics["lr"] = Last(self.scheduler.get_last_lr()[0])
        metrics["student_tokens"] = Sum(int(step.batch.student.lengths.sum()))
        metrics[IS_TAKEN] = Last(is_taken)
        metrics |= self.learned.metrics()
        # The host waits for the device here, once per step. IS_TAKEN is the same on all ranks.
        metrics = with_numbers(metrics)
        with self.phases("optimizer"), needs_memory(OPTIMIZER):
            if metrics[IS_TAKEN].value():
                self.optimizer.step()
                self.learned.update(float(self.scheduler.get_last_lr()[0]))
                self.scheduler.step()
                self.own_teachers.update()
            self.optimizer.zero_grad(set_to_none=True)
            self.learned.zero_grad()
        metrics["peak_memory_gb"] = Max(peak_memory_gb(self.device))
        return metrics | self.phases.take()

    def _compared_gradients(self, step: StudentStep) -> dict[str, Metric]:
        """Compute the weighted KD and CE gradients separately, then add them. Metrics include their comparison."""
        metrics = self._gradient(step, ("kd",))
        kd = take_gradients(self.model)
        metrics |= self._gradient(step, ("ce",))
        ce = [parameter.grad for parameter in self.model.parameters()]
        metrics |= gradient_metrics(kd, ce)
        add_gradients(self.model, kd)
        return metrics

    def _gradient(self, step: StudentStep, terms: Sequence[TermName]) -> dict[str, Metric]:
        """Accumulate the gradient of these terms over all microbatches and return their metrics."""
        metrics, last = [], len(step.micro_batches) - 1
        for i, micro in enumerate(self._micro_batches(step)):
            self._communicate_gradients(is_last=i == last)
            metrics.append(self._accumulate(micro, step, terms))
        return merge(metrics)

    def _communicate_gradients(self, *, is_last: bool) -> None:
        """Set whether the next backward pass reduces gradients and frees gathered parameters or defers both.

        Model replicas are all-reduced only in the last pass; until then each rank accumulates its shard.
        """
        for outermost in sharded_units(self.model)[:1]:  # empty without FSDP2
            outermost.set_is_last_backward(is_last)
            outermost.set_requires_gradient_sync(is_last or self.config.student.sync_each_micro_batch is not False)
            outermost.set_requires_all_reduce(is_last)
            outermost.set_reshard_after_backward(is_last or self.config.student.parallelism.frees_gathered)

    def _accumulate(self, micro: _MicroBatch, step: StudentStep, terms: Sequence[TermName]) -> dict[str, Metric]:
        with self.phases("forward"), needs_memory(FORWARD):
            output = self.logit_rows(micro.batch.student.ids, micro.packing)
        with self.phases("loss"), needs_memory(LOSS), compiling(self.config.train.compile_losses):
            # The losses' backward pass ends at a leaf; the model's runs once, from the sum of their gradients.
            leaf = output.cut_off()
            logits = self.logit_rows.whole(leaf, micro.packing)
            losses = self.objective.plan(
                logits, *micro.plan_arguments, step.normalizers, kd_scale=step.kd_scale, terms=terms
            )
            if "kd" in terms:
                losses += self._statistics(logits, micro)
            # FSDP2 averages gradients over ranks, but the objective is a sum over them (methods.md §7.2).
            result = compute_together([loss.times(self.averaged_over) for loss in losses])
            blockwise.backward(result.loss)
        with self.phases("backward"), needs_memory(BACKWARD):
            gradient = leaf.leaves[0].grad
            assert gradient is not None
            self.logit_rows.backward(output, gradient, micro.packing)
        return result.metrics | {POSITIONS: Sum(self.logit_rows.num_positions(micro.packing))}

    def _statistics(self, logits: LogitRows, micro: _MicroBatch) -> list[PlannedLoss]:
        return self.objective.plan_statistics(logits, micro.teacher_logits, micro.batch)

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, version: int, limit: BatchLimit
    ) -> list[Completion]:
        """Continue each prompt with the current weights; return completions, labelled `version`, in request order.

        All ranks of a tensor-parallel group must get the same requests.
        """
        with needs_memory(ROLLOUT), self._residence.use():
            return self._sampler(requests, sampling, self.end_ids, limit, version)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Have the weights on the device in the block, and free gathered copies after it."""
        self.model.eval()
        with self._residence.use():
            yield
            free_gathered(self.model)

    @torch.no_grad()
    def likelihoods(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> Tensor:
        """Return each sequence's likelihood of its scored tokens, as `nemo_opd.evaluation.likelihoods.read` does."""
        with needs_memory(FORWARD), self._evaluating():
            return likelihoods.read(self.logit_rows, tokens, micro_batches, self.device)

    @torch.no_grad()
    def continue_greedily(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> Tensor:
        """Return sequences' likeliest continuations (see `nemo_opd.evaluation.likelihoods.continue_greedily`)."""
        with needs_memory(FORWARD), self._evaluating():
            size = self.vocab_size
            return likelihoods.continue_greedily(self.logit_rows, tokens, micro_batches, self.device, vocab_size=size)

    @torch.no_grad()
    def evaluate(
        self, batch: Batch, windows: tuple[Window, ...], micro_batches: tuple[slice, ...]
    ) -> tuple[dict[str, Metric], TokenLosses]:
        """Return training metrics without an update, the student's bits per byte and accuracy, and losses per token."""
        step = StudentStep(batch, windows, Normalizers(1, (1,) * len(self.objective.parts)), micro_batches, 1.0)
        parts: list[dict[str, Metric]] = []
        tokens: list[TokenLosses] = []
        with self._evaluating(), compiling(self.config.train.compile_losses):
            for micro in self._micro_batches(step):
                output = self.logit_rows(micro.batch.student.ids, micro.packing)
                logits = self.logit_rows.whole(output, micro.packing)
                student, size = micro.batch.student, self.vocab_size
                terms = self.objective.plan(logits, *micro.plan_arguments, step.normalizers)
                number = 1 + len(self.objective.parts)  # cross-entropy, then the parts of KD
                recordings = [UnitLossRecorder.of(plan) for plan in terms[:number]]
                accuracy = AccuracyRecorder.of(logits, student, vocab_size=size)
                statistics = self._statistics(logits, micro)
                planned = [
                    *(recording.plan for recording in recordings),
                    *terms[number:],
                    *(statistics or self.objective.plan_overlaps(logits, micro.teacher_logits, micro.batch)),
                    plan_bits_per_byte(logits, student, vocab_size=size),
                    accuracy.plan,
                ]
                parts.append(compute_together(planned).metrics)
                tokens.append(TokenLosses.of(recordings, accuracy))
        return with_numbers(merge(parts)), joined_losses(tokens)

    def _micro_batches(self, step: StudentStep) -> Iterator[_MicroBatch]:
        for sequences in step.micro_batches:
            batch = step.batch.rows(sequences.start, sequences.stop)
            with self.phases("handoff"):
                teacher_logits = [
                    window.rows(self.receiver, sequences, *rows.logit_positions(batch.student))
                    for window, rows in zip(step.windows, batch.teachers, strict=True)
                ]
            # Packing and divisors are computed on the host, without waiting for the device.
            packing = Packing.of(batch.student).to(self.device)
            yield _MicroBatch(to_device(batch, self.device), packing, teacher_logits, self.objective.divisors(batch))

    def save(self, folder: Path, in_background: bool = False) -> None:
        """Write `folder/state` (sharded, for resuming) and `folder/student` (Hugging Face format).

        in_background: write the state in the background; `background.end` waits. Raises NotFiniteError for a value that
        is not finite, on all ranks or only on the rank that merges adapters.
        """
        with self._residence.use(optimizer=True), self.own_teachers.state() as averages:
            read_from = self.model, self.optimizer, self.scheduler, averages
            if in_background:
                self.background.begin(folder / STATE, read_state(*read_from))
            else:
                save_state(folder / STATE, *read_from)
        self.learned.save(folder / STATE)
        self.export(folder / STUDENT)

    def load(self, folder: Path) -> None:
        """Restore a saved checkpoint. Raises CheckpointError."""
        with self._residence.use(optimizer=True), self.own_teachers.state() as averages:
            tp = self.config.student.parallelism.tp
            load_state(folder / STATE, self.model, self.optimizer, self.scheduler, averages, tp=tp)
        self.learned.load(folder / STATE)

    def export(self, folder: Path, served_as: str | None = None, average_of: int | None = None) -> None:
        """Call `Exports.write`, and write the learned projections unless `served_as` is set.

        average_of: index of a teacher whose average is written instead of the student's weights.
        """
        with self._residence.use(), self.own_teachers.averaged(average_of):
            self.exports.write(folder, served_as)
        if served_as is None:
            self.learned.export(folder)

    def hold_weights(self, served_as: str) -> FileDescriptor | None:
        """Call `Exports.hold`; `Exports.release` frees the copy."""
        with self._residence.use():
            return self.exports.hold(served_as)

    def receive(self, by_teacher: Sequence[Sequence[Handle]]) -> None:
        """Receive messages from teacher ranks on other nodes, one list per teacher; windows then read them."""
        with needs_memory(ARRIVALS):
            self.links.receive(by_teacher)

    def close(self) -> None:
        """Wait for a checkpoint, release held weights, and unmap the teachers' buffers, so that they can be freed."""
        self.background.close()
        self.exports.release()
        self.links.close()
        self.receiver.close()
        self.own_teachers.close()
