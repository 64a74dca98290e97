"""TRL's and Liger-Kernel's losses next to ours, where they are installed and run on the device."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import torch
from losses_cases import Case, Loss, Text
from losses_two_heads import Heads, HeadsLoss
from torch import Tensor

from nemo_opd import losses

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
BETAS = {"jsd": 0.5, "forward_kl": 0.0, "reverse_kl": 1.0}
"""The generalised JSD has both KLs at its ends, in TRL, Liger and here alike."""


@dataclass(frozen=True)
class Rivals:
    """What can be compared, and what cannot with the reason."""

    of_logits: list[tuple[str, Case]]
    """(package, ours and theirs), on logits of one vocabulary."""
    of_text: list[tuple[str, Case]]
    """On logits of two."""
    of_heads: dict[str, HeadsLoss]
    """By package, from hidden states."""
    absent: dict[str, str]
    """By what is missing, why."""

    @property
    def has_trl(self) -> bool:
        return "trl" not in self.absent


def find(mask: Tensor, device: torch.device) -> Rivals:
    """mask [B, S] scores every token but the first, of which TRL and Liger know nothing."""
    found = Rivals([], [], {}, {})
    for package, add in (("trl", _add_trl), ("liger-kernel", _add_liger)):
        try:
            add(found, f"{package} {version(package)}", mask, device)
        except PackageNotFoundError:
            found.absent[package] = "not installed; add it with `uv run --with trl --with liger-kernel`"
        except (ImportError, RuntimeError) as error:
            found.absent[package] = f"{version(package)} does not import what is compared: {error}"
    return found


def _add_trl(found: Rivals, name: str, mask: Tensor, device: torch.device) -> None:
    from trl.experimental.gkd import GKDTrainer
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def theirs(beta: float) -> Loss:
        def loss(student: Tensor, teacher: Tensor) -> Tensor:
            return GKDTrainer.generalized_jsd_loss(
                student[:, :-1], teacher[:, :-1], beta=beta, num_items_in_batch=int(mask[:, 1:].sum())
            )

        return loss

    def of_heads(heads: Heads) -> Tensor:
        per_token, _ = ChunkedDivergenceFunction.apply(
            heads.student_rows, heads.student_weight, None, heads.teacher_rows, heads.teacher_weight, None, 0.5
        )
        return per_token.mean()

    found.of_logits.extend(
        (name, Case(f"same_vocab, {kind}", _same(kind, mask), theirs(b))) for kind, b in BETAS.items()
    )
    found.of_heads[name] = of_heads


def one_to_one(text: Text) -> Text:
    """The student tokens of a text, each paired with the teacher token at its place."""
    length = min(text.student_ids.shape[1], text.teacher_ids.shape[1])
    chunk_id = torch.arange(length, dtype=torch.int32, device=text.student_ids.device).unsqueeze(0)
    return Text(text.student_ids[:, :length], text.teacher_ids[:, :length], chunk_id, chunk_id, text.projection)


def gold_cases(text: Text) -> list[tuple[str, Case]]:
    """TRL's sorted distance (the ULD loss of its GOLD trainer) on a text whose tokens all pair one to one.

    TRL multiplies the probabilities of a longer chunk, which ours does not, so the two agree on such a text only.
    Raises ImportError without TRL.
    """
    from trl.experimental.gold.gold_trainer import ULDLoss

    num_tokens = text.student_ids.shape[1]
    labels = text.student_ids.masked_fill(torch.arange(num_tokens, device=text.student_ids.device) == 0, -100)
    offsets = torch.stack([torch.arange(num_tokens), torch.arange(num_tokens) + 1], -1).unsqueeze(0)
    settings = SimpleNamespace(
        uld_crossentropy_weight=0.0,
        uld_distillation_weight=1.0,
        uld_student_temperature=1.0,
        uld_teacher_temperature=1.0,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        use_extended_uld=True,
        uld_token_merge_strategy="bayesian",
    )
    of = ULDLoss(settings)

    def theirs(student: Tensor, teacher: Tensor) -> Tensor:
        ids = text.student_ids, text.teacher_ids
        return of(student, teacher, labels, labels, *ids, student_byte_offsets=offsets, teacher_byte_offsets=offsets)

    def ours(student: Tensor, teacher: Tensor) -> Tensor:
        return losses.uld(student, teacher, **text.arguments(with_projection=False)).loss

    return [(f"trl {version('trl')}", Case("uld", ours, theirs))]


def _add_liger(found: Rivals, name: str, mask: Tensor, device: torch.device) -> None:
    found.of_heads.update(liger_heads(device))
    if device.type != "cuda":
        found.absent[f"{name}, Triton kernels"] = f"they need a GPU, and this is {device.type}"
        return
    found.of_logits.extend(
        (name, Case(f"same_vocab, {kind}", _same(kind, mask), _triton(b))) for kind, b in BETAS.items()
    )


def liger_heads(device: torch.device) -> dict[str, HeadsLoss]:
    """Liger-Kernel's fused linear JSDs: chunks in PyTorch, compiled on a GPU, and there also with its Triton kernel.

    Raises PackageNotFoundError or ImportError without Liger-Kernel.
    """
    name = f"liger-kernel {version('liger-kernel')}"
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    chunked = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=device.type == "cuda")

    def in_chunks(heads: Heads) -> Tensor:
        targets = torch.zeros(len(heads.student_rows), dtype=torch.long, device=device)
        return chunked(heads.student_rows, heads.student_weight, heads.teacher_rows, heads.teacher_weight, targets)

    if device.type != "cuda":
        return {name: in_chunks}
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    fused = LigerFusedLinearJSD()

    def with_triton(heads: Heads) -> Tensor:
        return fused(heads.student_rows, heads.student_weight, heads.teacher_rows, heads.teacher_weight, None)

    return {name: in_chunks, f"{name}, Triton kernel": with_triton}


def _triton(beta: float) -> Loss:
    """Liger's kernel takes log-probabilities of both sides."""
    from liger_kernel.transformers.functional import liger_jsd

    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        log_p, log_q = (side[:, :-1].flatten(0, 1).log_softmax(-1, dtype=torch.float32) for side in (student, teacher))
        return liger_jsd(log_p, log_q, beta=beta)

    return loss


def _same(kind: str, mask: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda student, teacher: losses.same_vocab(student, teacher, mask=mask, divergence=kind).loss
