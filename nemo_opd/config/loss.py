"""Terms of losses: what is compared with a teacher."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationInfo, field_validator

from nemo_opd.config.base import Settings
from nemo_opd.config.importance import ImportanceSettings

_Value = TypeVar("_Value")

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd", "mixed", "tvd"]


def _refused_unless(has_effect: bool, value: _Value, info: ValidationInfo, of: type[Settings], reason: str) -> _Value:
    """Return the value. Raises ValueError, with `reason`, if it is not the default and has no effect."""
    if not has_effect and value != of.model_fields[str(info.field_name)].default:
        raise ValueError(f"{value} has no effect with {reason}, or leave {info.field_name} out")
    return value


class DivergenceTerm(Settings):
    """Settings of every term with a divergence (methods.md §3)."""

    divergence: DivergenceKind = "forward_kl"
    """forward_kl: KL(teacher ‖ student); reverse_kl: KL(student ‖ teacher); jsd: between the two, by `beta`; mixed:
    their weighted sum, by `mixed_weight`; tvd: half the L1 distance (methods.md §3.1).
    """
    beta: float = Field(0.5, ge=0, le=1)
    """jsd: 0 is forward KL, 1 is reverse KL."""
    mixed_weight: float = Field(0.5, ge=0, le=1)
    """mixed: the share of forward KL."""
    temperature: float = Field(1.0, gt=0)
    """Applied to both sides; the term is multiplied by its square."""

    @field_validator("beta", "mixed_weight")
    @classmethod
    def weights_of_a_divergence_need_it(cls, weight: float, info: ValidationInfo) -> float:
        needed = {"beta": "jsd", "mixed_weight": "mixed"}[str(info.field_name)]
        divergence = info.data.get("divergence", needed)
        reason = f"divergence={divergence}; write divergence={needed}"
        return _refused_unless(divergence == needed, weight, info, cls, reason)


class SameVocabTerm(DivergenceTerm):
    """A divergence per position, for a teacher with the student's tokenizer (methods.md §4)."""

    type: Literal["same_vocab"] = "same_vocab"
    support: Literal["full", "teacher_topk", "student_topk", "union"] = "full"
    """Which tokens are compared: all, the `top_k` most likely of one side, or of either (methods.md §3.3)."""
    top_k: int | None = Field(None, ge=1)
    """A support other than full: tokens taken from a side."""
    normalization: Literal["full", "support", "rest"] = "rest"
    """A support other than full: what becomes of the tokens left out. rest: they are one cell together; support: both
    sides are renormalised without them; full: they are left out of the sum, for parity with systems that do so.
    """

    @field_validator("normalization")
    @classmethod
    def normalization_needs_a_truncated_support(cls, normalization: str, info: ValidationInfo) -> str:
        is_truncated = info.data.get("support") != "full"
        return _refused_unless(is_truncated, normalization, info, cls, "support=full; choose another support")

    @field_validator("normalization")
    @classmethod
    def one_token_is_not_renormalised(cls, normalization: str, info: ValidationInfo) -> str:
        if normalization == "support" and info.data.get("top_k") == 1 and info.data.get("support") != "union":
            raise ValueError(
                "support with top_k=1: one token renormalised has the probability 1 on both sides, so the loss is "
                "constant; raise top_k, or write normalization=rest"
            )
        return normalization

    @field_validator("top_k")
    @classmethod
    def truncated_support_needs_top_k(cls, top_k: int | None, info: ValidationInfo) -> int | None:
        if top_k is None and info.data.get("support", "full") != "full":
            support = info.data["support"]
            raise ValueError(
                f"required with support={support}; give the number of tokens to take from a side, such as 256"
            )
        return top_k

    @field_validator("top_k")
    @classmethod
    def top_k_needs_a_truncated_support(cls, top_k: int | None, info: ValidationInfo) -> int | None:
        if top_k is not None and info.data.get("support") == "full":
            raise ValueError(
                f"{top_k} has no effect with support=full; choose support=teacher_topk, student_topk or union, "
                "or leave top_k out"
            )
        return top_k


