"""Every mode twice: our function, and its naive formulation on the same logits (methods.md §3–§5)."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from losses_naive_divergences import DIVERGENCES, cross_entropy, forward_kl, full, top_k, union
from losses_naive_paired import Pairs, gold, strict, strict_top_k
from losses_naive_projected import (
    Chains,
    Entries,
    PrefixCells,
    SharedCells,
    byte_prefix,
    p_kl,
    p_kl_top_k,
    shared_prefix,
)
from losses_naive_unmatched import alm, log_likelihood, uld
from torch import Tensor

from nemo_opd import losses
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.types import LossOutput

Loss = Callable[[Tensor, Tensor], Tensor]
"""Unshifted logits [B, S, V] and [B, T, W] of student and teacher → the mean over units, a scalar."""
Rows = Callable[[Tensor, Tensor], Tensor]
"""Logits/τ of the compared positions, [U, V] and [U, W] → [U]."""


@dataclass(frozen=True)
class Case:
    """One mode in two formulations."""

    name: str
    ours: Loss
    naive: Loss


@dataclass(frozen=True)
class Text:
    """A text in two tokenizations, and how their vocabularies are related."""

    student_ids: Tensor
    """int64 [B, S]"""
    teacher_ids: Tensor
    """int64 [B, T]"""
    student_chunk_id: Tensor
    """int32 [B, S]"""
    teacher_chunk_id: Tensor
    """int32 [B, T]"""
    projection: ProjectionMatrix

    def to(self, device: torch.device) -> "Text":
        ids = (self.student_ids, self.teacher_ids, self.student_chunk_id, self.teacher_chunk_id)
        student, teacher, student_chunk_id, teacher_chunk_id = (tensor.to(device) for tensor in ids)
        return Text(student, teacher, student_chunk_id, teacher_chunk_id, self.projection)

    def arguments(self, *, with_projection: bool) -> dict[str, Any]:
        """Of our cross-tokenizer losses."""
        found: dict[str, Any] = {
            "student_ids": self.student_ids,
            "teacher_ids": self.teacher_ids,
            "student_chunk_id": self.student_chunk_id,
            "teacher_chunk_id": self.teacher_chunk_id,
        }
        return {**found, "projection": self.projection} if with_projection else found


@dataclass(frozen=True)
class Unit:
    """A chunk by the positions of its tokens in the flattened batch."""

    student: list[int]
    teacher: list[int]


def units_of(text: Text) -> list[Unit]:
    """Chunks of both sides that hold token 0 of neither."""
    found = []
    sides = text.student_chunk_id.tolist(), text.teacher_chunk_id.tolist()
    for b, (student, teacher) in enumerate(zip(*sides, strict=True)):
        places: dict[int, tuple[list[int], list[int]]] = {}
        for side, chunks in enumerate((student, teacher)):
            for position, chunk in enumerate(chunks):
                if chunk >= 0:
                    places.setdefault(chunk, ([], []))[side].append(b * len(chunks) + position)
        for s, t in places.values():
            if s and t and s[0] % len(student) and t[0] % len(teacher):
                found.append(Unit(s, t))
    return found


def same_vocab_cases(mask: Tensor, k: int, temperature: float = 1.0) -> list[Case]:
    """Every divergence, and the supports of k columns with the first divergence: mask [B, S]."""
    rows = _scored_rows(mask)

    def case(name: str, naive: Rows, **options: Any) -> Case:
        ours = partial(losses.same_vocab, mask=mask, temperature=temperature, **options)
        return Case(f"same_vocab, {name}", _loss(ours), _mean(naive, rows, rows, temperature))

    def chosen(by_teacher: bool, rest: bool) -> Rows:
        def loss(student: Tensor, teacher: Tensor) -> Tensor:
            by = teacher if by_teacher else student
            return top_k(student, teacher, forward_kl, chosen_by=by, k=k, rest=rest)

        return loss

    return [
        *(case(kind, partial(full, divergence=of), divergence=kind) for kind, of in DIVERGENCES.items()),
        case(f"teacher's top {k}, rest", chosen(True, True), support="teacher_topk", top_k=k),
        case(f"student's top {k}, rest", chosen(False, True), support="student_topk", top_k=k),
        case(f"union of top {k}, rest", partial(union, divergence=forward_kl, k=k), support="union", top_k=k),
        case(
            f"teacher's top {k}, renormalised",
            chosen(True, False),
            support="teacher_topk",
            top_k=k,
            normalization="support",
        ),
    ]


def cross_entropy_case(ids: Tensor, mask: Tensor) -> Case:
    """ids and mask [B, S]."""
    rows = _scored_rows(mask)
    targets = ids.flatten()[rows + 1]

    def ours(student: Tensor, teacher: Tensor) -> Tensor:
        return losses.cross_entropy(student, ids, mask=mask).loss

    def naive(student: Tensor, teacher: Tensor) -> Tensor:
        return cross_entropy(student, targets)

    return Case("cross_entropy", ours, _mean(naive, rows, rows, 1.0))


def cross_tokenizer_cases(text: Text, k: int, temperature: float = 1.0) -> list[Case]:
    """Every loss of methods.md §5. `k`: columns of p_kl's vocab_topk and pairs of strict's top_k."""
    units, device = units_of(text), text.student_ids.device
    student, teacher = (
        torch.tensor([side[0] - 1 for side in sides], device=device)
        for sides in ([unit.student for unit in units], [unit.teacher for unit in units])
    )
    first = partial(_mean, student_rows=student, teacher_rows=teacher, temperature=temperature)

    def ours(of: Callable[..., LossOutput], with_projection: bool = True, **options: Any) -> Loss:
        return _loss(partial(of, temperature=temperature, **text.arguments(with_projection=with_projection), **options))

    projection = text.projection
    entries = _moved(Entries.of(projection), device)
    exact, relaxed = (_moved(pairs(projection), device) for pairs in (Pairs.exact, Pairs.relaxed))
    cells = _moved(SharedCells.of(projection), device)
    is_realised = _realised_pairs(text, units, exact)
    kl = DIVERGENCES["forward_kl"]
    return [
        Case("p_kl", ours(losses.p_kl), first(partial(p_kl, divergence=kl, entries=entries))),
        Case(
            "p_kl, jsd",
            ours(losses.p_kl, divergence="jsd"),
            first(partial(p_kl, divergence=DIVERGENCES["jsd"], entries=entries)),
        ),
        Case(
            f"p_kl, top {k}",
            ours(losses.p_kl, vocab_topk=k),
            first(partial(p_kl_top_k, divergence=kl, entries=entries, k=k)),
        ),
        Case("gold", ours(losses.gold), first(partial(gold, divergence=kl, pairs=exact))),
        Case("h_kl", ours(losses.h_kl), first(partial(gold, divergence=kl, pairs=relaxed))),
        Case(
            "strict",
            ours(losses.strict),
            _mean(partial(strict, divergence=kl, pairs=exact), student[is_realised], teacher[is_realised], temperature),
        ),
        Case(
            f"strict, top {k}",
            ours(losses.strict, top_k=k),
            _mean(
                partial(strict_top_k, divergence=kl, pairs=exact, k=k),
                student[is_realised],
                teacher[is_realised],
                temperature,
            ),
        ),
        Case("byte_prefix", ours(losses.byte_prefix), _byte_prefix(text, units, student, teacher, temperature)),
        Case("shared_prefix", ours(losses.shared_prefix), first(partial(shared_prefix, divergence=kl, cells=cells))),
        Case("alm", ours(losses.alm, False), _alm(text, units, temperature)),
        Case("uld", ours(losses.uld, False), first(uld)),
    ]


def _loss(of: Callable[..., LossOutput]) -> Loss:
    return lambda student, teacher: of(student, teacher).loss


def _mean(of: Rows, student_rows: Tensor, teacher_rows: Tensor, temperature: float) -> Loss:
    """τ² · the mean of `of` at rows [U] of the flattened logits, computed in fp32 or better."""

    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        z_p, z_q = _at(student, student_rows, temperature), _at(teacher, teacher_rows, temperature)
        return temperature**2 * of(z_p, z_q).mean()

    return loss


def _at(logits: Tensor, rows: Tensor, temperature: float = 1.0) -> Tensor:
    """[B, S, V] → [U, V]. Rows that are all there, in order, cost no copy, and temperature 1 no division."""
    z = logits.flatten(0, 1)
    first, last = int(rows[0]), int(rows[-1])
    z = z[first : last + 1] if last - first + 1 == len(rows) else z[rows]
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return z if temperature == 1 else z / temperature


def _scored_rows(mask: Tensor) -> Tensor:
    """[U]: the rows of the flattened logits that predict the scored tokens."""
    scored = mask.clone()
    scored[:, 0] = 0
    return scored.flatten().nonzero().squeeze(1) - 1


def _realised_pairs(text: Text, units: list[Unit], pairs: Pairs) -> Tensor:
    """bool [U]: chunks of one token a side that are a pair."""
    known = set(zip(pairs.student.tolist(), pairs.teacher.tolist(), strict=True))
    student, teacher = text.student_ids.flatten().tolist(), text.teacher_ids.flatten().tolist()
    found = [
        len(unit.student) == len(unit.teacher) == 1 and (student[unit.student[0]], teacher[unit.teacher[0]]) in known
        for unit in units
    ]
    return torch.tensor(found, device=text.student_ids.device)


def _byte_prefix(text: Text, units: list[Unit], student: Tensor, teacher: Tensor, temperature: float) -> Loss:
    cells = _moved(PrefixCells.of(text.projection), text.student_ids.device)
    chains = _moved(_chains(text, units), text.student_ids.device)

    def loss(z_s: Tensor, z_t: Tensor) -> Tensor:
        log_share = (
            chains.log_share(_at(z_t, chains.later_row, temperature)) if len(chains.later_row) else z_t[0, 0, :0]
        )
        of = partial(byte_prefix, divergence=forward_kl, cells=cells, chains=chains, log_share=log_share)
        return _mean(of, student, teacher, temperature)(z_s, z_t)

    return loss


def _chains(text: Text, units: list[Unit]) -> Chains:
    order = text.projection.teacher_byte_order
    assert order is not None
    by_bytes = torch.from_numpy(order).long()
    place = by_bytes[:, 0].argsort()
    student, teacher = text.student_ids.flatten().tolist(), text.teacher_ids.flatten().tolist()
    chains = [(i, unit) for i, unit in enumerate(units) if len(unit.student) == 1 < len(unit.teacher)]
    later = [(g, position) for g, (_, unit) in enumerate(chains) for position in unit.teacher[1:]]
    meant = torch.zeros(len(later), text.projection.teacher_vocab_size, dtype=torch.bool)
    for row, (g, position) in enumerate(later):
        token, is_last = teacher[position], position == chains[g][1].teacher[-1]
        meant[row] = (place >= by_bytes[token, 1]) & (place < by_bytes[token, 2]) if is_last else False
        meant[row, token] = True
    return Chains(
        torch.tensor([i for i, _ in chains], dtype=torch.long),
        torch.tensor([student[unit.student[0]] for _, unit in chains], dtype=torch.long),
        torch.tensor([teacher[unit.teacher[0]] for _, unit in chains], dtype=torch.long),
        torch.tensor([g for g, _ in later], dtype=torch.long),
        torch.tensor([position - 1 for _, position in later], dtype=torch.long),
        meant,
    )


def _alm(text: Text, units: list[Unit], temperature: float) -> Loss:
    device = text.student_ids.device

    def side(ids: Tensor, positions: list[list[int]]) -> Callable[[Tensor], Tensor]:
        flat = torch.tensor([position for unit in positions for position in unit], device=device)
        unit = torch.tensor([u for u, own in enumerate(positions) for _ in own], device=device)
        targets = ids.flatten()[flat]
        return lambda logits: log_likelihood(_at(logits, flat - 1), targets, unit, len(positions))

    of_student = side(text.student_ids, [unit.student for unit in units])
    of_teacher = side(text.teacher_ids, [unit.teacher for unit in units])
    return lambda z_s, z_t: temperature**2 * alm(of_student(z_s), of_teacher(z_t), temperature).mean()


Indices = TypeVar("Indices")


def _moved(indices: Indices, device: torch.device) -> Indices:
    """A dataclass with its tensors on `device`."""
    values = {field.name: getattr(indices, field.name) for field in fields(indices)}  # type: ignore[arg-type]
    tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(indices, **tensors)  # type: ignore[type-var]
