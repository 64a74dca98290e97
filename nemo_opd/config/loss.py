"""Loss terms: how the student is compared with a teacher."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemo_opd.config.settings import Excludes, Needs, Settings, UsersCode

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd", "mixed", "tvd"]
_Truncated = Needs("support", ("teacher_topk", "student_topk", "union"))
_Clipped = Needs("update", ("policy_gradient",))
_FreeOfPreset = Excludes("compat")


class ImportanceSettings(Settings):
    """Bounds on the mismatch between the trained and the sampling policy, by the weight π_train / π_behaviour: the
    student's probability of a token over its sampling probability, with temperature, top-k and top-p (methods.md §11).
    """

    importance_cap: float | None = Field(None, gt=0)
    """Upper bound of the weights, or null for no bound."""
    importance_level: Literal["token", "sequence"] = "token"
    """Unit of a weight: each token (or chunk), or all sampled tokens of a sequence together, which needs an
    `importance_cap`.
    """
    importance_veto: float | None = Field(None, gt=0, lt=1)
    """Drop sequences with a token below this weight, or none if null."""

    @model_validator(mode="after")
    def weights_of_sequences_need_a_cap(self) -> Self:
        if self.importance_level == "sequence" and self.importance_cap is None:
            raise ValueError(
                "importance_level=sequence without importance_cap: a product over hundreds of tokens has no bound; "
                "give importance_cap, such as 2, or leave importance_level out"
            )
        return self


class DivergenceTerm(Settings):
    """Settings of all terms with a divergence (methods.md §3)."""

    divergence: DivergenceKind = "forward_kl"
    """forward_kl: KL(teacher ‖ student); reverse_kl: KL(student ‖ teacher); jsd: between them; mixed: their weighted
    sum; tvd: half the L1 distance (methods.md §3.1).
    """
    beta: Annotated[float, Needs("divergence", ("jsd",))] = Field(0.5, ge=0, le=1)
    """jsd: 0 is forward KL, 1 is reverse KL."""
    mixed_weight: Annotated[float, Needs("divergence", ("mixed",))] = Field(0.5, ge=0, le=1)
    """mixed: weight of forward KL."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of both sides; the term is multiplied by its square."""


class NormalizedTerm(Settings):
    """Settings of terms whose units may be aligned chunks."""

    normalizer: Literal["units", "student_tokens"] = "student_tokens"
    """Divisor of the sum. student_tokens: the student's scored tokens in texts with a compared chunk or token; units:
    the compared chunks or tokens, the default with `compat` (methods.md §7.1).
    """

    @model_validator(mode="before")
    @classmethod
    def compat_divides_by_units(cls, data: object) -> object:
        if isinstance(data, Mapping) and data.get("compat") is not None:
            return {"normalizer": "units", **data}
        return data


class SameVocabTerm(DivergenceTerm):
    """Divergence at each scored token, for a teacher with the student's tokenizer (methods.md §4)."""

    type: Literal["same_vocab"] = "same_vocab"
    take: ClassVar[str] = "for a teacher with the student's tokenizer"
    support: Literal["full", "teacher_topk", "student_topk", "union"] = "full"
    """Compared tokens: all, one side's `top_k` most likely, or the union of both sides' (methods.md §3.3)."""
    top_k: Annotated[int | None, _Truncated] = Field(None, ge=1)
    """Tokens per side, for a support other than full."""
    normalization: Annotated[Literal["full", "support", "rest"], _Truncated] = "rest"
    """Treatment of tokens outside the support. rest: they share one cell; support: both sides are renormalised without
    them; full: they are dropped from the sum.
    """

    @model_validator(mode="after")
    def the_support_has_tokens_to_compare(self) -> Self:
        if self.support != "full" and self.top_k is None:
            raise ValueError(
                f"top_k: required with support={self.support}; give the number of tokens per side, such as 256"
            )
        if self.normalization == "support" and self.top_k == 1 and self.support != "union":
            raise ValueError(
                "normalization=support with top_k=1: one renormalised token has probability 1 on both sides, so the "
                "loss is constant; raise top_k, or write normalization=rest"
            )
        return self