class NormalizedTerm(Settings):
    """Settings of terms that compare aligned chunks."""

    normalizer: Literal["units", "student_tokens"] = "units"
    """Divisor of the sum. units: chunks that are compared; student_tokens: the student's scored tokens in texts with
    such chunks, as cross-entropy has it, so that at equal weights a chunk counts as much as a token of cross-entropy
    (methods.md §7.1).
    """


class ChunkTerm(DivergenceTerm, NormalizedTerm):
    """Settings of terms that compare one pair of distributions a chunk."""

    continuation_weight: float = Field(0.0, ge=0)
    """Weight of the `alm` term of chunks with several tokens on a side, which is added."""


def _fixed_by_compat(value: object, info: ValidationInfo) -> object:
    """Return the value. Raises ValueError for a setting that the preset `compat` decides."""
    compat = info.data.get("compat")
    if compat is not None and value is not None:
        raise ValueError(f"compat={compat} decides it; leave {info.field_name} out, or compat")
    return value


class PKLTerm(ChunkTerm):
    """The student projected onto the teacher's vocabulary at each chunk's first position (methods.md §5.3)."""

    type: Literal["p_kl"] = "p_kl"
    compat: Literal["nemo_rl"] | None = None
    """System whose loss is reproduced, for parity."""
    merge: Literal["first", "mean"] | None = None
    """Positions of a chunk that are compared: the first, by default, or for parity the mean over all."""
    coverage_coef: float | None = Field(None, ge=0)
    """Weight of −log of the student's mass on covered teacher columns; 1 when not given."""
    vocab_topk: int | None = Field(None, ge=1)
    """Number of covered columns with their own cell, the most important ones; the others share one."""

    _preset = field_validator("merge", "coverage_coef")(_fixed_by_compat)

    @field_validator("vocab_topk")
    @classmethod
    def one_column_is_not_renormalised(cls, vocab_topk: int | None, info: ValidationInfo) -> int | None:
        if vocab_topk == 1 and info.data.get("compat") == "nemo_rl":
            raise ValueError(
                "1 with compat=nemo_rl: one column renormalised has the probability 1 on both sides, so the loss is "
                "constant; raise vocab_topk, or leave compat out, which compares the other columns as one cell"
            )
        return vocab_topk


class PairedTerm(ChunkTerm):
    """Settings of terms that compare matched tokens cell by cell and the others by rank."""

    compat: Literal["nemo_rl", "trl"] | None = None
    """System whose loss is reproduced, for parity."""
    merge: Literal["first", "mean", "observed"] | None = None
    """Positions of a chunk that are compared: the first, by default; for parity the mean over all, or the first times
    the probabilities of its further tokens (observed).
    """
    common_weight: float | None = Field(None, ge=0)
    """Weight of the divergence on matched tokens; 1 by default."""
    uncommon_weight: float | None = Field(None, ge=0)
    """Weight of the sorted L1 distance of the others; 1 by default."""
    uncommon_topk: int | None = Field(None, ge=1)
    """Others that are compared on either side, the likeliest; 8192 when not given."""

    _preset = field_validator("merge")(_fixed_by_compat)

    @field_validator("uncommon_weight")
    @classmethod
    def one_of_the_weights_is_above_0(cls, uncommon_weight: float | None, info: ValidationInfo) -> float | None:
        if uncommon_weight == info.data.get("common_weight") == info.data.get("continuation_weight") == 0:
            raise ValueError("0 with common_weight=0: nothing is compared, so the loss is constant; raise one of them")
        return uncommon_weight

    @field_validator("uncommon_topk")
    @classmethod
    def uncommon_topk_needs_a_weight(cls, top_k: int | None, info: ValidationInfo) -> int | None:
        return _refused_unless(info.data.get("uncommon_weight") != 0, top_k, info, cls, "uncommon_weight=0; raise it")


class GoldTerm(PairedTerm):
    """Exact pairs, and the tails by rank (methods.md §5.4)."""

    type: Literal["gold"] = "gold"


class HKLTerm(PairedTerm):
    """gold on more pairs: those that a projection matches with most of a row's weight (methods.md §5.5)."""

    type: Literal["h_kl"] = "h_kl"


