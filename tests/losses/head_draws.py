"""Random heads, hidden states and losses, and the same in float64 and plain PyTorch."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.logits import Head, HeadLogits, compute_together
from nemo_opd.logits.rows import LogitRows, TrainableRows
from nemo_opd.losses import cross_entropy, same_vocab

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Draw:
    """A student's and a teacher's head with hidden states for one vocabulary, and a loss between them."""

    hidden: tuple[Tensor, Tensor]
    """[B, S, D] and [B, S, E]"""
    heads: tuple[Head, Head]
    vocabulary: int
    """Columns that are tokens; heads are wider."""
    ids: Tensor
    mask: Tensor
    temperature: float
    kd_weight: float
    chunk_size: int | None

    @staticmethod
    def of(seed: int) -> Draw:
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        dtype, vocabulary = draw.choice(DTYPES), draw.randint(12, 90)
        shape = (draw.randint(1, 3), draw.randint(2, 9))

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, dtype=torch.float64)

        def side() -> tuple[Tensor, Head]:
            width, columns = draw.randint(1, 40), vocabulary + draw.choice((0, 0, 3, 8))
            weight = (normal(columns, width) * draw.uniform(0.3, 3) / width**0.5).to(dtype)
            bias = normal(columns).to(dtype) if draw.random() < 0.5 else None
            cap = draw.choice((None, None, 2.0, 30.0))
            return normal(*shape, width).to(dtype), Head(weight, bias, draw.choice((1.0, 1.0, 0.3, 2.0)), cap)

        (student_hidden, student_head), (teacher_hidden, teacher_head) = side(), side()
        ids = torch.randint(vocabulary, shape, generator=generator)
        mask = torch.rand(shape, generator=generator) < 0.8
        mask[0, 1] = True
        chunk_size = draw.choice((None, 1, 3))
        sides = (student_hidden, teacher_hidden), (student_head, teacher_head)
        return Draw(*sides, vocabulary, ids, mask, draw.choice((1.0, 2.0)), draw.choice((0.3, 1.0)), chunk_size)

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden[0].dtype

    def trained(self) -> tuple[Tensor, Head]:
        """Return the student's hidden states and head as new leaves."""
        head, hidden = self.heads[0], self.hidden[0].clone().requires_grad_()
        bias = None if head.bias is None else head.bias.clone().requires_grad_()
        return hidden, Head(head.weight.clone().requires_grad_(), bias, head.scale, head.soft_cap)

    def loss(self, student: TrainableRows, teacher: LogitRows) -> Tensor:
        """Cross-entropy and forward KL, computed together."""
        sizes = {"student_vocab_size": self.vocabulary, "teacher_vocab_size": self.vocabulary}
        ce = cross_entropy.plan(
            student, self.ids, mask=self.mask, vocab_size=self.vocabulary, chunk_size=self.chunk_size
        )
        kd = same_vocab.plan(
            student, teacher, mask=self.mask, temperature=self.temperature, chunk_size=self.chunk_size, **sizes
        )
        return compute_together([ce, kd.times(self.kd_weight)]).loss

    @property
    def teacher(self) -> HeadLogits:
        return HeadLogits(self.hidden[1], self.heads[1])


@dataclass(frozen=True)
class Exact:
    """Loss and gradients of a draw in float64."""

    loss: Tensor
    linear_gradient: Tensor
    """[B·S, V]: the gradient with respect to W h + bias."""
    gradients: tuple[Tensor, ...]
    """Gradients of hidden states, weight and, if there is one, bias."""
    largest_sum: float
    """The largest Σ |w h| + |bias| of a logit."""

    @staticmethod
    def of(draw: Draw) -> Exact:
        leaves = [draw.hidden[0], draw.heads[0].weight, draw.heads[0].bias]
        exact = [None if leaf is None else leaf.double().clone().requires_grad_() for leaf in leaves]
        linear = _linear(*exact)
        teacher = _linear(*(None if x is None else x.double() for x in (draw.hidden[1], *_parameters(draw.heads[1]))))
        z_s = _finished(linear, draw.heads[0])[:, :-1, : draw.vocabulary]
        z_t = _finished(teacher, draw.heads[1])[:, :-1, : draw.vocabulary]
        scored = draw.mask[:, 1:]
        log_p = z_s.log_softmax(-1)
        ce = -log_p.gather(-1, draw.ids[:, 1:, None]).squeeze(-1)[scored].mean()
        tau = draw.temperature
        log_q, log_p = (z_t / tau).log_softmax(-1), (z_s / tau).log_softmax(-1)
        kd = (log_q.exp() * (log_q - log_p)).sum(-1)[scored].mean() * tau**2
        loss = ce + draw.kd_weight * kd
        linear_gradient, *gradients = torch.autograd.grad(loss, [linear, *(leaf for leaf in exact if leaf is not None)])
        sizes = [
            _linear(*(None if x is None else x.double().abs() for x in (hidden, *_parameters(head))))
            for hidden, head in zip(draw.hidden, draw.heads, strict=True)
        ]
        largest = max(float(size.max()) * head.scale for size, head in zip(sizes, draw.heads, strict=True))
        return Exact(loss.detach(), linear_gradient.flatten(0, 1), tuple(gradients), largest)


def _parameters(head: Head) -> tuple[Tensor, Tensor | None]:
    return head.weight, head.bias


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = hidden @ weight.t()
    return logits if bias is None else logits + bias


def _finished(linear: Tensor, head: Head) -> Tensor:
    logits = linear * head.scale
    return logits if head.soft_cap is None else head.soft_cap * torch.tanh(logits / head.soft_cap)


def value_bound(draw: Draw, exact: Exact) -> float:
    """Bound the rounding of the loss.

    Each logit is a sum of `width` + 1 numbers, and each row of the loss of `vocabulary` numbers, in fp32 or better.
    Changing a logit by ε changes the loss by at most 2 ε, for each of two terms and two sides, times τ.
    """
    eps = torch.finfo(torch.promote_types(draw.dtype, torch.float32)).eps
    width = max(hidden.shape[-1] for hidden in draw.hidden)
    return 8 * draw.temperature * eps * (width + draw.vocabulary) * max(1.0, exact.largest_sum)


def gradient_bound(draw: Draw, exact: Exact, gradient: Tensor, size: float) -> float:
    """Bound the rounding of a gradient in the 2-norm. size: norm of the sums of absolute summands.

    Two roundings to the dtype: the gradient that enters a product and the product's result on either rank; twice as
    much for sums of several blocks. Numbers below fp16's normal range have an absolute error.
    """
    unit = torch.finfo(draw.dtype).eps / 2
    tiny = torch.finfo(draw.dtype).smallest_normal * unit * gradient.numel() ** 0.5
    return 4 * unit * size + tiny + 4 * value_bound(draw, exact) * max(1.0, float(gradient.norm()))
