"""Distillation of methods.md §6, §7 and §10: one process, one sequence at a time, no padding, float64.

A run is a dict of plain values. Nothing from nemo_opd is imported, so no error is in both.
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
    """Return the curve and the weights. nudge: size of a random change of all weights, which shows the effect of
    rounding.
    """
    student, teachers = load(run["student"]["model"], nudge).train(), [load(t["model"], nudge) for t in run["teachers"]]
    optimizer, curve = torch.optim.AdamW(student.parameters(), foreach=False, **run["optimizer"]), []
    for step, rows in enumerate(run["batches"]):
        loss, point = objective(run, [read(run, student, teachers, row) for row in rows], kd_scale(run["loss"], curve))
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in student.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        for g in gradients:
            # torch's clip_grad_norm_ has this divisor, which matters for small gradients.
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
    """Add the logits of the student (z) and of each teacher (w) to the row."""

    def logits(model: PreTrainedModel, sequence: Dict, settings: Dict) -> Tensor:
        return model(input_ids=torch.tensor([sequence["ids"]])).logits[0, :, : settings["vocab_size"]]

    with torch.no_grad():
        sides = [side | {"w": logits(teachers[i], side, run["teachers"][i])} for i, side in enumerate(row["teachers"])]
    return row | {"z": logits(student, row, run["student"]), "teachers": sides}


# --- §7: kd_weight · scale · KD + ce_weight · CE, and §10: the policy's loss


def objective(run: Dict, batch: list[Dict], scale: float) -> tuple[Tensor, dict[str, float]]:
    """Return the loss and the reported values; CE and KD are reported only if they have units."""
    loss, (distilled, point) = run["loss"], kd(run, batch)
    total = loss["kd_weight"] * scale * distilled
    from_data = [(text, i) for text in batch if not text["sampled"] for i in scored(text)]
    if from_data:
        ce = -sum(likelihood(*predicted(text["z"], text["ids"], [i])) for text, i in from_data) / len(from_data)
        total, point["ce"] = total + loss["ce_weight"] * ce, float(ce.detach())
    sampled = [(text, i) for text in batch if text["sampled"] for i in scored(text)]
    if loss["type"] == "grpo" and sampled:
        policy_loss = sum(policy(loss, text, [i], advantage(loss, text, batch)) for text, i in sampled) / len(sampled)
        total, point["policy/loss"] = total + loss["policy_weight"] * policy_loss, float(policy_loss.detach())
    return total, point


def kd_scale(loss: Dict, curve: list[dict[str, float]]) -> float:
    """Dynamic: EMA(CE) / |EMA(KD)| over the earlier steps with both."""
    both = [point for point in reversed(curve) if "ce" in point and "kd" in point]
    if loss["scaling"] == "fixed" or not both:
        return 1.0
    ce, kd = (sum(loss["scaling_decay"] ** age * point[key] for age, point in enumerate(both)) for key in ("ce", "kd"))
    return min(loss["scaling_cap"], ce / abs(kd)) if kd else loss["scaling_cap"]


def kd(run: Dict, batch: list[Dict]) -> tuple[Tensor, dict[str, float]]:
    """§6: a mean for each teacher or, if each text has one teacher, for each kind of unit, weighted by the texts.

    A teacher's part is reported as the plain mean of its units.
    """
    aggregation, teachers, parts, point = run["aggregation"]["type"], run["teachers"], [], {}
    if aggregation == "averaged_logits":
        batch, teachers = [averaged(run, text) for text in batch], teachers[:1]
    is_shared, choice = aggregation in ("select_teacher", "routed"), select_teachers(run["aggregation"], batch)
    for i, teacher in enumerate(teachers):
        term, reported = teacher["term"], []
        kind = "place" if term["type"] != "tcad" else "sequence" if term["power_alpha"] is None else "prompt"
        pairs = [(text, text["teachers"][i]) for text, c in zip(batch, choice, strict=True) if c in (None, i)]
        maps = (teacher["maps"] or {}) | {"kept": kept_columns(teacher, pairs)}
        for text, side in pairs:
            size = min(side["w"].shape[1], text["z"].shape[1]) if teacher["is_same"] else None
            values = units(term, text | {"z": text["z"][:, :size]}, side | {"w": side["w"][:, :size]}, maps)
            rollout, weight = rollout_weight(run, i, text, batch), teacher_weight(run, i, text)
            number = len(values) if kind == "place" else min(1, len(values))
            value = rollout * weight * sum(trained for trained, _ in values) * number / max(1, len(values))
            count = len(scored(text)) if values and term.get("normalizer") == "student_tokens" else number
            parts.append((kind if is_shared else i, value, rollout * count, values != []))
            reported += [float(reported_value) for _, reported_value in values if weight * rollout]
        if reported and aggregation != "averaged_logits":
            point[f"kd/{teacher['name']}"] = statistics.fmean(reported)
    total, num_texts = torch.zeros(()), sum(has_units for *_, has_units in parts)
    for group in {group for group, *_ in parts}:
        _, group_values, counts, group_texts = zip(*(part for part in parts if part[0] == group), strict=True)
        share = sum(group_texts) / max(1, num_texts) if is_shared else 1.0
        total = total + share * sum(group_values) / (sum(counts) or 1.0)
    return total, point | ({"kd": float(total.detach())} if num_texts else {})


def averaged(run: Dict, text: Dict) -> Dict:
    weights, size = [t["weight"] for t in run["teachers"]], min(side["w"].shape[1] for side in text["teachers"])
    w = sum(a * side["w"][:, :size] for a, side in zip(weights, text["teachers"], strict=True)) / sum(weights)
    return text | {"teachers": [text["teachers"][0] | {"w": w}]}


def kept_columns(teacher: Dict, texts: list[tuple[Dict, Dict]]) -> list[int]:
    """vocab_topk of p_kl: the covered columns with the largest teacher logits at compared positions."""
    last = None if teacher["term"].get("merge") == "mean" else 1
    rows = [w[:last].amax(0) for text, side in texts for *_, w in aligned(text, side)]
    if not (rows and teacher["term"].get("vocab_topk")):
        return []
    covered = teacher["maps"]["R"].any(0)
    largest = torch.stack(rows).amax(0).masked_fill(~covered, -math.inf)
    return top(largest, min(teacher["term"]["vocab_topk"], int(covered.sum())))


# --- §6: a teacher's certainty, in bits per byte of the tokens that all models of a text predict


def bits_per_byte(kind: str, texts: list[Dict], i: int) -> float:
    bits, num_bytes = 0.0, 0
    for text in texts:
        side, shared = text["teachers"][i], shared_tokens(text)
        reached = {side["chunks"][0][j] for j in shared}
        for j in (j for j, chunk in enumerate(side["chunks"][1]) if chunk in reached and side["num_bytes"][j]):
            log_q = side["w"][j - 1].log_softmax(0)
            nats = {"entropy": -(log_q.exp() * log_q).sum(), "max_probability": -log_q.max()}
            bits += float(nats.get(kind, -log_q[side["ids"][j]])) / math.log(2)
            num_bytes += side["num_bytes"][j]
    return bits / num_bytes if num_bytes else math.inf


def shared_tokens(text: Dict) -> set[int]:
    """Return the student's tokens in spans, between common boundaries of all models, that every model
    predicts fully.
    """
    chunks = [side["chunks"][0] for i, side in enumerate(text["teachers"]) if text["route"] in (None, i)]
    ids = {i for i in scored(text) if min(side[i] for side in chunks) >= 0}
    while broken := {i for i in ids for side in chunks for j, c in enumerate(side) if c == side[i] and j not in ids}:
        ids -= broken
    return ids


def select_teachers(aggregation: Dict, batch: list[Dict]) -> list[int | None]:
    if aggregation["type"] != "select_teacher":
        return [text["route"] for text in batch]
    groups = [batch] * len(batch) if aggregation["per"] == "batch" else [[text] for text in batch]
    bits = [[bits_per_byte("", group, i) for i in range(len(batch[0]["teachers"]))] for group in groups]
    return [group_bits.index(min(group_bits)) for group_bits in bits]


def teacher_weight(run: Dict, i: int, text: Dict) -> float:
    """Return teacher i's weight in a sequence."""
    aggregation, teachers = run["aggregation"], run["teachers"]
    if aggregation["type"] != "weighted_sum":
        return 1.0
    sizes, kind = [math.log(teacher["vocab_size"]) for teacher in teachers], aggregation["weights"]
    factor = sizes[i] / min(sizes) if aggregation["vocabulary_scaling"] else 1.0
    weights = [teacher["weight"] for teacher in teachers]
    if kind == "static":
        return factor * weights[i]
    bits = [bits_per_byte(kind, [text], j) for j in range(len(teachers))]
    if min(bits) < math.inf:
        scores = [2**-b if kind == "max_probability" else -b for b in bits]
        weights = [prior * math.exp(aggregation["alpha"] * score) for prior, score in zip(weights, scores, strict=True)]
    return factor * weights[i] / sum(weights)


# --- §10: the rollouts of a prompt


def rollout_weight(run: Dict, i: int, text: Dict, batch: list[Dict]) -> float:
    """n · softmax(reward / β), or softmax(power_alpha · the teacher's mean log-probability)."""
    alpha, beta = run["teachers"][i]["term"].get("power_alpha"), run["weighting_beta"]
    if not text["sampled"] or (alpha is None and beta is None):
        return 1.0

    def power(rollout: Dict) -> float:
        if beta is not None:
            return math.exp(rollout["reward"] / beta)
        log_q = likelihood(*predicted(rollout["teachers"][i]["w"], rollout["ids"], scored(rollout)))
        return math.exp(alpha * float(log_q) / len(scored(rollout)))

    powers = [power(rollout) for rollout in batch if rollout["prompt"] == text["prompt"]]
    return power(text) / sum(powers) * (1 if beta is None else len(powers))


def advantage(loss: Dict, text: Dict, batch: list[Dict]) -> float:
    rewards = [rollout["reward"] for rollout in batch if rollout["prompt"] == text["prompt"]]
    scale = statistics.stdev(rewards) + 1e-6 if loss["scale_advantages"] else 1.0
    return (text["reward"] - statistics.fmean(rewards)) / scale
