"""Losses of methods.md §3–§11 for a single sequence, in plain loops; autograd computes the gradient.

A term is a dict of its settings. A sequence is a dict for the student, `text`, and a dict for each teacher: `ids`,
which of them are `scored`, the logits z [S, V] or w [T, W], and `chunks`, the chunk of each token on both sides (−1:
none). A teacher with the student's tokenizer has a chunk for each scored token. A chunk has the student's tokens x and
the teacher's y, and the rows of logits z and w that predict them; `ours` and `theirs` are the student's and the
teacher's positions or columns. maps: the maps of §2, and the columns `kept` by p_kl's vocab_topk.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Dict = dict[str, Any]
Unit = tuple[Tensor, Tensor]
"""A unit's loss, and its reported value, which has no gradient; both times τ²."""


def units(term: Dict, text: Dict, teacher: Dict, maps: Dict) -> list[Unit]:
    """Return the units of a sequence; for tcad, its tokens."""
    if term["type"] == "sampled_kl":
        return list(sampled_kl(term, text, teacher)) if text["sampled"] else []
    values = [chunk_loss(term, maps, *chunk) for _, *chunk in aligned(text, teacher)]
    return [(value, value.detach()) for value in values if value is not None]


def aligned(text: Dict, teacher: Dict) -> Iterator[tuple[list[int], list[int], list[int], Tensor, Tensor]]:
    """Yield the student's positions, x, y, z and w of each chunk without token 0 of a side."""
    for c in range(min(teacher["stop"], 1 + max(teacher["chunks"][0]))):
        ours, theirs = ([i for i, chunk in enumerate(side) if chunk == c] for side in teacher["chunks"])
        if ours and theirs and 0 not in (ours[0], theirs[0]):
            (z, x), (w, y) = predicted(text["z"], text["ids"], ours), predicted(teacher["w"], teacher["ids"], theirs)
            yield ours, x, y, z, w


def predicted(logits: Tensor, ids: list[int], positions: list[int]) -> tuple[Tensor, list[int]]:
    """Return the rows that predict the tokens at these positions, and the tokens."""
    return logits[[i - 1 for i in positions]], [ids[i] for i in positions]


def likelihood(rows: Tensor, ids: list[int]) -> Tensor:
    """Log-likelihood of all tokens together."""
    return rows.log_softmax(1)[range(len(ids)), ids].sum()


def scored(side: Dict) -> list[int]:
    """Tokens that count; token 0 has no prediction."""
    return [i for i in range(1, len(side["ids"])) if side["scored"][i]]


def pairs_of(maps: Dict, min_weight: float = math.inf) -> tuple[list[int], list[int]]:
    """Pair student and teacher tokens: exact pairs first, then rows with a weight ≥ min_weight, heaviest first."""
    weight, target = maps["R"].max(1)
    rows = [s for s in range(len(weight)) if maps["exact"][s] or weight[s] >= min_weight]
    owner: dict[int, int] = {}
    for s in sorted(rows, key=lambda s: (not maps["exact"][s], -weight[s], s)):
        owner.setdefault(int(target[s]), s)
    return [owner[t] for t in sorted(owner)], sorted(owner)


# --- §3: divergences; log t and log s are the cells of teacher and student


def divergence(term: Dict, log_t: Tensor, log_s: Tensor) -> Tensor:
    t, s, kind, beta = log_t.exp(), log_s.exp(), term["divergence"], term["beta"]
    if kind == "tvd":
        return (t - s).abs().sum() / 2
    if kind == "jsd" and 0 < beta < 1:
        log_m = (beta * t + (1 - beta) * s).log()
        return beta * (t * (log_t - log_m)).sum() + (1 - beta) * (s * (log_s - log_m)).sum()
    share = {"forward_kl": 1, "reverse_kl": 0, "mixed": term["mixed_weight"], "jsd": 1 - beta}[kind]
    return share * (t * (log_t - log_s)).sum() + (1 - share) * (s * (log_s - log_t)).sum()


def on_cells(log_q: Tensor, theirs: list[int], log_p: Tensor, ours: list[int], how: str) -> tuple[Tensor, Tensor]:
    """Restrict both sides to these columns: with a rest cell (rest), renormalised (support), or unchanged (full)."""
    q, p = log_q[theirs], log_p[ours]
    if how == "rest":
        return with_rest(q, outside(log_q, theirs), p, outside(log_p, ours))
    return (q.log_softmax(0), p.log_softmax(0)) if how == "support" else (q, p)


def with_rest(log_t: Tensor, rest_t: Tensor, log_s: Tensor, rest_s: Tensor) -> tuple[Tensor, Tensor]:
    """Add a rest cell to both sides; renormalise without it if a side has no other columns."""
    if not (len(rest_t) and len(rest_s)):
        return log_t.log_softmax(0), log_s.log_softmax(0)
    return torch.cat([log_t, rest_t.logsumexp(0)[None]]), torch.cat([log_s, rest_s.logsumexp(0)[None]])


