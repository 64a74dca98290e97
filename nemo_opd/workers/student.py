"""The student on one data-parallel rank."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_opd.aggregation import Divisor, build_parts
from nemo_opd.checkpoint.state import load_state, save_state
from nemo_opd.config.loss import GRPOLoss
from nemo_opd.config.optim import AdamW, Scheduler
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.mesh import build_mesh, fsdp_axis
from nemo_opd.handoff.handle import Handle
from nemo_opd.handoff.link import Rendezvous, StudentLinks
from nemo_opd.handoff.shared_memory import FileDescriptor
from nemo_opd.handoff.transport import TRANSPORTS
from nemo_opd.handoff.window import Window
from nemo_opd.logging.metrics import merge
from nemo_opd.logits.planned import PlannedLoss, compute_together
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.accuracy import plan_accuracy
from nemo_opd.losses.bits_per_byte import plan_bits_per_byte
from nemo_opd.losses.cross_entropy import cross_entropy
from nemo_opd.losses.policy_gradient import grpo
from nemo_opd.models.generation import generating
from nemo_opd.models.head import Headless, WithHead
from nemo_opd.models.lora import Adapters
from nemo_opd.models.sharded_load import load_sharded
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.rollout.base import Completion, Request, Sampling
from nemo_opd.rollout.hf import Sampler
from nemo_opd.types import Batch, Last, Max, Metric, Normalizers, SampledRows, Sum
from nemo_opd.workers.exports import Exports
from nemo_opd.workers.gradients import add_gradients, compared, take_gradients
from nemo_opd.workers.memory import ARRIVALS, BACKWARD, FORWARD, LOADING_STUDENT, LOSS, OPTIMIZER, ROLLOUT, needs_memory
from nemo_opd.workers.offload import resident
from nemo_opd.workers.phases import Phases
from nemo_opd.workers.terms import IS_TAKEN, is_finite_everywhere, objective_terms


@dataclass(frozen=True, slots=True)
class StudentStep:
    """This rank's part of a global batch."""

    batch: Batch
    windows: tuple[Window, ...]
    """Per teacher: to its output for this batch."""
    normalizers: Normalizers
    kd_scale: float
    """Factor of the distillation term beside `loss.kd_weight`."""
    compare_gradients: bool = False
    """Form the KD and the CE gradient apart and say how they compare."""


