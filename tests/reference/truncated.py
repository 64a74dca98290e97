"""Loss of a chunk if only the teacher's likeliest tokens are known (methods.md §9.1), in the form of losses.py.

q [W + 1] has the probabilities of the known tokens K ∪ {y}, 0 for unknown tokens, and their sum ρ in the last column. K
is sorted, likeliest first. p [V] is the student's distribution.
"""

import torch
from torch import Tensor

from tests.reference.losses import (
    Dict,
    Unit,
    aligned,
    byte_cells,
    chunk_loss,
    divergence,
    outside,
    pairs_of,
    pushed,
    sorted_l1,
    top,
    unmapped,
    with_rest,
)


def units(term: Dict, text: Dict, teacher: Dict, maps: Dict, top_k: int, num_tokens: int) -> list[Unit]:
    """Return the units of a sequence. Columns of w from num_tokens on are not tokens, but can be among the
    likeliest.
    """
    values = []
    for _, x, y, z, w in aligned(text, teacher):
        if chunk_loss(term, maps, x, y, z, w[:, :num_tokens]) is not None:  # as in losses.py
            q = torch.stack([known_mass(*position, top_k, num_tokens) for position in zip(w, y, strict=True)])
            K = [t for t in top(w[0], top_k) if t < num_tokens]
            values.append(truncated(term, maps, x, y, z[0].softmax(0), q, K))
    return [(value, value.detach()) for value in values]


def known_mass(w: Tensor, y: int, top_k: int, num_tokens: int) -> Tensor:
    q, likeliest = w.softmax(0), top(w, top_k)
    ids = {y, *(t for t in likeliest if t < num_tokens)}
    rho = outside(q, [*ids]).sum()
    if num_tokens < len(w):  # (13.3)
        in_padding = sum(q[t] for t in likeliest if t >= num_tokens)
        rho = min(rho, (num_tokens - len(ids)) * q[likeliest[-1]] + in_padding)
    masses = torch.stack([q[t] * (t in ids) for t in range(num_tokens)] + [rho])
    return masses / masses.sum()


def truncated(term: Dict, maps: Dict, x: list[int], y: list[int], p: Tensor, q: Tensor, K: list[int]) -> Tensor:
    """q [chunk length, W + 1]. K: known tokens at the chunk's first position."""
    kind = term["type"]
    if kind == "byte_prefix":
        return byte_prefix(term, maps, q, p, x, y)
    if kind in ("gold", "h_kl"):
        return gold(term, maps, q[0], p, K)
    if kind == "uld":
        return uld(q[0], p, K)
    losses = {"same_vocab": same_vocab, "p_kl": p_kl, "strict": strict, "shared_prefix": shared_prefix}
    return losses[kind](term, maps, q[0], p)


def compared(term: Dict, t: Tensor, rest_t: Tensor, s: Tensor, rest_s: Tensor) -> Tensor:
    """Compare cells; those without known mass join a rest cell, as does the loss's own rest if both sides have one."""
    if len(rest_t) == 1 or not len(rest_s):
        rest_t, rest_s = rest_t[-1:], rest_s[:0]
    rest_s = torch.cat([rest_s, s[t == 0]])
    cells = with_rest(t[t > 0].log(), rest_t.log(), s[t > 0].log(), rest_s.log())
    return divergence(term, *(side.log_softmax(0) for side in cells))


def same_vocab(term: Dict, maps: Dict, q: Tensor, p: Tensor) -> Tensor:
    return compared(term, q[:-1], q[-1:], p, p[:0])


def p_kl(term: Dict, maps: Dict, q: Tensor, p: Tensor) -> Tensor:
    covered = maps["R"].any(0).nonzero().flatten().tolist()
    projected = p @ maps["R"][:, covered]
    return compared(term, q[covered], q[-1:], projected, p[:0]) - term["coverage_coef"] * projected.sum().log()


def gold(term: Dict, maps: Dict, q: Tensor, p: Tensor, K: list[int]) -> Tensor:
    ours, theirs = pairs_of(maps, 0.6 if term["type"] == "h_kl" else torch.inf)
    common = compared(term, q[theirs], outside(q, theirs), p[ours], outside(p, ours))
    tail, k = q[[t for t in K if t not in theirs]], term["uncommon_topk"]
    num_ranks = k if len(tail) + len(theirs) == len(q) - 1 else min(k, len(tail))
    return term["common_weight"] * common + term["uncommon_weight"] * sorted_l1(tail, outside(p, ours), num_ranks)


def strict(term: Dict, maps: Dict, q: Tensor, p: Tensor) -> Tensor:
    ours, theirs = pairs_of(maps)
    likeliest = top(p[ours], term["top_k"] or len(ours))
    ours, theirs = [ours[i] for i in likeliest], [theirs[i] for i in likeliest]
    rests = (outside(q, theirs), outside(p, ours)) if term["normalization"] == "rest" else (q[-1:], p[:0])
    return compared(term, q[theirs], rests[0], p[ours], rests[1])


def shared_prefix(term: Dict, maps: Dict, q: Tensor, p: Tensor) -> Tensor:
    ours, theirs, size = maps["psi"][0], [*maps["psi"][1], -1], max(maps["psi"][0]) + 1
    return compared(term, pushed(q, theirs, size), unmapped(q, theirs), pushed(p, ours, size), unmapped(p, ours))


def byte_prefix(term: Dict, maps: Dict, q: Tensor, p: Tensor, x: list[int], y: list[int]) -> Tensor:
    phi = [*maps["phi"], -1]
    u, cells, rest_cells = byte_cells(maps | {"phi": phi}, q, x, y, len(p))
    return compared(term, u[cells], unmapped(q[0], phi), p[cells], p[rest_cells])


def uld(q: Tensor, p: Tensor, K: list[int]) -> Tensor:
    rest_mass = p.sort(descending=True).values[len(K) :].sum()
    return sorted_l1(q[K], p, len(K)) + (rest_mass - (1 - q[K].sum())).abs()