def outside(log_p: Tensor, columns: list[int]) -> Tensor:
    return log_p[sorted(set(range(len(log_p))) - set(columns))]


def top(values: Tensor, k: int) -> list[int]:
    return values.detach().sort(descending=True, stable=True).indices[:k].tolist()


# --- §4, §5 and §10, TCAD: the loss of a chunk, or None if it is not a unit


def chunk_loss(term: Dict, maps: Dict, x: list[int], y: list[int], z: Tensor, w: Tensor) -> Tensor | None:
    kind, tau, is_single = term["type"], term["temperature"], len(x) == len(y) == 1
    weight = 1.0 if kind == "alm" else 0.0 if is_single else term.get("continuation_weight", 0.0)
    continuation = weight * alm(tau, x, y, z, w) if weight else 0.0
    is_pair = kind != "strict" or (is_single and (x[0], y[0]) in zip(*pairs_of(maps), strict=True))
    if kind == "alm" or not is_pair:
        return continuation if weight else None
    how = "geometric" if term.get("merge") == "mean" else term.get("merge")
    log_q = merged((w / tau).log_softmax(1), y, how)
    log_p = merged((z / tau).log_softmax(1), x, "arithmetic" if how == "geometric" and kind == "p_kl" else how)
    if kind == "byte_prefix":
        return tau**2 * byte_prefix(term, maps, log_q, log_p, x, y, (w / tau).softmax(1)) + continuation
    losses = {loss.__name__: loss for loss in (same_vocab, tcad, p_kl, gold, strict, shared_prefix, uld)}
    return tau**2 * (losses | {"h_kl": gold})[kind](term, maps, log_q, log_p) + continuation


def merged(rows: Tensor, ids: list[int], how: str | None) -> Tensor:
    if how == "geometric":
        return rows.mean(0).log_softmax(0)
    if how == "arithmetic":
        return rows.exp().mean(0).log()
    return rows[0] + (rows[range(1, len(ids)), ids[1:]].sum() if how == "observed" else 0.0)


def same_vocab(term: Dict, maps: Dict, log_q: Tensor, log_p: Tensor) -> Tensor:
    sides = {"full": [], "teacher_topk": [log_q], "student_topk": [log_p], "union": [log_q, log_p]}[term["support"]]
    cells = sorted({token for side in sides for token in top(side, term["top_k"])}) or list(range(len(log_q)))
    return divergence(term, *on_cells(log_q, cells, log_p, cells, term["normalization"]))


def tcad(term: Dict, maps: Dict, log_q: Tensor, log_p: Tensor) -> Tensor:
    k = term["support_size"]
    by_turns = list(dict.fromkeys(token for both in zip(top(log_q, k), top(log_p, k), strict=True) for token in both))
    U = by_turns if term["support"] == "union" else by_turns[:k]
    return divergence(term, *on_cells(log_q, U, log_p, U, "support")) - term["coverage_coef"] * log_p[U].logsumexp(0)


def p_kl(term: Dict, maps: Dict, log_q: Tensor, log_p: Tensor) -> Tensor:
    covered = maps["R"].any(0).nonzero().flatten().tolist()
    log_projected = (log_p.exp() @ maps["R"][:, covered]).log()
    q, p = log_q[covered].log_softmax(0), log_projected.log_softmax(0)
    cells = [covered.index(t) for t in maps["kept"] or covered]
    return divergence(term, *on_cells(q, cells, p, cells, "rest")) - term["coverage_coef"] * log_projected.logsumexp(0)


def gold(term: Dict, maps: Dict, log_q: Tensor, log_p: Tensor) -> Tensor:
    ours, theirs = pairs_of(maps, 0.6 if term["type"] == "h_kl" else math.inf)
    cells = on_cells(log_q, theirs, log_p, ours, "full" if term["merge"] == "observed" else "rest")
    tails = sorted_l1(outside(log_q, theirs).exp(), outside(log_p, ours).exp(), term["uncommon_topk"])
    return term["common_weight"] * divergence(term, *cells) + term["uncommon_weight"] * tails


def uld(term: Dict, maps: Dict, log_q: Tensor, log_p: Tensor) -> Tensor:
    return sorted_l1(log_q.exp(), log_p.exp(), len(log_q) + len(log_p))


def sorted_l1(q: Tensor, p: Tensor, k: int) -> Tensor:
    q, p = (pad(a, (0, len(b))).sort(descending=True).values[:k] for a, b in ((q, p), (p, q)))
    return (q - p).abs().sum()