class ChunkTerm(DivergenceTerm, NormalizedTerm):
    """Settings of terms that compare one pair of distributions per chunk."""

    continuation_weight: float = Field(0.0, ge=0)
    """Weight of an additional `alm` term, for chunks with several tokens on a side."""


class PKLTerm(ChunkTerm):
    """Student projected onto the teacher's vocabulary at each chunk's first position (methods.md §5.3)."""

    type: Literal["p_kl"] = "p_kl"
    take: ClassVar[str] = "for another tokenizer; byte_prefix if texts are scarce"
    compat: Literal["nemo_rl"] | None = None
    """Reproduce the loss of this system, for parity."""
    merge: Annotated[Literal["first", "mean"] | None, _FreeOfPreset] = None
    """Compared positions of a chunk: the first (default), or for parity the mean over all."""
    coverage_coef: Annotated[float | None, _FreeOfPreset] = Field(None, ge=0)
    """Weight of −log of the student's mass on covered teacher columns; 1 by default."""
    vocab_topk: int | None = Field(None, ge=1)
    """Number of covered columns with their own cells, by largest teacher logit; other columns share one cell. By
    default each has its own.
    """

    @model_validator(mode="after")
    def one_column_is_not_renormalised(self) -> Self:
        if self.vocab_topk == 1 and self.compat == "nemo_rl":
            raise ValueError(
                "vocab_topk=1 with compat=nemo_rl: one renormalised column has probability 1 on both sides, so the "
                "loss is constant; raise vocab_topk, or leave compat out, which compares the other columns as one cell"
            )
        return self


class PairedTerm(ChunkTerm):
    """Settings of terms that compare matched tokens cell by cell and unmatched tokens by rank."""

    compat: Literal["nemo_rl", "trl"] | None = None
    """Reproduce the loss of this system, for parity."""
    merge: Annotated[Literal["first", "mean", "observed"] | None, _FreeOfPreset] = None
    """Compared positions of a chunk: the first; for parity the mean over all, or the first times the probabilities of
    the chunk's later tokens (observed).
    """
    common_weight: float | None = Field(None, ge=0)
    """Weight of the divergence on matched tokens; 1 by default."""
    uncommon_weight: float | None = Field(None, ge=0)
    """Weight of the sorted L1 distance of unmatched tokens; 1 by default."""
    uncommon_topk: int | None = Field(None, ge=1)
    """Number of unmatched tokens compared per side, the likeliest; 8192 by default."""

    @model_validator(mode="after")
    def something_is_compared(self) -> Self:
        if self.common_weight == 0 and self.divergence != "forward_kl":
            raise ValueError(
                f"divergence={self.divergence} has no effect with common_weight=0; raise common_weight, or leave "
                "divergence out"
            )
        if self.uncommon_weight == 0 and self.uncommon_topk is not None:
            raise ValueError(
                f"uncommon_topk={self.uncommon_topk} has no effect with uncommon_weight=0; raise it, or leave "
                "uncommon_topk out"
            )
        if self.uncommon_weight == self.common_weight == self.continuation_weight == 0:
            raise ValueError(
                "uncommon_weight=0 with common_weight=0: nothing is compared, so the loss is constant; raise one of "
                "them"
            )
        return self


class GoldTerm(PairedTerm):
    """Exact pairs cell by cell, and unmatched tokens by rank (methods.md §5.4)."""

    type: Literal["gold"] = "gold"
    take: ClassVar[str] = "p_kl instead, unless you reproduce GOLD of TRL or NeMo-RL"


class HKLTerm(PairedTerm):
    """gold on relaxed pairs, which hold most of a projection row's weight (methods.md §5.5)."""

    type: Literal["h_kl"] = "h_kl"
    take: ClassVar[str] = "p_kl instead, unless you reproduce H-KL"


