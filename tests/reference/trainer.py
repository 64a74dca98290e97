"""Distillation as METHODS §6, §7 and §10 say, the plain way: one process, one sequence at a time, no padding, float64.

A run is a dict of plain values. Of this package nothing is imported, so an error here and there cannot be the same one.
"""

import math
import statistics
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.reference.losses import Maps, Pair, clipped, log_likelihood, top, units

ZERO = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Text:
    row: dict  # one sequence, as the run has it
    z: Tensor  # [S, V]: the student's logits
    w: list[Tensor]  # of each teacher [T, W]

    def scored(self, i: int | None = None) -> list[int]:
        """Tokens that count, of the student or of teacher i; token 0 has no prediction."""
        own = self.row if i is None else self.row["teachers"][i]
        return [j for j in range(1, len(own["ids"])) if own["scored"][j]]


def load(path: str, nudge: float) -> PreTrainedModel:
    model, generator = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data *= 1 + nudge * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def train(run: dict, nudge: float = 0.0) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The curve and the weights. nudge: a random change of all weights, which shows what their rounding may do."""
    student, teachers = load(run["student"]["model"], nudge).train(), [load(t["model"], nudge) for t in run["teachers"]]
    optimizer, curve = torch.optim.AdamW(student.parameters(), foreach=False, **run["optimizer"]), []
    for step, rows in enumerate(run["batches"]):
        loss, point = objective(run, [read(run, student, teachers, row) for row in rows])
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in student.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        for g in gradients:
            g *= min(1.0, (run["gradient_clip"] or math.inf) / norm) if norm else 1.0
        optimizer.param_groups[0]["lr"] = rate = run["optimizer"]["lr"] * schedule(
            **run["scheduler"], step=step, run=run
        )
        optimizer.step()
        curve.append(point | {"loss": float(loss.detach()), "grad_norm": norm, "lr": rate})
    return curve, {name: value.detach() for name, value in student.state_dict().items()}


def schedule(type: str, warmup_steps: int, min_lr_ratio: float, step: int, run: dict) -> float:
    if step < warmup_steps:
        return step / warmup_steps
    done = (step - warmup_steps) / max(1, run["total_steps"] - warmup_steps)
    cosine = min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2
    return {"constant": 1.0, "linear": 1 - done, "cosine": cosine}[type]


def read(run: dict, student: PreTrainedModel, teachers: list[PreTrainedModel], row: dict) -> Text:
    def logits(model: PreTrainedModel, ids: list[int], side: dict) -> Tensor:
        """A teacher that is not asked has no token to read."""
        return model(input_ids=torch.tensor([ids or [0]])).logits[0, :, : side["vocab_size"]]

    with torch.no_grad():
        w = [logits(teachers[i], own["ids"], run["teachers"][i]) for i, own in enumerate(row["teachers"])]
    return Text(row, logits(student, row["ids"], run["student"]), w)


# --- §7: kd_weight · KD + ce_weight · CE, and §10: the policy's loss


def objective(run: dict, batch: list[Text]) -> tuple[Tensor, dict[str, float]]:
    loss, of_dataset = run["loss"], [(one, i) for one in batch if not one.row["sampled"] for i in one.scored()]
    ce = -sum((log_likelihood(one.z, one.row["ids"], [i]) for one, i in of_dataset), ZERO) / max(1, len(of_dataset))
    distilled, point = kd(run, batch) if run["teachers"] else (ZERO, {})
    total = loss["ce_weight"] * ce + loss["kd_weight"] * distilled
    if loss["type"] == "grpo":
        policy, number = ZERO, 0
        for one in (one for one in batch if one.row["sampled"]):
            for i in one.scored():
                log_ratio = log_likelihood(one.z, one.row["ids"], [i]) - one.row["behaviour"][i]
                policy, number = policy + clipped(loss, log_ratio, advantage(loss, one, batch)), number + 1
        total = total + loss["policy_weight"] * policy / max(1, number)
        point["policy/loss"] = float(policy.detach()) / max(1, number)
    return total, point | {"ce": float(ce.detach()), "kd": float(distilled.detach())}


def kd(run: dict, batch: list[Text]) -> tuple[Tensor, dict[str, float]]:
    """§6; the part of a teacher is divided by its units in the global batch, and reported as their plain mean."""
    kind, teachers, sums, counts, point = run["aggregation"]["type"], run["teachers"], [], [], {}
    if kind == "averaged_logits":
        shares = [teacher["weight"] / sum(each["weight"] for each in teachers) for teacher in teachers]
        batch = [replace(one, w=[sum(a * w for a, w in zip(shares, one.w, strict=True))]) for one in batch]
        teachers = teachers[:1]
    choice = chosen(run["aggregation"], batch)
    for i, teacher in enumerate(teachers):
        term, mine = teacher["term"], [one for one, c in zip(batch, choice, strict=True) if c in (None, i)]
        pairs = [pair(one, i, teacher["maps"]) for one in mine]
        part, count, reported, kept = ZERO, 0.0, [], importance(term, pairs)
        for one, each in zip(mine, pairs, strict=True):
            found, rollout, weight = units(term, each, kept), rollout_weight(run, i, one, batch), say(run, i, one)
            number = len(found)
            value = sum((loss for loss, _ in found), ZERO)
            if term["type"] == "tcad" and found:
                value, number = value / number, 1
            part, count = part + weight * rollout * value, count + rollout * number
            reported += [float(shown) for _, shown in found if weight * rollout]
        sums.append(part)
        counts.append(count)
        if reported and kind != "averaged_logits":
            point[f"kd/{teacher['name']}"] = statistics.fmean(reported)
    if kind in ("select_teacher", "routed"):
        counts = [sum(counts)] * len(counts)
    return sum(part / (count or 1) for part, count in zip(sums, counts, strict=True)), point


def pair(one: Text, i: int, maps: dict | None) -> Pair:
    row, own = one.row, one.row["teachers"][i]
    size = min(one.z.shape[1], one.w[i].shape[1]) if own["chunks"] is None else None
    behaviour = row["behaviour"] if row["sampled"] else None
    tokens = row["ids"], own["ids"], one.scored(), own["chunks"], behaviour
    return Pair(one.z[:, :size], one.w[i][:, :size], *tokens, None if maps is None else Maps(**maps))


def importance(term: dict, pairs: list[Pair]) -> list[int] | None:
    """vocab_topk of p_kl: the covered columns with the largest teacher logits at compared positions."""
    if not (term.get("vocab_topk") and pairs):
        return None
    last = None if term["merge"] == "mean" else 1
    rows = [each.w[j - 1] for each in pairs for _, theirs in each.aligned() for j in theirs[:last]]
    covered = pairs[0].maps.R.any(0)
    return top(torch.stack(rows).amax(0).masked_fill(~covered, -math.inf), min(term["vocab_topk"], int(covered.sum())))


# --- §6: how sure a teacher is, in bits per byte of its own tokens with text


def bits_per_byte(kind: str, texts: list[Text], i: int) -> float:
    bits, num_bytes = 0.0, 0
    for one in texts:
        own = one.row["teachers"][i]
        for j in one.scored(i):
            log_q = one.w[i][j - 1].log_softmax(0)
            nats = {"entropy": -(log_q.exp() * log_q).sum(), "max_probability": -log_q.max()}
            bits += float(nats.get(kind, -log_q[own["ids"][j]])) / math.log(2) if own["num_bytes"][j] else 0.0
            num_bytes += own["num_bytes"][j]
    return bits / num_bytes if num_bytes else math.inf


def chosen(aggregation: dict, batch: list[Text]) -> list[int | None]:
    if aggregation["type"] == "routed":
        return [one.row["route"] for one in batch]
    if aggregation["type"] != "select_teacher":
        return [None] * len(batch)
    groups = [batch] * len(batch) if aggregation["per"] == "batch" else [[one] for one in batch]
    bits = [[bits_per_byte("", group, i) for i in range(len(batch[0].w))] for group in groups]
    return [each.index(min(each)) for each in bits]


def say(run: dict, i: int, one: Text) -> float:
    """Weight of teacher i in a sequence."""
    aggregation, teachers = run["aggregation"], run["teachers"]
    if aggregation["type"] != "weighted_sum":
        return 1.0
    sizes, kind = [math.log(teacher["vocab_size"]) for teacher in teachers], aggregation["weights"]
    factor = sizes[i] / min(sizes) if aggregation["vocabulary_scaling"] else 1.0
    if kind == "static":
        return factor * teachers[i]["weight"]
    bits = [bits_per_byte(kind, [one], j) for j in range(len(teachers))]
    scores = [2**-b if kind == "max_probability" else -b for b in bits]
    powers = [
        teacher["weight"] * (math.exp(aggregation["alpha"] * score) if b < math.inf else 0.0)
        for teacher, score, b in zip(teachers, scores, bits, strict=True)
    ]
    if min(bits) == math.inf:
        powers = [teacher["weight"] for teacher in teachers]
    return factor * powers[i] / sum(powers)


# --- §10: the rollouts of a prompt


def rollout_weight(run: dict, i: int, one: Text, batch: list[Text]) -> float:
    """n · softmax(reward / β), or softmax(power_alpha · the teacher's mean log-probability)."""
    alpha, beta = run["teachers"][i]["term"].get("power_alpha"), run["weighting_beta"]
    if not one.row["sampled"] or (alpha is None and beta is None):
        return 1.0
    group = [each for each in batch if each.row["prompt"] == one.row["prompt"]]
    if beta is not None:
        return (
            len(group) * math.exp(one.row["reward"] / beta) / sum(math.exp(each.row["reward"] / beta) for each in group)
        )

    def power(each: Text) -> float:
        log_q = log_likelihood(each.w[i], each.row["ids"], each.scored())
        return math.exp(alpha * float(log_q) / len(each.scored()))

    return power(one) / sum(map(power, group))


def advantage(loss: dict, one: Text, batch: list[Text]) -> Tensor:
    rewards = [each.row["reward"] for each in batch if each.row["prompt"] == one.row["prompt"]]
    if min(rewards) == max(rewards):
        return ZERO
    scale = statistics.stdev(rewards) + 1e-6 if loss["scale_advantages"] else 1.0
    return ZERO + (one.row["reward"] - statistics.fmean(rewards)) / scale
