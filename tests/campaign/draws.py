"""Random draws of all that a run depends on: ranks, models and settings. A seed gives the same draw on any machine."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.campaign.models import FAMILIES, MORE, SOFT_CAPPED, TOKENIZERS, ModelDraw, save_tokenizer

SAME, CROSS = (
    ("same_vocab", "tcad", "sampled_kl"),
    (
        "p_kl",
        "gold",
        "h_kl",
        "strict",
        "byte_prefix",
        "shared_prefix",
        "alm",
        "uld",
        "sampled_kl",
    ),
)
BATCH = 6
"""Sequences in a batch; one, two and three ranks divide it."""
STEPS = 3


@dataclass(frozen=True)
class Draw:
    seed: int
    world: int
    dtype: str
    """With float64, master weights and the sums of gradients over ranks are still float32."""
    student: ModelDraw
    teachers: tuple[ModelDraw, ...]
    settings: dict[str, Any]
    """Settings of the run without models and data."""

    @property
    def on_policy(self) -> bool:
        return "rollout" in self.settings

    def __str__(self) -> str:
        return "\n".join(
            [
                f"seed {self.seed}: {self.world} ranks, {self.dtype}; again: NEMO_OPD_CAMPAIGN=1 "
                f"NEMO_OPD_CAMPAIGN_FIRST={self.seed} uv run pytest -m nightly -n 0 tests/campaign",
                f"student {self.student}",
                *(f"teacher {i} {teacher}" for i, teacher in enumerate(self.teachers)),
                *(f"{key}={value}" for key, value in self.settings.items()),
            ]
        )


def draw(seed: int) -> Draw:
    pick = random.Random(seed)
    world = pick.choice((1, 2, 2, 3, 3))
    on_policy = pick.random() < 0.4
    student = model(pick, pick.choice(TOKENIZERS), world)
    number = pick.choice((1, 2, 2, 3))
    aggregation = pick.choice(
        ("static", "static", "bits_per_byte", "entropy", "max_probability", "sequence", "batch", "routed", "averaged")
    )
    if aggregation != "static":
        number = max(number, 2)
    teachers, entries = [], []
    main = pick.choice([kind for kind in (*SAME, *CROSS, "grpo") if on_policy or kind not in ("sampled_kl", "grpo")])
    weight = pick.choice((0.3, 1.0, 2.0))
    for i in range(number):
        only_same = aggregation == "averaged" or main in ("same_vocab", "tcad", "grpo")
        is_same = (only_same and pick.random() < 0.8) or aggregation == "averaged" or pick.random() < 0.35
        if i == 0 and main in CROSS and main != "sampled_kl":
            is_same = aggregation == "averaged"
        other_tokenizers = [name for name in TOKENIZERS if name != student.tokenizer]
        teacher = model(pick, student.tokenizer if is_same else pick.choice(other_tokenizers), world)
        teachers.append(teacher)
        entry: dict[str, Any] = {
            "name": f"t{i}",
            "type": "same_tokenizer" if is_same else "cross_tokenizer",
            "dtype": "float32",
            "parallelism": parallelism(pick, world),
            "weight": weight if aggregation in ("sequence", "batch", "routed") else pick.choice((0.3, 1.0, 2.0)),
        }
        needs_own_loss = not is_same and main in ("same_vocab", "tcad", "grpo")
        if aggregation != "averaged" and (needs_own_loss or pick.random() < 0.3):
            kinds = SAME if is_same else CROSS
            entry["loss"] = term(pick, pick.choice(kinds if on_policy else [k for k in kinds if k != "sampled_kl"]))
        entries.append(entry)
    loss = grpo(pick) if main == "grpo" else term(pick, main)
    loss |= {"kd_weight": pick.choice((0.5, 1.0)), "ce_weight": pick.choice((0.0, 0.4, 1.0))}
    student_layout = parallelism(pick, world)
    is_shared = all(layout["tp"] == world for layout in (student_layout, *(entry["parallelism"] for entry in entries)))
    sizes = [size for size in (1, 2, 3, BATCH) if (BATCH if is_shared else BATCH // world) % size == 0]
    settings: dict[str, Any] = {
        "train": {
            "max_steps": STEPS,
            "global_batch_size": BATCH,
            "micro_batch_size": pick.choice(sizes),
            "max_length": pick.choice((24, 32, 48)),
            "gradient_clip": pick.choice((None, 0.05, 1.0)),
        },
        "student": {
            "parallelism": student_layout,
            "activation_checkpointing": pick.random() < 0.1,
            "optimizer": {
                "lr": 1e-2,
                "eps": 1e-3,
                "weight_decay": pick.choice((0.0, 0.1)),
                "betas": pick.choice(([0.9, 0.95], [0.0, 0.99])),
            },
            "scheduler": {
                "type": pick.choice(("cosine", "linear", "constant")),
                "warmup_steps": pick.choice((0, 0, 2)),
                "min_lr_ratio": pick.choice((0.0, 0.2)),
            },
        },
        "teachers": entries,
        "loss": loss,
        "aggregation": aggregated(pick, aggregation, number),
        "handoff": {"type": pick.choice(("hidden_states", "logits"))},
    }
    if settings["train"]["micro_batch_size"] < BATCH or student_layout["tp"] < world:
        for term_settings in (loss, *(entry.get("loss", {}) for entry in entries)):
            term_settings.pop(
                "vocab_topk", None
            )  # its columns depend on a rank's microbatch, which the reference does not know
    if on_policy:
        settings |= sampled(pick, main)
    later(random.Random(seed + 10**6), settings, on_policy)
    if main == "grpo" and loss["ce_weight"]:
        scaled(random.Random(seed + 3 * 10**6), loss)
    without_idle(settings, on_policy)
    student, *teachers = wider(random.Random(seed + 2 * 10**6), [student, *teachers])
    dtype = pick.choice(("float64", "float64", "float64", "float32"))
    return Draw(seed, world, dtype, student, tuple(teachers), settings)


def model(pick: random.Random, tokenizer: str, world: int) -> ModelDraw:
    family = pick.choice(tuple(FAMILIES))
    return ModelDraw(
        family,
        tokenizer,
        seed=pick.randrange(1000),
        kv_heads=pick.choice((6, 3) if world == 3 else (6, 2)),
        extra_rows=pick.choice((0, 0, 1, 20)),
        tied=pick.random() < 0.5,
        soft_cap=pick.choice((None, 2.0, 30.0)) if family in SOFT_CAPPED else None,
        std=pick.choice((0.15, 0.3, 0.5)),
    )


def parallelism(pick: random.Random, world: int) -> dict[str, Any]:
    tp = pick.choice((1, world))
    return {"tp": tp, "sequence_parallel": tp > 1 and pick.random() < 0.3}


def term(pick: random.Random, kind: str) -> dict[str, Any]:
    """Return a loss with its settings."""
    if kind == "sampled_kl":
        update = pick.choice(("policy_gradient", "policy_gradient", "direct"))
        estimator = pick.choice(("k2", "k3") if update == "direct" else ("k1", "k1", "k2", "k3"))
        return {"type": kind, "update": update, "estimator": estimator, "dual_clip": pick.choice((None, 1.5))}
    settings: dict[str, Any] = {"type": kind, "temperature": pick.choice((1.0, 1.0, 0.7, 2.0))}
    if kind in ("alm", "uld"):
        return settings
    settings |= divergence(pick)
    if kind == "same_vocab" and pick.random() < 0.6:
        settings |= {
            "support": pick.choice(("teacher_topk", "student_topk", "union")),
            "top_k": pick.choice((1, 8, 100, 1000)),
            "normalization": pick.choice(("full", "support", "rest", "rest")),
        }
        if settings["normalization"] == "support":
            settings["top_k"] = max(settings["top_k"], 2)  # one renormalised column is refused
    if kind == "tcad":
        settings |= {
            "support_size": pick.choice((1, 8, 100, 1000)),
            "support": pick.choice(("interleaved", "union")),
            "coverage_coef": pick.choice((0.0, 0.5, 1.0)),
            "power_alpha": pick.choice((None, 1.0, 3.0)),
        }
        if settings["coverage_coef"] == 0:
            settings["support_size"] = max(settings["support_size"], 2)
    if kind in CROSS:
        settings["continuation_weight"] = pick.choice((0.0, 0.0, 0.7))
    if kind == "p_kl":
        settings |= {"merge": pick.choice((None, None, "mean")), "coverage_coef": pick.choice((None, 0.0, 0.5))}
        settings["vocab_topk"] = pick.choice((None, None, 16, 5000))
    if kind in ("gold", "h_kl"):
        settings |= {
            "merge": pick.choice((None, None, "mean", "observed")),
            "common_weight": pick.choice((None, 0.5)),
            "uncommon_weight": pick.choice((None, 0.0, 2.0)),
            "uncommon_topk": pick.choice((None, 5)),
        }
    if kind == "strict":
        settings |= {"top_k": pick.choice((None, 4, 1000)), "normalization": pick.choice(("support", "rest"))}
    return settings


def divergence(pick: random.Random) -> dict[str, Any]:
    kind = pick.choice(("forward_kl", "forward_kl", "reverse_kl", "jsd", "mixed", "tvd"))
    return {"divergence": kind, "beta": pick.choice((0.0, 0.3, 1.0)), "mixed_weight": pick.choice((0.0, 0.4))}


def grpo(pick: random.Random) -> dict[str, Any]:
    return {
        "type": "grpo",
        "policy_weight": pick.choice((0.5, 1.0)),
        "dual_clip": pick.choice((None, 3.0)),
        "scale_advantages": pick.random() < 0.5,
        "temperature": pick.choice((1.0, 2.0)),
    } | divergence(pick)


def aggregated(pick: random.Random, kind: str, number: int) -> dict[str, Any]:
    if kind == "averaged":
        return {"type": "averaged_logits"}
    if kind == "routed":
        return {"type": "routed", "key": "from"}
    if kind in ("sequence", "batch"):
        return {"type": "select_teacher", "per": kind}
    scales = number > 1 and pick.random() < 0.2
    alpha = {} if kind == "static" else {"alpha": pick.choice((0.5, 3.0))}
    return {"type": "weighted_sum", "weights": kind, "vocabulary_scaling": scales} | alpha


def sampled(pick: random.Random, main: str) -> dict[str, Any]:
    rewarded = main == "grpo" or pick.random() < 0.3
    reward = {"type": "exact", "weighting_beta": pick.choice((None, 0.5))} if rewarded else None
    return {
        "rollout": {"type": "hf", "n": 2, "max_new_tokens": 12, "on_policy_share": 0.7},
        **({"reward": reward} if reward else {}),
    }


def later(pick: random.Random, settings: dict[str, Any], on_policy: bool) -> None:
    """Draw further settings. A separate generator keeps the draws above the same for each seed."""
    terms = [settings["loss"], *(entry["loss"] for entry in settings["teachers"] if "loss" in entry)]
    for term_settings in terms:
        if term_settings["type"] in ("sampled_kl", "grpo"):
            cap = pick.choice((None, 0.7, 2.0))
            level = "sequence" if cap and term_settings.get("update") != "direct" and pick.random() < 0.5 else "token"
            veto = pick.choice((None, None, 1e-3, 0.2))
            term_settings |= {"importance_cap": cap, "importance_level": level, "importance_veto": veto}
    if settings["loss"]["ce_weight"] and settings["loss"]["type"] != "grpo":
        scaled(pick, settings["loss"])
    if settings["aggregation"]["type"] in ("select_teacher", "routed"):
        for entry in settings["teachers"]:
            if entry["type"] == "same_tokenizer" and pick.random() < 0.4:
                entry["loss"] = term(pick, "tcad")
    for term_settings in terms:
        if term_settings["type"] in ("sampled_kl", *CROSS) and pick.random() < 0.4:
            term_settings["normalizer"] = "units"


def scaled(pick: random.Random, loss: dict[str, Any]) -> None:
    if pick.random() < 0.4:
        loss |= {"scaling": "dynamic", "scaling_decay": pick.choice((0.5, 0.99))}
        loss["scaling_cap"] = pick.choice((0.5, 100.0))


def wider(pick: random.Random, models: list[ModelDraw]) -> list[ModelDraw]:
    """Return the models, some with one token more than the tokenizer has otherwise."""
    return [replace(model, tokenizer=model.tokenizer + MORE) if pick.random() < 0.15 else model for model in models]


def without_idle(settings: dict[str, Any], on_policy: bool) -> None:
    """Remove settings that have no effect or do not go together, which validation refuses."""
    loss, entries, scheduler = settings["loss"], settings["teachers"], settings["student"]["scheduler"]
    aggregation = settings["aggregation"]
    is_scored = aggregation["type"] == "select_teacher" or aggregation.get("weights", "static") != "static"
    is_weighed = (settings.get("reward") or {}).get("weighting_beta") is not None
    if scheduler["type"] != "cosine":
        scheduler.pop("min_lr_ratio")
    for term_settings in (loss, *(entry["loss"] for entry in entries if "loss" in entry)):
        idle = {
            "beta": term_settings.get("divergence") != "jsd",
            "mixed_weight": term_settings.get("divergence") != "mixed",
            "uncommon_topk": term_settings.get("uncommon_weight") == 0,
            "dual_clip": term_settings.get("update") == "direct",
            "power_alpha": not on_policy,
        }
        for key in (key for key, is_idle in idle.items() if is_idle):
            term_settings.pop(key, None)
        if term_settings["type"] == "tcad" and on_policy and (is_scored or is_weighed):
            term_settings["power_alpha"] = None
    followers = {entry["type"] for entry in entries if "loss" not in entry}
    if loss["type"] in CROSS[:-1] and followers == {"same_tokenizer"}:
        for key in ("continuation_weight", "merge", "coverage_coef", "vocab_topk", "common_weight", "uncommon_weight",
                    "uncommon_topk", "top_k", "normalization", "normalizer"):  # fmt: skip
            loss.pop(key, None)


def with_models(drawn: Draw, folder: Path) -> dict[str, Any]:
    """Write the models to `folder` and return the settings with their paths."""

    def paths(model: ModelDraw) -> dict[str, Any]:
        return {"model": str(model.save(folder)), "tokenizer": str(save_tokenizer(model.tokenizer, folder))}

    settings = drawn.settings
    teachers = [entry | paths(teacher) for entry, teacher in zip(settings["teachers"], drawn.teachers, strict=True)]
    return settings | {"student": settings["student"] | paths(drawn.student), "teachers": teachers}
