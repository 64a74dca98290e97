"""Distillation as methods.md §6, §7 and §10 say, plainly: one process, one sequence at a time, no padding, float64.

A run is a dict of plain values. Of this package nothing is imported, so an error here and there cannot be the same one.
"""

import math
import statistics

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.reference.losses import Dict, aligned, likelihood, policy, predicted, scored, top, units


def load(path: str, nudge: float) -> PreTrainedModel:
    model, generator = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data *= 1 + nudge * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def train(run: Dict, nudge: float = 0.0) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The curve and the weights. nudge: a random change of all weights, which shows what their rounding may do."""
    student, teachers = load(run["student"]["model"], nudge).train(), [load(t["model"], nudge) for t in run["teachers"]]
    optimizer, curve = torch.optim.AdamW(student.parameters(), foreach=False, **run["optimizer"]), []
    for step, rows in enumerate(run["batches"]):
        loss, point = objective(run, [read(run, student, teachers, row) for row in rows], kd_scale(run["loss"], curve))
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in student.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        for g in gradients:
            # The divisor is that of torch's clip_grad_norm_, which matters where gradients are small.
            g *= min(1.0, (run["gradient_clip"] or math.inf) / (norm + 1e-6))
        optimizer.param_groups[0]["lr"] = rate = learning_rate(run, step)
        optimizer.step()
        curve.append(point | {"loss": float(loss.detach()), "grad_norm": norm, "lr": rate})
    return curve, {name: value.detach() for name, value in student.state_dict().items()}


def learning_rate(run: Dict, step: int) -> float:
    warmup, low, peak = run["scheduler"]["warmup_steps"], run["scheduler"]["min_lr_ratio"], run["optimizer"]["lr"]
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, run["total_steps"] - warmup)
    cosine = low + (1 - low) * (1 + math.cos(math.pi * done)) / 2
    return peak * {"constant": 1.0, "linear": 1 - done, "cosine": cosine}[run["scheduler"]["type"]]


def read(run: Dict, student: PreTrainedModel, teachers: list[PreTrainedModel], row: Dict) -> Dict:
    """The row with the logits of the student (z) and of each teacher (w)."""

    def logits(model: PreTrainedModel, text: Dict, side: Dict) -> Tensor:
        return model(input_ids=torch.tensor([text["ids"]])).logits[0, :, : side["vocab_size"]]

    with torch.no_grad():
        sides = [own | {"w": logits(teachers[i], own, run["teachers"][i])} for i, own in enumerate(row["teachers"])]
    return row | {"z": logits(student, row, run["student"]), "teachers": sides}


# --- §7: kd_weight · scale · KD + ce_weight · CE, and §10: the policy's loss


def objective(run: Dict, batch: list[Dict], scale: float) -> tuple[Tensor, dict[str, float]]:
    """The loss and what is reported; of CE and KD nothing where they have no unit."""
    loss, (distilled, point) = run["loss"], kd(run, batch)
    total = loss["kd_weight"] * scale * distilled
    of_dataset = [(one, i) for one in batch if not one["sampled"] for i in scored(one)]
    if of_dataset:
        ce = -sum(likelihood(*predicted(one["z"], one["ids"], [i])) for one, i in of_dataset) / len(of_dataset)
        total, point["ce"] = total + loss["ce_weight"] * ce, float(ce.detach())
    sampled = [(one, i) for one in batch if one["sampled"] for i in scored(one)]
    if loss["type"] == "grpo" and sampled:
        found = sum(policy(loss, one, [i], advantage(loss, one, batch)) for one, i in sampled) / len(sampled)
        total, point["policy/loss"] = total + loss["policy_weight"] * found, float(found.detach())
    return total, point


def kd_scale(loss: Dict, curve: list[dict[str, float]]) -> float:
    """Dynamic: EMA(CE) / |EMA(KD)| over the steps before that had both."""
    both = [point for point in reversed(curve) if "ce" in point and "kd" in point]
    if loss["scaling"] == "fixed" or not both:
        return 1.0
    ce, kd = (sum(loss["scaling_decay"] ** age * each[of] for age, each in enumerate(both)) for of in ("ce", "kd"))
    return min(loss["scaling_cap"], ce / abs(kd)) if kd else loss["scaling_cap"]


def kd(run: Dict, batch: list[Dict]) -> tuple[Tensor, dict[str, float]]:
    """§6: for each teacher; if each text has one teacher, for each kind of unit, weighted by their texts.

    The part of a teacher is reported as the plain mean of its units.
    """
    aggregation, teachers, parts, point = run["aggregation"]["type"], run["teachers"], [], {}
    if aggregation == "averaged_logits":
        batch, teachers = [averaged(run, one) for one in batch], teachers[:1]
    is_shared, choice = aggregation in ("select_teacher", "routed"), chosen(run["aggregation"], batch)
    for i, teacher in enumerate(teachers):
        term, reported = teacher["term"], []
        kind = "place" if term["type"] != "tcad" else "sequence" if term["power_alpha"] is None else "prompt"
        mine = [one for one, c in zip(batch, choice, strict=True) if c in (None, i)]
        maps = (teacher["maps"] or {}) | {"kept": kept_columns(teacher, [(one, one["teachers"][i]) for one in mine])}
        for one in mine:
            own = one["teachers"][i]
            size = min(own["w"].shape[1], one["z"].shape[1]) if teacher["is_same"] else None
            found = units(term, one | {"z": one["z"][:, :size]}, own | {"w": own["w"][:, :size]}, maps)
            rollout, weight = rollout_weight(run, i, one, batch), say(run, i, one)
            number = len(found) if kind == "place" else min(1, len(found))
            value = rollout * weight * sum(trained for trained, _ in found) * number / max(1, len(found))
            count = len(scored(one)) if found and term.get("normalizer") == "student_tokens" else number
            parts.append((kind if is_shared else i, value, rollout * count, found != []))
            reported += [float(shown) for _, shown in found if weight * rollout]
        if reported and aggregation != "averaged_logits":
            point[f"kd/{teacher['name']}"] = statistics.fmean(reported)
    total, texts = torch.zeros(()), sum(has_units for *_, has_units in parts)
    for group in {group for group, *_ in parts}:
        _, values, counts, of_kind = zip(*(part for part in parts if part[0] == group), strict=True)
        share = sum(of_kind) / max(1, texts) if is_shared else 1.0
        total = total + share * sum(values) / (sum(counts) or 1.0)
    return total, point | ({"kd": float(total.detach())} if texts else {})


def averaged(run: Dict, one: Dict) -> Dict:
    weights, size = [t["weight"] for t in run["teachers"]], min(own["w"].shape[1] for own in one["teachers"])
    w = sum(a * own["w"][:, :size] for a, own in zip(weights, one["teachers"], strict=True)) / sum(weights)
    return one | {"teachers": [one["teachers"][0] | {"w": w}]}


def kept_columns(teacher: Dict, texts: list[tuple[Dict, Dict]]) -> list[int]:
    """vocab_topk of p_kl: the covered columns with the largest teacher logits at compared positions."""
    last = None if teacher["term"].get("merge") == "mean" else 1
    rows = [w[:last].amax(0) for one, own in texts for *_, w in aligned(one, own)]
    if not (rows and teacher["term"].get("vocab_topk")):
        return []
    covered = teacher["maps"]["R"].any(0)
    largest = torch.stack(rows).amax(0).masked_fill(~covered, -math.inf)
    return top(largest, min(teacher["term"]["vocab_topk"], int(covered.sum())))


# --- §6: how sure a teacher is, in bits per byte of what all models of a text predict


def bits_per_byte(kind: str, texts: list[Dict], i: int) -> float:
    bits, num_bytes = 0.0, 0
    for one in texts:
        own, both = one["teachers"][i], whole(one)
        reached = {own["chunks"][0][j] for j in both}
        for j in (j for j, chunk in enumerate(own["chunks"][1]) if chunk in reached and own["num_bytes"][j]):
            log_q = own["w"][j - 1].log_softmax(0)
            nats = {"entropy": -(log_q.exp() * log_q).sum(), "max_probability": -log_q.max()}
            bits += float(nats.get(kind, -log_q[own["ids"][j]])) / math.log(2)
            num_bytes += own["num_bytes"][j]
    return bits / num_bytes if num_bytes else math.inf


def whole(one: Dict) -> set[int]:
    """The student's tokens in stretches, between places where all models cut the text, that each of them predicts."""
    chunks = [own["chunks"][0] for i, own in enumerate(one["teachers"]) if one["route"] in (None, i)]
    kept = {i for i in scored(one) if min(side[i] for side in chunks) >= 0}
    while broken := {i for i in kept for side in chunks for j, c in enumerate(side) if c == side[i] and j not in kept}:
        kept -= broken
    return kept