def strict(term: Dict, maps: Dict, log_q: Tensor, log_p: Tensor) -> Tensor:
    ours, theirs = pairs_of(maps)
    likeliest = top(log_p[ours], term["top_k"] or len(ours))
    ours, theirs = [ours[i] for i in likeliest], [theirs[i] for i in likeliest]
    return divergence(term, *on_cells(log_q, theirs, log_p, ours, term["normalization"]))


def byte_prefix(term: Dict, maps: Dict, log_q: Tensor, log_p: Tensor, x: list[int], y: list[int], q: Tensor) -> Tensor:
    u, cells, rest_cells = byte_cells(maps, q, x, y, len(log_p))
    return divergence(term, *with_rest(u[cells].log(), unmapped(log_q, maps["phi"]), log_p[cells], log_p[rest_cells]))


def byte_cells(maps: Dict, q: Tensor, x: list[int], y: list[int], size: int) -> tuple[Tensor, list[int], list[int]]:
    """Return u of all student tokens, the tokens that are cells, and the tokens of their rest cell. q [chunk length,
    W].
    """
    phi, pieces, reached = maps["phi"], maps["pieces"], set(maps["phi"]) - {-1}
    u, cells = pushed(q[0], phi, size), sorted(reached)
    if len(x) == 1 and len(y) > 1:
        follows = [t for t, piece in enumerate(pieces) if piece and piece.startswith(pieces[y[-1]])]
        bound = math.prod(q[k, y[k]] for k in range(len(y) - 1)) * q[-1, follows].sum()
        u[phi[y[0]]] -= bound
        u[x[0]] += bound
        cells = sorted({*reached, *x})
    # The only token that no φ reaches may be x; then the student has no rest.
    rest_cells = sorted(set(range(size)) - set(cells)) if len(reached) < size - 1 else []
    return u, cells, rest_cells


def shared_prefix(term: Dict, maps: Dict, log_q: Tensor, log_p: Tensor) -> Tensor:
    (ours, theirs), size = maps["psi"], max(maps["psi"][0]) + 1
    t, s = pushed(log_q.exp(), theirs, size), pushed(log_p.exp(), ours, size)
    return divergence(term, *with_rest(t.log(), unmapped(log_q, theirs), s.log(), unmapped(log_p, ours)))


def pushed(mass: Tensor, onto: list[int], size: int) -> Tensor:
    return mass.new_zeros(size + 1).index_add(0, torch.tensor(onto) % (size + 1), mass)[:-1]


def unmapped(mass: Tensor, onto: list[int]) -> Tensor:
    return mass[[t for t, v in enumerate(onto) if v < 0]]


def alm(tau: float, x: list[int], y: list[int], z: Tensor, w: Tensor) -> Tensor:
    log_a, log_b = likelihood(w, y) / tau, likelihood(z, x) / tau
    return -tau * (log_a.exp() * log_b + (1 - log_a.exp()) * torch.log(-torch.expm1(log_b)))


# --- §10 and §14: sampled tokens and chunks


def sampled_kl(term: Dict, text: Dict, teacher: Dict) -> Iterator[Unit]:
    for ours, x, y, z, w in aligned(text, teacher):
        s, t = likelihood(z, x), likelihood(w, y)
        k3 = torch.exp(t - s) - 1 + s - t
        estimate = {"k1": s - t, "k2": (s - t) ** 2 / 2, "k3": k3}[term["estimator"]]
        is_direct, weight = term["update"] == "direct", math.exp(s.item() - sum(text["drawn"][i] for i in ours))
        trained = importance(term, text, ours) * estimate if is_direct else policy(term, text, ours, -estimate.item())
        yield trained, weight * k3.detach()


def policy(term: Dict, text: Dict, tokens: list[int], advantage: float) -> Tensor:
    """−min(r A, clip(r) A), for A < 0 at most dual_clip · |A|, times the importance of the tokens / r."""
    log_p = likelihood(*predicted(text["z"], text["ids"], tokens))
    r = torch.exp(log_p - sum(text["behaviour"][i] for i in tokens))
    gain = torch.minimum(r * advantage, r.clamp(1 - term["clip_low"], 1 + term["clip_high"]) * advantage)
    if term["dual_clip"] is not None and advantage < 0:
        gain = gain.clamp(min=term["dual_clip"] * advantage)
    return -importance(term, text, tokens) / r.item() * gain


def importance(term: Dict, text: Dict, tokens: list[int]) -> float:
    """min(W, cap) for the weight W of the tokens or their sequence; 0 if a token of the sequence is below the veto."""
    log_p = {i: likelihood(*predicted(text["z"], text["ids"], [i])).item() for i in scored(text)}
    log_w = {i: log_p[i] - text["drawn"][i] for i in log_p}
    if min(log_w.values()) < math.log(term["importance_veto"] or 1e-300):
        return 0.0
    weight = math.exp(sum(log_w[i] for i in (log_w if term["importance_level"] == "sequence" else tokens)))
    return min(weight, term["importance_cap"] or math.inf)
