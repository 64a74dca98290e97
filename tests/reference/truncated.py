"""What a chunk costs if the teacher's likeliest tokens alone are known (methods.md §9.1), in the form of losses.py.

q [W + 1] has the probabilities of the known tokens K ∪ {y}, 0 for the others, and the rest ρ as the last. K is sorted,
likeliest first. p [V] is the student's.
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
    pairs_of,
    pushed,
    rest,
    sorted_l1,
    top,
    unmapped,
    with_rest,
)


def units(term: Dict, one: Dict, own: Dict, maps: Dict, top_k: int, num_tokens: int) -> list[Unit]:
    """Of one sequence. Columns of w from num_tokens on are not tokens, but have places among the likeliest."""
    values = []
    for _, x, y, z, w in aligned(one, own):
        if chunk_loss(term, maps, x, y, z, w[:, :num_tokens]) is not None:  # as in losses.py
            q = torch.stack([known(*position, top_k, num_tokens) for position in zip(w, y, strict=True)])
            K = [t for t in top(w[0], top_k) if t < num_tokens]
            values.append(truncated(term, maps, x, y, z[0].softmax(0), q, K))
    return [(value, value.detach()) for value in values]


def known(w: Tensor, y: int, top_k: int, num_tokens: int) -> Tensor:
    q, likeliest = w.softmax(0), top(w, top_k)
    taken = {y, *(t for t in likeliest if t < num_tokens)}
    rho = rest(q, [*taken]).sum()
    if num_tokens < len(w):  # (13.3)
        in_padding = sum(q[t] for t in likeliest if t >= num_tokens)
        rho = min(rho, (num_tokens - len(taken)) * q[likeliest[-1]] + in_padding)
    masses = torch.stack([q[t] * (t in taken) for t in range(num_tokens)] + [rho])
    return masses / masses.sum()


def truncated(term: Dict, maps: Dict, x: list[int], y: list[int], p: Tensor, q: Tensor, K: list[int]) -> Tensor:
    """q: by position of the chunk. K: of the first one."""
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
    """On cells, of which those without known mass are in the rest: that of the loss, if both sides have it, and ρ."""
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
    ours, other = pairs_of(maps, 0.6 if term["type"] == "h_kl" else torch.inf)
    common = compared(term, q[other], rest(q, other), p[ours], rest(p, ours))
    tail, k = q[[t for t in K if t not in other]], term["uncommon_topk"]
    num_ranks = k if len(tail) + len(other) == len(q) - 1 else min(k, len(tail))
    return term["common_weight"] * common + term["uncommon_weight"] * sorted_l1(tail, rest(p, ours), num_ranks)


def strict(term: Dict, maps: Dict, q: Tensor, p: Tensor) -> Tensor:
    ours, other = pairs_of(maps)
    taken = top(p[ours], term["top_k"] or len(ours))
    ours, other = [ours[i] for i in taken], [other[i] for i in taken]
    rests = (rest(q, other), rest(p, ours)) if term["normalization"] == "rest" else (q[-1:], p[:0])
    return compared(term, q[other], rests[0], p[ours], rests[1])


def shared_prefix(term: Dict, maps: Dict, q: Tensor, p: Tensor) -> Tensor:
    ours, other, size = maps["psi"][0], [*maps["psi"][1], -1], max(maps["psi"][0]) + 1
    return compared(term, pushed(q, other, size), unmapped(q, other), pushed(p, ours, size), unmapped(p, ours))


def byte_prefix(term: Dict, maps: Dict, q: Tensor, p: Tensor, x: list[int], y: list[int]) -> Tensor:
    phi = [*maps["phi"], -1]
    u, cells, others = byte_cells(maps | {"phi": phi}, q, x, y, len(p))
    return compared(term, u[cells], unmapped(q[0], phi), p[cells], p[others])


def uld(q: Tensor, p: Tensor, K: list[int]) -> Tensor:
    others = p.sort(descending=True).values[len(K) :].sum()
    return sorted_l1(q[K], p, len(K)) + (others - (1 - q[K].sum())).abs()
