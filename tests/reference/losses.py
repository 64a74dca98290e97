"""What one sequence costs by each loss of METHODS §3–§5 and §10: plain loops over units; autograd does the gradient.

A term is a dict of its settings, a pair one sequence as the student and one teacher see it. A unit is what is trained
on and what is reported of it, both times τ².
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Unit = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Maps:
    """The maps between two vocabularies (METHODS §2); −1 is none."""

    R: Tensor  # [V, W]
    exact: list[bool]  # [V]: R's row is an exact pair
    phi: list[int]  # [W]: teacher → student token
    psi: tuple[list[int], list[int]]  # [V], [W]: → shared token
    pieces: list[bytes | None]  # [W]: bytes of a teacher token; None of a special one

    def pairs(self, least: float) -> list[tuple[int, int]]:
        """(student, teacher), one to one: exact pairs go first, then rows of weight ≥ least, the heaviest first."""
        weight, target = self.R.max(1)
        rows = [s for s in range(len(self.R)) if self.exact[s] or weight[s] >= least]
        owner: dict[int, int] = {}
        for s in sorted(rows, key=lambda s: (not self.exact[s], -weight[s], s)):
            owner.setdefault(int(target[s]), s)
        return sorted((s, t) for t, s in owner.items())


@dataclass(frozen=True)
class Pair:
    z: Tensor  # [S, V]: the student's logits, cut to its vocabulary
    w: Tensor  # [T, W]: the teacher's
    x: list[int]  # [S]: the student's tokens
    y: list[int]  # [T]
    scored: list[int]  # positions of the student's tokens that count
    chunks: tuple[list[int], list[int]] | None  # chunk ids [S] and [T]; None where both have one tokenizer
    behaviour: list[float] | None  # [S]: log-probabilities when tokens were sampled; None of a dataset's sequence
    maps: Maps | None

    def aligned(self) -> Iterator[tuple[list[int], list[int]]]:
        """Positions of each chunk on both sides, but of a chunk that holds token 0 of either side."""
        for c in sorted(set(self.chunks[0]) & set(self.chunks[1]) - {-1}):
            own, theirs = ([i for i, chunk in enumerate(side) if chunk == c] for side in self.chunks)
            if 0 not in (own[0], theirs[0]):
                yield own, theirs


def units(term: dict, pair: Pair, kept: list[int] | None = None) -> list[Unit]:
    """Of one sequence; for tcad its tokens. kept: columns with a cell of their own, of p_kl with vocab_topk."""
    if term["type"] == "sampled_kl":
        return list(sampled_kl(term, pair)) if pair.behaviour else []
    if pair.chunks is None:
        loss = {"tcad": tcad, "same_vocab": same_vocab}[term["type"]]
        values = [loss(term, pair.w[i - 1], pair.z[i - 1]) for i in pair.scored]
    else:
        values = [chunk_loss(term, pair, own, theirs, kept) for own, theirs in pair.aligned()]
    return [(value, value.detach()) for value in values if value is not None]


# --- §3: log t and log s of the cells


def divergence(term: dict, log_t: Tensor, log_s: Tensor) -> Tensor:
    t, s, kind, beta = log_t.exp(), log_s.exp(), term["divergence"], term["beta"]
    forward, reverse = (t * (log_t - log_s)).sum(), (s * (log_s - log_t)).sum()
    if kind == "mixed":
        return term["mixed_weight"] * forward + (1 - term["mixed_weight"]) * reverse
    if kind == "tvd":
        return (t - s).abs().sum() / 2
    if kind == "forward_kl" or (kind == "jsd" and beta == 0):
        return forward
    if kind == "reverse_kl" or (kind == "jsd" and beta == 1):
        return reverse
    log_m = (beta * t + (1 - beta) * s).log()
    return beta * (t * (log_t - log_m)).sum() + (1 - beta) * (s * (log_s - log_m)).sum()


def with_rest(log_t: Tensor, rest_t: Tensor, log_s: Tensor, rest_s: Tensor) -> tuple[Tensor, Tensor]:
    """A cell for the rest of each side; without it, and renormalised, where one side can have none."""
    if not (len(rest_t) and len(rest_s)):
        return log_t.log_softmax(0), log_s.log_softmax(0)
    return torch.cat([log_t, rest_t.logsumexp(0)[None]]), torch.cat([log_s, rest_s.logsumexp(0)[None]])


def rest(log_p: Tensor, taken: list[int]) -> Tensor:
    return log_p[sorted(set(range(len(log_p))) - set(taken))]


def top(values: Tensor, k: int) -> list[int]:
    return values.detach().sort(descending=True, stable=True).indices[:k].tolist()


# --- §4 and §10, TCAD: logits of teacher and student at one position


def same_vocab(term: dict, w: Tensor, z: Tensor) -> Tensor:
    tau, k = term["temperature"], term["top_k"]
    log_q, log_p = (w / tau).log_softmax(0), (z / tau).log_softmax(0)
    if term["support"] != "full" and k < len(w):
        of_teacher = top(log_q, k) if term["support"] != "student_topk" else []
        of_student = top(log_p, k) if term["support"] != "teacher_topk" else []
        cells = sorted({*of_teacher, *of_student})
        rests, (log_q, log_p) = (rest(log_q, cells), rest(log_p, cells)), (log_q[cells], log_p[cells])
        if term["normalization"] == "rest":
            log_q, log_p = with_rest(log_q, rests[0], log_p, rests[1])
        if term["normalization"] == "support":
            log_q, log_p = log_q.log_softmax(0), log_p.log_softmax(0)
    return tau**2 * divergence(term, log_q, log_p)


def tcad(term: dict, w: Tensor, z: Tensor) -> Tensor:
    tau, k = term["temperature"], term["support_size"]
    log_q, log_p = (w / tau).log_softmax(0), (z / tau).log_softmax(0)
    by_turns = list(dict.fromkeys(token for both in zip(top(log_q, k), top(log_p, k), strict=True) for token in both))
    U = by_turns if term["support"] == "union" else by_turns[:k]
    on_support = divergence(term, log_q[U].log_softmax(0), log_p[U].log_softmax(0))
    return tau**2 * (on_support - term["coverage_coef"] * log_p[U].logsumexp(0))


# --- §5: positions of one chunk on both sides → its loss; None where it is no unit


def chunk_loss(term: dict, pair: Pair, own: list[int], theirs: list[int], kept: list[int] | None) -> Tensor | None:
    kind, is_single = term["type"], len(own) == len(theirs) == 1
    if kind == "alm":
        return alm(term, pair, own, theirs)
    weight = 0.0 if is_single else term.get("continuation_weight", 0.0)
    continuation = weight * alm(term, pair, own, theirs) if weight else 0.0
    if kind == "strict" and not (is_single and (pair.x[own[0]], pair.y[theirs[0]]) in pair.maps.pairs(math.inf)):
        return continuation if weight else None
    how = "geometric" if term.get("merge") == "mean" else term.get("merge")
    log_q = merged(term, pair.w, pair.y, theirs, how)
    log_p = merged(term, pair.z, pair.x, own, "arithmetic" if how == "geometric" and kind == "p_kl" else how)
    if kind == "p_kl":
        value = p_kl(term, pair, log_q, log_p, kept)
    elif kind == "byte_prefix":
        value = byte_prefix(term, pair, log_q, log_p, own, theirs)
    else:
        losses = {"gold": gold, "h_kl": gold, "strict": strict, "shared_prefix": shared_prefix, "uld": uld}
        value = losses[kind](term, pair, log_q, log_p)
    return term["temperature"] ** 2 * value + continuation


def merged(term: dict, logits: Tensor, ids: list[int], positions: list[int], how: str | None) -> Tensor:
    rows = (logits[[i - 1 for i in positions]] / term["temperature"]).log_softmax(1)
    if how == "geometric":
        return rows.mean(0).log_softmax(0)
    if how == "arithmetic":
        return rows.exp().mean(0).log()
    if how == "observed":
        return rows[0] + sum(rows[j, ids[i]] for j, i in enumerate(positions) if j > 0)
    return rows[0]


def p_kl(term: dict, pair: Pair, log_q: Tensor, log_p: Tensor, kept: list[int] | None) -> Tensor:
    covered = pair.maps.R.any(0).nonzero().flatten().tolist()
    log_projected = (log_p.exp() @ pair.maps.R[:, covered]).log()
    q, p = log_q[covered].log_softmax(0), log_projected.log_softmax(0)
    if kept is not None and len(kept) < len(covered):
        kept = [covered.index(t) for t in kept]
        q, p = with_rest(q[kept], rest(q, kept), p[kept], rest(p, kept))
    coverage = 1.0 if term["coverage_coef"] is None else term["coverage_coef"]
    return divergence(term, q, p) - coverage * log_projected.logsumexp(0)


def gold(term: dict, pair: Pair, log_q: Tensor, log_p: Tensor) -> Tensor:
    pairs = pair.maps.pairs(0.6 if term["type"] == "h_kl" else math.inf)
    ours, other = [s for s, _ in pairs], [t for _, t in pairs]
    q, p, rest_q, rest_p = log_q[other], log_p[ours], rest(log_q, other), rest(log_p, ours)
    cells = (q, p) if term["merge"] == "observed" else with_rest(q, rest_q, p, rest_p)
    common, uncommon = (1.0 if term[key] is None else term[key] for key in ("common_weight", "uncommon_weight"))
    tails = sorted_l1(rest_q.exp(), rest_p.exp(), term["uncommon_topk"] or 8192)
    return common * divergence(term, *cells) + uncommon * tails


def uld(term: dict, pair: Pair, log_q: Tensor, log_p: Tensor) -> Tensor:
    return sorted_l1(log_q.exp(), log_p.exp(), len(log_q) + len(log_p))


def sorted_l1(q: Tensor, p: Tensor, k: int) -> Tensor:
    q, p = q.sort(descending=True).values[:k], p.sort(descending=True).values[:k]
    both = min(len(q), len(p))
    return (q[:both] - p[:both]).abs().sum() + q[both:].sum() + p[both:].sum()


def strict(term: dict, pair: Pair, log_q: Tensor, log_p: Tensor) -> Tensor:
    pairs = pair.maps.pairs(math.inf)
    taken = [pairs[i] for i in top(log_p[[s for s, _ in pairs]], term["top_k"] or len(pairs))]
    ours, other = [s for s, _ in taken], [t for _, t in taken]
    if term["normalization"] == "rest":
        return divergence(term, *with_rest(log_q[other], rest(log_q, other), log_p[ours], rest(log_p, ours)))
    return divergence(term, log_q[other].log_softmax(0), log_p[ours].log_softmax(0))


def byte_prefix(term: dict, pair: Pair, log_q: Tensor, log_p: Tensor, own: list[int], theirs: list[int]) -> Tensor:
    phi, pieces, reached = pair.maps.phi, pair.maps.pieces, set(pair.maps.phi) - {-1}
    u = log_q.exp().new_zeros(len(log_p) + 1).index_add(0, torch.tensor(phi) % (len(log_p) + 1), log_q.exp())[:-1]
    cells = sorted(reached)
    if len(own) == 1 and len(theirs) > 1:
        x, y = pair.x[own[0]], [pair.y[j] for j in theirs]
        rows = (pair.w[[j - 1 for j in theirs]] / term["temperature"]).softmax(1)
        follows = [t for t, piece in enumerate(pieces) if piece and piece.startswith(pieces[y[-1]])]
        bound = math.prod(rows[k, y[k]] for k in range(len(y) - 1)) * rows[-1, follows].sum()
        u[phi[y[0]]] -= bound
        u[x] += bound
        cells = sorted(reached | {x})
    # A single token that no φ reaches may be x itself: then the student's rest can be empty.
    rest_p = rest(log_p, cells) if len(reached) < len(log_p) - 1 else log_p[:0]
    rest_q = log_q[[t for t, v in enumerate(phi) if v < 0]]
    return divergence(term, *with_rest(u[cells].log(), rest_q, log_p[cells], rest_p))


def shared_prefix(term: dict, pair: Pair, log_q: Tensor, log_p: Tensor) -> Tensor:
    sides, size = [], max(pair.maps.psi[0]) + 1
    for log_mass, psi in ((log_q, pair.maps.psi[1]), (log_p, pair.maps.psi[0])):
        pushed = log_mass.new_zeros(size + 1).index_add(0, torch.tensor(psi) % (size + 1), log_mass.exp())
        sides += [pushed[:-1].log(), log_mass[[t for t, v in enumerate(psi) if v < 0]]]
    return divergence(term, *with_rest(*sides))


def log_likelihood(logits: Tensor, ids: list[int], positions: list[int]) -> Tensor:
    return sum(logits[i - 1].log_softmax(0)[ids[i]] for i in positions)


def alm(term: dict, pair: Pair, own: list[int], theirs: list[int]) -> Tensor:
    log_a = log_likelihood(pair.w, pair.y, theirs) / term["temperature"]
    log_b = log_likelihood(pair.z, pair.x, own) / term["temperature"]
    return -term["temperature"] * (log_a.exp() * log_b + (1 - log_a.exp()) * torch.log(-torch.expm1(log_b)))


# --- §10: sampled tokens and chunks


def sampled_kl(term: dict, pair: Pair) -> Iterator[Unit]:
    for own, theirs in pair.aligned() if pair.chunks else [([i], [i]) for i in pair.scored]:
        s, t = log_likelihood(pair.z, pair.x, own), log_likelihood(pair.w, pair.y, theirs)
        k3 = torch.exp(t - s) - 1 + s - t
        estimate = {"k1": s - t, "k2": (s - t) ** 2 / 2, "k3": k3}[term["estimator"]]
        log_ratio = s - sum(pair.behaviour[i] for i in own)
        yield estimate if term["update"] == "direct" else clipped(term, log_ratio, -estimate.detach()), k3.detach()


def clipped(term: dict, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """−min(r A, clip(r) A), of a negative A dual_clip · |A| at most."""
    r = log_ratio.exp()
    gain = torch.minimum(r * advantage, r.clamp(1 - term["clip_low"], 1 + term["clip_high"]) * advantage)
    if term["dual_clip"] is not None and advantage < 0:
        gain = torch.maximum(gain, term["dual_clip"] * advantage)
    return -gain