def chosen(aggregation: Dict, batch: list[Dict]) -> list[int | None]:
    if aggregation["type"] != "select_teacher":
        return [one["route"] for one in batch]
    groups = [batch] * len(batch) if aggregation["per"] == "batch" else [[one] for one in batch]
    bits = [[bits_per_byte("", group, i) for i in range(len(batch[0]["teachers"]))] for group in groups]
    return [each.index(min(each)) for each in bits]


def say(run: Dict, i: int, one: Dict) -> float:
    """Weight of teacher i in a sequence."""
    aggregation, teachers = run["aggregation"], run["teachers"]
    if aggregation["type"] != "weighted_sum":
        return 1.0
    sizes, kind = [math.log(teacher["vocab_size"]) for teacher in teachers], aggregation["weights"]
    factor = sizes[i] / min(sizes) if aggregation["vocabulary_scaling"] else 1.0
    says = [teacher["weight"] for teacher in teachers]
    if kind == "static":
        return factor * says[i]
    bits = [bits_per_byte(kind, [one], j) for j in range(len(teachers))]
    if min(bits) < math.inf:
        scores = [2**-b if kind == "max_probability" else -b for b in bits]
        says = [prior * math.exp(aggregation["alpha"] * score) for prior, score in zip(says, scores, strict=True)]
    return factor * says[i] / sum(says)


# --- §10: the rollouts of a prompt


def rollout_weight(run: Dict, i: int, one: Dict, batch: list[Dict]) -> float:
    """n · softmax(reward / β), or softmax(power_alpha · the teacher's mean log-probability)."""
    alpha, beta = run["teachers"][i]["term"].get("power_alpha"), run["weighting_beta"]
    if not one["sampled"] or (alpha is None and beta is None):
        return 1.0

    def power(each: Dict) -> float:
        if beta is not None:
            return math.exp(each["reward"] / beta)
        log_q = likelihood(*predicted(each["teachers"][i]["w"], each["ids"], scored(each)))
        return math.exp(alpha * float(log_q) / len(scored(each)))

    powers = [power(each) for each in batch if each["prompt"] == one["prompt"]]
    return power(one) / sum(powers) * (1 if beta is None else len(powers))


def advantage(loss: Dict, one: Dict, batch: list[Dict]) -> float:
    rewards = [each["reward"] for each in batch if each["prompt"] == one["prompt"]]
    scale = statistics.stdev(rewards) + 1e-6 if loss["scale_advantages"] else 1.0
    return (one["reward"] - statistics.fmean(rewards)) / scale