class StrictTerm(ChunkTerm):
    """Exact pairs, at positions whose realised tokens are an exact pair (methods.md §5.6)."""

    type: Literal["strict"] = "strict"
    take: ClassVar[str] = "p_kl instead, unless sure pairs matter more than many"
    top_k: int | None = Field(None, ge=1)
    """Number of compared pairs, the student's likeliest; all by default."""
    normalization: Literal["support", "rest"] = "support"
    """support: renormalise on the pairs; rest: add one cell for all other tokens."""

    @model_validator(mode="after")
    def one_pair_is_not_renormalised(self) -> Self:
        if self.normalization == "support" and self.top_k == 1:
            raise ValueError(
                "normalization=support with top_k=1: one renormalised pair has probability 1 on both sides, so the "
                "loss is constant; raise top_k, or write normalization=rest"
            )
        return self


class SharedPrefixTerm(ChunkTerm):
    """Both sides projected onto their shared vocabulary (methods.md §5.8)."""

    type: Literal["shared_prefix"] = "shared_prefix"
    take: ClassVar[str] = "in place of p_kl if it costs too much"
    pieces: Literal["spelling", "longest_prefix"] = "longest_prefix"
    """Shared token of a token that is not shared. spelling: by the first token of its spelling by the other tokenizer;
    longest_prefix: the longest that its bytes begin with.
    """


class BytePrefixTerm(ChunkTerm):
    """Teacher mapped onto the student's vocabulary by the first piece of each teacher token (methods.md §5.7)."""

    type: Literal["byte_prefix"] = "byte_prefix"
    take: ClassVar[str] = "if texts are scarce and few chunks are 1:n"
    positions: Literal["starts", "all"] = "starts"
    """starts: each chunk's first position; all: also student tokens that begin inside a teacher token."""
    ends: Annotated[Literal["drop", "cover", "rest"], Needs("positions", ("all",))] = "drop"
    """positions=all: teacher tokens that would have ended at a position inside the realised token. drop: leave them out
    (forward_kl on a dataset's texts only); cover: nearly exact, for any divergence and samples; rest: the rest cell, as
    in BPM, which is biased.
    """
    pieces: Literal["spelling", "longest_prefix"] = "spelling"
    """Split of a teacher token into student tokens. spelling: by the student's tokenizer; longest_prefix: greedily, the
    longest student token first.
    """

    @model_validator(mode="after")
    def positions_inside_have_exact_targets(self) -> Self:
        if self.positions != "all":
            return self
        if self.continuation_weight:
            raise ValueError(
                f"positions=all with continuation_weight={self.continuation_weight:g}: positions after a chunk's first "
                "are already compared; leave continuation_weight out, or write positions=starts"
            )
        if self.ends == "drop" and self.divergence != "forward_kl":
            raise ValueError(
                f"ends=drop with divergence={self.divergence}: these targets are exact only in the mean over texts, so "
                "the divergence must be linear in them; write ends=cover, or divergence=forward_kl"
            )
        return self


class ESCDTerm(DivergenceTerm, NormalizedTerm):
    """Teacher by first pieces, and the student's completion of teacher tokens that it has begun (methods.md §5.13)."""

    type: Literal["escd"] = "escd"
    take: ClassVar[str] = "byte_prefix instead, unless you reproduce ESCD"
    completion_weight: float = Field(1.0, ge=0)
    """Weight of the completions."""


class TCADTerm(DivergenceTerm):
    """Divergence on likely tokens and the student's mass on them, for a teacher with the student's tokenizer
    (methods.md §10.2).
    """

    type: Literal["tcad"] = "tcad"
    take: ClassVar[str] = "for the student's samples, unless the tokenizers differ"
    support_size: int = Field(256, ge=1)
    """Number of compared tokens."""
    support: Literal["interleaved", "union"] = "interleaved"
    """interleaved: `support_size` tokens, alternating between the sides' likeliest; union: each side's `support_size`
    likeliest.
    """
    coverage_coef: float = Field(1.0, ge=0)
    """Weight of −log of the student's mass on those tokens."""

    power_alpha: float | None = Field(1.0, ge=0)
    """Weigh a prompt's rollouts by softmax(power_alpha · teacher's mean log-probability per token), or null for equal
    weights. At 1 a rollout with twice the teacher's likelihood per token counts twice.
    """

    @model_validator(mode="after")
    def one_token_needs_its_coverage(self) -> Self:
        if self.coverage_coef == 0 and self.support_size == 1 and self.support == "interleaved":
            raise ValueError(
                "coverage_coef=0 with support_size=1: one renormalised token has probability 1 on both sides, so the "
                "loss is constant; raise support_size or coverage_coef"
            )
        return self


