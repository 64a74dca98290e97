"""What `quality.py` compares: each setting is a name, what a run adds to the demo for it, and one line about it."""

from dataclasses import dataclass
from typing import Literal

Group = Literal["control", "one teacher", "two teachers"]


@dataclass(frozen=True)
class Setting:
    name: str
    """Of its row and of its folder."""
    group: Group
    overrides: tuple[str, ...]
    """Hydra overrides beside those of `COMMON`, the seed and the number of steps."""
    about: str


COMMON = (
    "cluster.device=cpu",
    "cluster.cpu_ranks=1",
    "train.global_batch_size=8",
    "train.validate_every=null",
    "train.save_every=null",
    "loss.normalizer=student_tokens",
)
"""Of every run. Half the demo's batch; validated before the first and after the last step."""

STEPS = 120
CONTROL = "ce_only"
ONE, TWO = "teachers=demo_single", "teachers=demo_multi"

SETTINGS = (
    Setting(CONTROL, "control", (ONE, "loss.kd_weight=0"), "cross-entropy with the text, no teacher"),
    Setting("p_kl", "one teacher", (ONE, "loss=p_kl"), "projected, covered columns, first position"),
    Setting("p_kl_mean", "one teacher", (ONE, "loss=p_kl", "loss.merge=mean"), "p_kl over all positions of a chunk"),
    Setting("p_kl_reverse", "one teacher", (ONE, "loss=p_kl", "loss.divergence=reverse_kl"), "p_kl with reverse KL"),
    Setting("p_kl_jsd", "one teacher", (ONE, "loss=p_kl", "loss.divergence=jsd"), "p_kl with JSD, β = 0.5"),
    Setting(
        "p_kl_continuation",
        "one teacher",
        (ONE, "loss=p_kl", "loss.continuation_weight=1"),
        "p_kl, and the continuation of each chunk",
    ),
    Setting(
        "p_kl_learned",
        "one teacher",
        (ONE, "loss=p_kl", "+teachers.0.projection_lr=0.1"),
        "p_kl that learns the weights of the projection",
    ),
    Setting("gold", "one teacher", (ONE, "loss=gold"), "exact pairs, and the tails by rank"),
    Setting(
        "gold_continuation",
        "one teacher",
        (ONE, "loss=gold", "loss.continuation_weight=1"),
        "gold, and the continuation of each chunk",
    ),
    Setting("h_kl", "one teacher", (ONE, "loss=h_kl"), "gold on the pairs of the projection"),
    Setting("strict", "one teacher", (ONE, "loss=strict"), "exact pairs, at tokens that are such a pair"),
    Setting("byte_prefix", "one teacher", (ONE, "loss=byte_prefix"), "the teacher brought to the student's vocabulary"),
    Setting("shared_prefix", "one teacher", (ONE, "loss=shared_prefix"), "both sides on the vocabulary they share"),
    Setting("alm", "one teacher", (ONE, "loss=alm"), "the likelihood of each chunk"),
    Setting("uld", "one teacher", (ONE, "loss=uld"), "probabilities by rank"),
    *(
        Setting(
            f"{loss}_by_chunk",
            "one teacher",
            (ONE, f"loss={loss}", "loss.normalizer=units"),
            f"{loss} divided by chunks, not by tokens",
        )
        for loss in ("p_kl", "gold", "byte_prefix")
    ),
    Setting("two_weighted", "two teachers", (TWO,), "p_kl and same_vocab, half each"),
    Setting(
        "two_bits_per_byte",
        "two teachers",
        (TWO, "aggregation.weights=bits_per_byte"),
        "weights by each teacher's bits per byte of the batch",
    ),
    Setting(
        "two_select",
        "two teachers",
        (TWO, "aggregation=select_teacher"),
        "the teacher with the fewest bits per byte of a sequence",
    ),
)