Objective = Literal["kd", "ce", "policy"]
OBJECTIVES: tuple[Objective, ...] = ("kd", "ce", "policy")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a step."""

    batch: Batch
    teacher_logits: list[LogitRows]
    """Per teacher [b, T, W], read from the handed-over buffers."""
    divisors: tuple[Divisor, ...]
    """Of the parts of KD, of these rows."""


class StudentWorker:
    """Trains on this rank's rows with what the teachers' workers of the same rank handed over.

    Communicates, over the student's own group: FSDP2's all-gathers and reduce-scatters, one all-reduce for the
    gradient's norm and one for whether the step is finite, and what checkpoints need. Over links of their own: what
    teachers on other nodes send.
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
        end_ids: Collection[int] = (),
    ) -> None:
        """Vocabulary sizes are the tokenizers'; `projections` has None for a teacher with the student's tokenizer.

        end_ids: tokens that end what the student samples.
        """
        self.config = config
        self.parts = build_parts(
            config, projections, student_vocab_size=vocab_size, teacher_vocab_sizes=teacher_vocab_sizes
        )
        self.vocab_size = vocab_size
        self.device = device
        self.phases = Phases(device)
        self.offload = config.student.offload is True
        parallelism = config.student.parallelism
        self.mesh = mesh = build_mesh(Layout.of(dist.get_world_size(), parallelism.cp, parallelism.tp), device)
        self.averaged_over = fsdp_axis(mesh).size()
        compute, lora = compute_dtype(config.student.dtype, device), config.student.lora
        self.adapters = None if lora is None else Adapters(lora, config.student.model, config.run.seed)
        with needs_memory(LOADING_STUDENT):
            self.model = load_sharded(
                config.student.model,
                # What is not trained needs no more precision than it is computed in.
                torch.float32 if self.adapters is None else compute,
                mesh,
                key="student.model",
                parallelism=parallelism,
                compute_dtype=compute,
                device="cpu" if self.offload else device,
                trainable=True,
                activation_checkpointing=config.student.activation_checkpointing,
                compile_layers=config.student.compile,
                adapters=self.adapters,
            )
        self.logit_rows: Headless | WithHead
        """Ids [B, S] → this rank's part of the logits [B, S, V], of which `whole` makes what losses read."""
        if config.handoff.type == "hidden_states":
            self.logit_rows = Headless(self.model, key="student.model", mesh=mesh, parallelism=parallelism)
        else:
            self.logit_rows = WithHead(self.model, mesh=mesh, parallelism=parallelism)
        self.exports = Exports(config.student, self.model, self.adapters)
        self.optimizer = build_optimizer(config.student.optimizer, self.model)
        self.scheduler = build_scheduler(config.student.scheduler, self.optimizer, total_steps)
        self.end_ids = end_ids
        _, receiver = TRANSPORTS[transport]
        self.receiver = receiver(dist.get_rank())
        self.links = StudentLinks(self.receiver, device)

    def train_step(self, step: StudentStep) -> dict[str, Metric]:
        """One optimizer step; the metrics are this rank's share.

        Where its loss or gradient is not finite on any rank, nothing is changed on all of them: IS_TAKEN is 0.
        """
        self.phases.begin()
        with self._with_model(self.optimizer):
            return self._train_step(step)

    def _with_model(self, optimizer: torch.optim.Optimizer | None = None) -> AbstractContextManager[None]:
        gives_back = self.config.cluster.placement == "colocated"
        return resident(self.model, self.device, offload=self.offload, gives_back=gives_back, optimizer=optimizer)

    def _train_step(self, step: StudentStep) -> dict[str, Metric]:
        self.model.train()
        metrics = self._compared_gradients(step) if step.compare_gradients else self._gradient(step, OBJECTIVES)
        learning_rate = self.scheduler.get_last_lr()[0]
        with self.phases("optimizer"), needs_memory(OPTIMIZER):
            grad_norm = self._clip_gradient()
            is_taken = is_finite_everywhere(objective_terms(self.config, metrics), grad_norm)
        metrics["grad_norm"] = Last(grad_norm)
        metrics["lr"] = Last(learning_rate)
        metrics["student_tokens"] = Sum(int(step.batch.student.lengths.sum()))
        metrics[IS_TAKEN] = Last(is_taken)
        # Here the host waits for the device, once a step, and so may choose; all ranks choose the same.
        metrics = on_host(metrics)
        with self.phases("optimizer"), needs_memory(OPTIMIZER):
            if metrics[IS_TAKEN].value():
                self.optimizer.step()
                self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
        metrics["peak_memory_gb"] = Max(peak_memory_gb(self.device))
        return metrics | self.phases.take()

    def _compared_gradients(self, step: StudentStep) -> dict[str, Metric]:
        """The gradient as the sum of that of KD and that of CE, as they enter the update, and how the two compare."""
        metrics = self._gradient(step, ("kd",))
        kd = take_gradients(self.model)
        metrics |= self._gradient(step, ("ce",))
        ce = [parameter.grad for parameter in self.model.parameters()]
        metrics |= compared(kd, ce)
        add_gradients(self.model, kd)
        return metrics

    def _gradient(self, step: StudentStep, objectives: Sequence[Objective]) -> dict[str, Metric]:
        """Form the gradient of these objectives over all microbatches; their metrics."""
        return merge(self._accumulate(micro, step, objectives) for micro in self._micro_batches(step))

    def _accumulate(self, micro: MicroBatch, step: StudentStep, objectives: Sequence[Objective]) -> dict[str, Metric]:
        with self.phases("forward"), needs_memory(FORWARD):
            made = self.logit_rows(micro.batch.student.ids)
        with self.phases("loss"), needs_memory(LOSS):
            # The losses go backward to a leaf: the model's own backward pass runs once, from their sum.
            leaf = made.cut_off()
            losses = self._losses(self.logit_rows.whole(leaf), micro, step, objectives)
            output = compute_together(losses)
            # FSDP2 averages gradients over ranks; the objective is a sum over them (methods.md §7.2).
            (output.loss * self.averaged_over).backward()
        with self.phases("backward"), needs_memory(BACKWARD):
            gradient = leaf.leaves[0].grad
            assert gradient is not None
            self.logit_rows.backward(made, gradient)
        return output.metrics

    def _losses(
        self, logits: LogitRows, micro: MicroBatch, step: StudentStep, objectives: Iterable[Objective]
    ) -> list[PlannedLoss]:
        """What is added up to these objectives, weights and all."""
        weights, batch = self.config.loss, micro.batch
        losses = []
        if "ce" in objectives:
            ce = cross_entropy.plan(
                logits,
                batch.student.ids,
                mask=batch.label_mask,
                normalizer=step.normalizers.ce,
                vocab_size=self.vocab_size,
            )
            losses.append(ce.times(weights.ce_weight))
        if "kd" in objectives:
            parts = self.parts.plan(logits, micro.teacher_logits, batch, micro.divisors, step.normalizers.kd)
            losses += [part.times(weights.kd_weight * step.kd_scale) for part in parts]
            losses += self.parts.plan_statistics(logits, micro.teacher_logits, batch, vocab_size=self.vocab_size)
        if "policy" in objectives and batch.sampled is not None and isinstance(weights, GRPOLoss):
            losses.append(self._policy(logits, batch, batch.sampled, weights, step.normalizers.policy))
        return losses

    def _policy(
        self, logits: LogitRows, batch: Batch, sampled: SampledRows, settings: GRPOLoss, normalizer: int
    ) -> PlannedLoss:
        """Plan what is learned from rewards."""
        policy = grpo.plan(
            logits,
            ids=batch.student.ids,
            mask=batch.sampled_mask,
            logprobs=sampled.logprobs,
            behaviour_logprobs=sampled.behaviour_logprobs,
            advantages=sampled.advantages,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            importance_level=settings.importance_level,
            importance_cap=settings.importance_cap,
            importance_veto=settings.importance_veto,
            normalizer=normalizer,
            vocab_size=self.vocab_size,
        )
        return policy.times(settings.policy_weight)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Completion]:
        """Continue each prompt with the model as it is, of `version`; in order.

        Ranks of a tensor-parallel group must be given the same requests. Communicates as `generating` does.
        """
        rollout = self.config.rollout
        assert isinstance(rollout, HFRollout)
        sampler = Sampler(
            self.model,
            end_ids=self.end_ids,
            vocab_size=self.vocab_size,
            batch_size=rollout.batch_size,
            device=self.device,
        )
        ready = generating(self.model, self.mesh, rounds_logits=self.config.handoff.type == "logits")
        with needs_memory(ROLLOUT), self._with_model(), ready:
            return sampler.generate(requests, sampling, version)

    @torch.no_grad()
    def evaluate(self, batch: Batch, windows: tuple[Window, ...]) -> dict[str, Metric]:
        """The same terms as in training, without an update; the student's bits per byte and accuracy."""
        self.model.eval()
        step = StudentStep(batch, windows, Normalizers(1, (1,) * len(self.parts.parts)), 1.0)
        parts: list[dict[str, Metric]] = []
        with self._with_model():
            for micro in self._micro_batches(step):
                logits = self.logit_rows.whole(self.logit_rows(micro.batch.student.ids))
                own, size = micro.batch.student, self.vocab_size
                asked = [
                    *self._losses(logits, micro, step, OBJECTIVES),
                    plan_bits_per_byte(logits, own, vocab_size=size),
                    plan_accuracy(logits, own, vocab_size=size),
                ]
                parts.append(compute_together(asked).metrics)
        return on_host(merge(parts))

    def _micro_batches(self, step: StudentStep) -> Iterator[MicroBatch]:
        size = self.config.train.micro_batch_size
        for start in range(0, len(step.batch), size):
            batch = step.batch.rows(start, start + size)
            with self.phases("handoff"):
                teacher_logits = [
                    window.rows(self.receiver, slice(start, start + size), rows.tokens.ids.shape[1])
                    for window, rows in zip(step.windows, batch.teachers, strict=True)
                ]
            # Counted on the host, where it waits for nothing.
            yield MicroBatch(batch.to(self.device), teacher_logits, self.parts.divisors(batch))

    def _clip_gradient(self) -> Tensor:
        limit = self.config.train.gradient_clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if limit is None else limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def save(self, folder: Path) -> None:
        """Write `folder/state` (sharded, for resuming) and `folder/student` (Hugging Face form).

        Raises NotFiniteError where either would not be finite: on all ranks, or on the one that merges adapters.
        """
        with self._with_model(self.optimizer):
            save_state(folder / "state", self.model, self.optimizer, self.scheduler)
        self.export(folder / "student")

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote. Raises CheckpointError."""
        with self._with_model(self.optimizer):
            load_state(folder / "state", self.model, self.optimizer, self.scheduler)

    def export(self, folder: Path, served_as: str | None = None) -> None:
        """`Exports.write`."""
        with self._with_model():
            self.exports.write(folder, served_as)

    def hold_weights(self, served_as: str) -> FileDescriptor | None:
        """`Exports.hold`, until `release_weights`."""
        with self._with_model():
            return self.exports.hold(served_as)

    def release_weights(self) -> None:
        self.exports.release()

    def join_links(self, rendezvous: Sequence[Rendezvous | None]) -> None:
        """Join the link to each teacher; None: all that is read of it can be mapped. Every rank must call it."""
        self.links.join(rendezvous)

    def receive(self, by_teacher: Sequence[Sequence[Handle]]) -> None:
        """Receive the messages of each teacher's ranks on other nodes, to be read through windows afterwards."""
        with needs_memory(ARRIVALS):
            self.links.receive(by_teacher)

    def close(self) -> None:
        """Drop the mappings of teachers' buffers, so that their owners can free them, and what it holds itself."""
        self.exports.release()
        self.links.close()
        self.receiver.close()


def compute_dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def build_optimizer(settings: AdamW, model: nn.Module) -> torch.optim.AdamW:
    """Build AdamW over the trainable parameters."""
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def build_scheduler(
    settings: Scheduler, optimizer: torch.optim.Optimizer, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    # Here, since transformers imports all that it can train with along with it.
    from transformers import get_scheduler

    warmup, kind = settings.warmup_steps, settings.type
    if kind == "cosine":
        specific = {"min_lr_rate": settings.min_lr_ratio}
        return get_scheduler("cosine_with_min_lr", optimizer, warmup, total_steps, scheduler_specific_kwargs=specific)
    return get_scheduler("constant_with_warmup" if kind == "constant" else kind, optimizer, warmup, total_steps)


def peak_memory_gb(device: str) -> float:
    """Most memory held since the last call: of the GPU where there is one, else of the process."""
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return peak
    return psutil.Process().memory_info().rss / 2**30


def on_host(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """The same metrics as plain numbers, which can leave the process."""

    def numbers(metric: Metric) -> Metric:
        return type(metric)(**{field.name: float(getattr(metric, field.name)) for field in fields(metric)})

    return {name: numbers(metric) for name, metric in metrics.items()}