class SampledKLTerm(NormalizedTerm, ImportanceSettings):
    """KL estimated on the sampled tokens, or on their aligned chunks (methods.md §10.4)."""

    type: Literal["sampled_kl"] = "sampled_kl"
    take: ClassVar[str] = "for log-probabilities of the sampled tokens; it is noisier"
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """KL estimator per token or chunk (methods.md §10.4)."""
    update: Literal["policy_gradient", "direct"] = "policy_gradient"
    """policy_gradient: the negative estimate is the advantage in a clipped policy gradient; direct: differentiate the
    estimate, times its importance weight (docs/losses.md).
    """
    clip_low: Annotated[float, _Clipped] = Field(0.2, ge=0, lt=1)
    """policy_gradient: clip the ratio to the model that sampled, at temperature 1, below at 1 − clip_low."""
    clip_high: Annotated[float, _Clipped] = Field(0.2, ge=0)
    """policy_gradient: clip the ratio above at 1 + clip_high."""
    dual_clip: Annotated[float | None, _Clipped] = Field(None, gt=1)
    """policy_gradient: upper bound of the ratio for negative advantages, or null for no bound."""
    shares: Annotated[Literal["chunk", "equal", "logprobs"], _Clipped] = "chunk"
    """policy_gradient across tokenizers: chunk: a chunk is one action; otherwise each of its tokens is one, with an
    equal share of the chunk's advantage or a share in proportion to its log-probability.
    """
    advantage_clamp: Annotated[float | None, _Clipped] = Field(None, gt=0)
    """policy_gradient: bound of each action's advantage, positive or negative, or null for no bound."""

    @model_validator(mode="after")
    def a_differentiated_estimate_has_a_gradient(self) -> Self:
        if self.update == "direct" and self.estimator == "k1":
            raise ValueError(
                "update=direct with estimator=k1 has no gradient in expectation; choose update=policy_gradient, or "
                "estimator=k2 or k3"
            )
        if self.update == "direct" and self.importance_level == "sequence":
            raise ValueError(
                "update=direct with importance_level=sequence: direct differentiates each token's estimate, but "
                "sequence weights are for policy gradients; choose update=policy_gradient, or leave importance_level "
                "out"
            )
        return self


class ALMTerm(NormalizedTerm):
    """Binary cross-entropy of chunk likelihoods, teacher against student (methods.md §5.9)."""

    type: Literal["alm"] = "alm"
    take: ClassVar[str] = "beside another loss, unless the vocabularies share little"
    temperature: float = Field(100.0, gt=0)
    """Chunk likelihoods are raised to the power 1 / temperature. At 1, chunks that both sides find unlikely have almost
    no gradient.
    """


class ULDTerm(NormalizedTerm):
    """Probabilities compared by rank, independent of their tokens (methods.md §5.10)."""

    type: Literal["uld"] = "uld"
    take: ClassVar[str] = "any other loss, unless you need this baseline"
    temperature: float = Field(1.0, gt=0)
    """Logits of both sides are divided by it."""
    compat: Literal["trl"] | None = None
    """Reproduce the loss of this system, for parity."""


class FunctionTerm(NormalizedTerm):
    """Your own formula, for a teacher with the student's or another tokenizer (docs/losses.md)."""

    type: Literal["function"] = "function"
    take: ClassVar[str] = "for a formula of your own"
    function: UsersCode
    """`package.module:function`, called with rows of student and teacher logits; it returns one loss per row."""
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
    | ESCDTerm
    | ALMTerm
    | ULDTerm
    | FunctionTerm,
    Field(discriminator="type"),
]