class StrictTerm(ChunkTerm):
    """Exact pairs, at tokens that are such a pair themselves (methods.md §5.6)."""

    type: Literal["strict"] = "strict"
    top_k: int | None = Field(None, ge=1)
    """Pairs that are compared, the student's likeliest; all when not given."""
    normalization: Literal["support", "rest"] = "support"
    """support: renormalised on the pairs; rest: with one more cell for all other tokens."""

    @field_validator("normalization")
    @classmethod
    def one_pair_is_not_renormalised(cls, normalization: str, info: ValidationInfo) -> str:
        if normalization == "support" and info.data.get("top_k") == 1:
            raise ValueError(
                "support with top_k=1: one pair renormalised has the probability 1 on both sides, so the loss is "
                "constant; raise top_k, or write normalization=rest"
            )
        return normalization


class SharedPrefixTerm(ChunkTerm):
    """Both sides pushed onto the vocabulary they share (methods.md §5.8)."""

    type: Literal["shared_prefix"] = "shared_prefix"


class BytePrefixTerm(ChunkTerm):
    """The teacher on the student's vocabulary, by the student tokens that begin its tokens (methods.md §5.7)."""

    type: Literal["byte_prefix"] = "byte_prefix"
    positions: Literal["starts", "all"] = "starts"
    """starts: each chunk's first position; all: every student token that begins inside of a teacher token as well, and
    KD is divided by the number of these positions.
    """
    ends: Literal["drop", "cover", "rest"] = "drop"
    """positions=all: teacher tokens that would have ended at a position inside. drop: they are left out, which is exact
    in the mean over a dataset's texts, with forward_kl alone; cover: they are in a rest cell, and tokens that began a
    teacher token earlier take part, for every divergence and for samples; rest: they are in the rest cell, as in BPM,
    which is biased.
    """
    pieces: Literal["spelling", "longest_prefix"] = "spelling"
    """Student tokens that a teacher token consists of. spelling: those that the student's tokenizer gives its text;
    longest_prefix: the longest ones from the left.
    """

    @field_validator("positions")
    @classmethod
    def continuation_is_of_starts(cls, positions: str, info: ValidationInfo) -> str:
        weight = info.data.get("continuation_weight", 0)
        if positions == "all" and weight:
            raise ValueError(
                f"all with continuation_weight={weight}: the positions after a chunk's first are compared already; "
                "leave continuation_weight out, or write positions=starts"
            )
        return positions

    @field_validator("ends")
    @classmethod
    def ends_need_positions_inside(cls, ends: str, info: ValidationInfo) -> str:
        is_inside = info.data.get("positions") == "all"
        return _refused_unless(is_inside, ends, info, cls, "positions=starts; write positions=all")

    @field_validator("ends")
    @classmethod
    def dropped_ends_need_forward_kl(cls, ends: str, info: ValidationInfo) -> str:
        divergence = info.data.get("divergence")
        if info.data.get("positions") == "all" and ends == "drop" and divergence not in (None, "forward_kl"):
            raise ValueError(
                f"drop with divergence={divergence}: its targets are exact in the mean over texts, which forward_kl "
                "alone keeps; write ends=cover, or divergence=forward_kl"
            )
        return ends


class TCADTerm(DivergenceTerm):
    """Tokens that either side finds likely, and the student's mass on them, for a teacher with the student's tokenizer;
    every sampled sequence counts as one (methods.md §10.2).
    """

    type: Literal["tcad"] = "tcad"
    support_size: int = Field(256, ge=1)
    """Tokens that are compared."""
    support: Literal["interleaved", "union"] = "interleaved"
    """interleaved: the first `support_size` of both sides' likeliest, taken by turns; union: the `support_size`
    likeliest of each side.
    """
    coverage_coef: float = Field(1.0, ge=0)
    """Weight of −log of the student's mass on those tokens."""

    power_alpha: float | None = Field(1.0, ge=0)
    """Rollouts of a prompt are weighted by softmax(power_alpha · the teacher's mean log-probability a token); null: all
    the same.
    """

    @field_validator("coverage_coef")
    @classmethod
    def one_token_needs_its_coverage(cls, coverage_coef: float, info: ValidationInfo) -> float:
        if coverage_coef == 0 and info.data.get("support_size") == 1 and info.data.get("support") == "interleaved":
            raise ValueError(
                "0 with support_size=1: one token renormalised has the probability 1 on both sides, so the loss is "
                "constant; raise support_size or coverage_coef"
            )
        return coverage_coef


class SampledKLTerm(ImportanceSettings):
    """The KL estimated on the sampled tokens alone, or the aligned chunks of them for a teacher with another tokenizer
    (methods.md §10.4).
    """

    type: Literal["sampled_kl"] = "sampled_kl"
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL of a token or chunk, with d = log p − log q: d, d²/2, or exp(−d) − 1 + d."""
    update: Literal["policy_gradient", "direct"] = "policy_gradient"
    """policy_gradient: the negative estimate is the advantage of the token or chunk, in a clipped policy gradient;
    direct: the estimate is differentiated and multiplied by its importance weight, which in expectation is the gradient
    of the reverse KL with k2 and of the forward KL with k3, also for samples of older weights.
    """
    clip_low: float = Field(0.2, ge=0, lt=1)
    """policy_gradient: the ratio to the model that sampled, at temperature 1, is clipped below at 1 − clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """policy_gradient: the ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """policy_gradient: upper bound of the ratio where the advantage is negative; null: no bound."""

    @field_validator("clip_low", "clip_high", "dual_clip")
    @classmethod
    def clipping_needs_a_ratio(cls, clip: float | None, info: ValidationInfo) -> float | None:
        is_clipped = info.data.get("update") != "direct"
        return _refused_unless(is_clipped, clip, info, cls, "update=direct; write update=policy_gradient")

    @field_validator("update")
    @classmethod
    def differentiated_estimate_has_a_gradient(cls, update: str, info: ValidationInfo) -> str:
        if update == "direct" and info.data.get("estimator") == "k1":
            raise ValueError(
                "direct with estimator=k1 has no gradient in expectation; choose update=policy_gradient, or "
                "estimator=k2 or k3"
            )
        return update

    @field_validator("update")
    @classmethod
    def weights_of_sequences_are_of_policy_gradients(cls, update: str, info: ValidationInfo) -> str:
        if update == "direct" and info.data.get("importance_level") == "sequence":
            raise ValueError(
                "direct with importance_level=sequence: the estimate of each token is differentiated, and weights of "
                "sequences are for policy gradients; choose update=policy_gradient, or leave importance_level out"
            )
        return update


class ALMTerm(NormalizedTerm):
    """The likelihood of each chunk as a coin, teacher against student (methods.md §5.9)."""

    type: Literal["alm"] = "alm"
    temperature: float = Field(100.0, gt=0)
    """Likelihoods of chunks have the exponent 1 / temperature. At 1 a chunk that both sides find unlikely teaches next
    to nothing; from 100 on the gradient hardly changes.
    """


class ULDTerm(NormalizedTerm):
    """Probabilities by rank, whatever their tokens (methods.md §5.10)."""

    type: Literal["uld"] = "uld"
    temperature: float = Field(1.0, gt=0)
    """Logits of both sides are divided by it."""
    compat: Literal["trl"] | None = None
    """System whose loss is reproduced, for parity."""


class FunctionTerm(Settings):
    """Your own formula, for a teacher with the student's tokenizer or another (docs/losses.md)."""

    type: Literal["function"] = "function"
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`, called with rows of logits of the student and of the teacher: a loss for each row."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


SameTokenizerTerm = Annotated[SameVocabTerm | TCADTerm | SampledKLTerm | FunctionTerm, Field(discriminator="type")]
LossTerm = Annotated[
    SameVocabTerm
    | TCADTerm
    | SampledKLTerm
    | PKLTerm
    | GoldTerm
    | HKLTerm
    | StrictTerm
    | BytePrefixTerm
    | SharedPrefixTerm
    | ALMTerm
    | ULDTerm
    | FunctionTerm,
    Field(discriminator="type"),
]
