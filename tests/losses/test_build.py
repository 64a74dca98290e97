import inspect
from typing import get_args

import numpy as np
import pytest
import torch

from nemo_opd import losses
from nemo_opd.config.loss import (
    ALMTerm,
    BytePrefixTerm,
    ESCDTerm,
    GoldTerm,
    HKLTerm,
    LossTerm,
    PKLTerm,
    SameVocabTerm,
    SampledKLTerm,
    SharedPrefixTerm,
    StrictTerm,
    TCADTerm,
    ULDTerm,
)
from nemo_opd.config.objective import Loss, Objective, PKLLoss, SameVocabLoss
from nemo_opd.errors import ConfigError
from nemo_opd.losses import p_kl, same_vocab, sampled_chunk_kl, sampled_kl, tcad
from nemo_opd.losses.term_loss import ACROSS_TOKENIZERS, LOSSES, NOT_ARGUMENTS, build
from nemo_opd.types import ChunkRows, LossOutput, SampledRows, TeacherRows, TokenRows

from . import cases

SUPPORT = {"support": "union", "top_k": 2, "normalization": "rest"}
SETTINGS = {"divergence": "jsd", "beta": 0.2, "temperature": 1.5}
CHUNKS = cases.random_chunk_ids(np.random.default_rng(3), 2, 7, 6)


def rows(positions: int) -> TokenRows:
    zeros = torch.zeros(2, positions, dtype=torch.long)
    mask = torch.ones(2, positions, dtype=torch.bool)
    mask[:, [0, 3]] = False
    return TokenRows(zeros, torch.full((2,), positions), mask, zeros.int())


def logits(positions: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(2, positions, width, generator=torch.Generator().manual_seed(seed))


def test_every_term_of_the_config_has_a_loss():
    """Bug: a term without a loss, which is a KeyError during a run."""
    types = {kind.model_fields["type"].default for kind in get_args(get_args(LossTerm)[0])}
    assert types == LOSSES.keys() == ACROSS_TOKENIZERS.keys()
    objectives = get_args(get_args(Loss)[0])
    assert {kind.model_fields["type"].default for kind in objectives} == types | {"grpo"}
    assert all(issubclass(kind, Objective) for kind in objectives)


def test_every_loss_is_held_to_the_contract():
    """Bug: a loss that no identity, gradient or microbatch is tested with. `function` is the user's code."""
    entries = [entry for table in (LOSSES, ACROSS_TOKENIZERS) for kind, entry in table.items() if kind != "function"]
    missing = {entry.loss.__name__ for entry in entries} - {case.loss.__name__ for case in cases.LOSSES}
    assert not missing, f"give it a line in LOSSES of tests/losses/cases.py: {missing}"


def test_defaults_equal_the_config():
    """Bug: a default of a loss's function that differs from the setting's, so Python and YAML disagree."""
    for kind in get_args(get_args(LossTerm)[0]):
        for table in (LOSSES, ACROSS_TOKENIZERS):
            parameters = inspect.signature(table[kind.model_fields["type"].default].loss.plan).parameters
            for name, field in kind.model_fields.items():
                if name in NOT_ARGUMENTS or field.is_required() or name == "arguments":
                    continue
                assert parameters[name].default == field.default, (kind, name)


@pytest.mark.parametrize("loss", [p_kl, same_vocab])
def test_the_signature_fits_the_call(loss):
    """Bug: help() that shows a planned loss as the return value, or `**shared` as arguments."""
    signature = inspect.signature(loss)
    assert signature.return_annotation is LossOutput
    mask_or_ids = signature.parameters["mask" if loss is same_vocab else "student_chunk_id"]
    assert (mask_or_ids.default, mask_or_ids.annotation) == (inspect.Parameter.empty, torch.Tensor)
    assert signature.parameters["normalizer"].default is None


def test_same_vocab_term():
    """Bug: a setting of the term that does not reach the loss."""
    student, teacher, tokens = logits(7, 9, 0), logits(7, 8, 1), rows(7)
    loss = build(SameVocabTerm(**SETTINGS, **SUPPORT), student_vocab_size=6)
    out = loss.plan(student, teacher, tokens, TeacherRows(tokens, None), 4).compute()
    settings = {"student_vocab_size": 6, **SETTINGS, **SUPPORT}
    direct = same_vocab(student, teacher, mask=tokens.loss_mask, normalizer=4, **settings)
    assert torch.equal(out.loss, direct.loss)


def sampled(positions: int) -> SampledRows:
    """Row 0 is sampled, row 1 is from the dataset."""
    logprobs = -torch.rand(2, positions, generator=torch.Generator().manual_seed(5))
    return SampledRows(torch.tensor([True, False]), logprobs, logprobs - 0.3, torch.zeros(2), torch.tensor([0, 1]))


def engine_arguments(samples: SampledRows) -> dict[str, torch.Tensor]:
    return {"logprobs": samples.logprobs[:, :7], "behaviour_logprobs": samples.behaviour_logprobs[:, :7]}


IMPORTANCE = {"importance_level": "sequence", "importance_cap": 1.5, "importance_veto": 0.01}


def test_tcad_term():
    """A unit is a sequence times its rollout weight. Bug: the weights of a prompt's rollouts do not reach the loss."""
    student, teacher, tokens = logits(7, 9, 0), logits(7, 8, 1), rows(7)
    settings = {**SETTINGS, "support_size": 3, "support": "union", "coverage_coef": 0.4}
    loss = build(TCADTerm(**settings, power_alpha=2.0), student_vocab_size=6)
    weights = torch.tensor([0.25, 0.5])
    teacher_rows = TeacherRows(tokens, None, rollout_weights=weights)
    assert loss.count(tokens, teacher_rows, sampled(7)) == 0.75
    assert loss.count(tokens, TeacherRows(tokens, None)) == 2
    out = loss.plan(student, teacher, tokens, teacher_rows, 4, sampled=sampled(7), sequence_weights=weights).compute()
    arguments = {"mask": tokens.loss_mask, "sequence_weights": weights, "student_vocab_size": 6}
    direct = tcad(student, teacher, **arguments, normalizer=4, **settings)
    assert torch.equal(out.loss, direct.loss)


def test_sampled_kl_term():
    """Bug: tokens of the dataset are scored, or a teacher with fewer positions than the student fails."""
    student, teacher, tokens, samples = logits(9, 9, 0), logits(7, 8, 1), rows(7), sampled(9)
    settings = {"estimator": "k1", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 2.0, **IMPORTANCE}
    loss = build(SampledKLTerm(**settings), student_vocab_size=6)
    teacher_rows = TeacherRows(tokens, None)
    assert loss.count(tokens, teacher_rows, samples) == 5
    assert loss.count(tokens, teacher_rows) == 0
    out = loss.plan(student, teacher, tokens, teacher_rows, 4, sampled=samples).compute()
    mask = tokens.loss_mask & torch.tensor([[True], [False]])
    arguments = {"ids": tokens.ids, "mask": mask, "student_vocab_size": 6, **engine_arguments(samples)}
    assert torch.equal(out.loss, sampled_kl(student, teacher, **arguments, normalizer=4, **settings).loss)
    validated = loss.plan(student, teacher, tokens, teacher_rows, 4).compute()
    assert (validated.loss.item(), validated.metrics["kd"].count) == (0, 0)


def test_sampled_kl_term_of_a_teacher_with_another_tokenizer():
    """Bug: chunks of the dataset are units, or the engine's log-probabilities do not reach the loss."""
    student, teacher, samples = logits(7, 10, 0), logits(6, 11, 1), sampled(9)
    settings = {"estimator": "k2", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 2.0, **IMPORTANCE}
    term = SampledKLTerm(**settings, normalizer="units")
    loss = build(term, across_tokenizers=True, student_vocab_size=9, teacher_vocab_size=11)
    tokens, teacher_rows = rows(7), TeacherRows(rows(6), ChunkRows(*CHUNKS))
    chunks = [CHUNKS[0].clone(), CHUNKS[1]]
    chunks[0][1] = -1
    arguments = {
        "student_ids": tokens.ids,
        "teacher_ids": teacher_rows.tokens.ids,
        "student_chunk_id": chunks[0],
        "teacher_chunk_id": chunks[1],
        "mask": tokens.loss_mask & torch.tensor([[True], [False]]),
        "student_vocab_size": 9,
        **engine_arguments(samples),
    }
    direct = sampled_chunk_kl(student, teacher, **arguments, normalizer=4, **settings)
    out = loss.plan(student, teacher, tokens, teacher_rows, 4, sampled=samples).compute()
    assert torch.equal(out.loss, direct.loss)
    assert loss.count(tokens, teacher_rows, samples) == direct.metrics["kd"].count > 0
    validated = loss.plan(student, teacher, tokens, teacher_rows, 4).compute()
    assert loss.count(tokens, teacher_rows) == validated.metrics["kd"].count == 0


def test_p_kl_term():
    """Bug: a setting, the ids or the chunks do not reach the loss."""
    matrix = cases.pair()
    student, teacher = logits(7, 10, 0), logits(6, 11, 1)
    loss = build(PKLTerm(**SETTINGS, coverage_coef=0.4), matrix)
    out = loss.plan(student, teacher, rows(7), TeacherRows(rows(6), ChunkRows(*CHUNKS)), 4).compute()
    direct = p_kl(
        student,
        teacher,
        projection=matrix,
        student_ids=rows(7).ids,
        teacher_ids=rows(6).ids,
        student_chunk_id=CHUNKS[0],
        teacher_chunk_id=CHUNKS[1],
        normalizer=4,
        coverage_coef=0.4,
        **SETTINGS,
    )
    assert torch.equal(out.loss, direct.loss)


@pytest.mark.parametrize(("term", "objective"), [(SameVocabTerm, SameVocabLoss), (PKLTerm, PKLLoss)])
def test_the_objective_around_a_term_is_not_part_of_its_loss(term, objective):
    """Bug: a run's `loss` is a term with the objective's weights, and these are applied here and again by the
    trainer.
    """
    tokens, chunks = rows(7), cases.random_chunk_ids(np.random.default_rng(4), 2, 7, 7)
    batch = (logits(7, 9, 0), logits(7, 9, 1), tokens, TeacherRows(tokens, ChunkRows(*chunks)), 4)
    losses = [
        build(settings, cases.identity(9)).plan(*batch).compute().loss
        for settings in (term(**SETTINGS), objective(**SETTINGS, kd_weight=3, ce_weight=0, scaling="dynamic"))
    ]
    assert torch.equal(*losses)


CROSS_TERMS = (PKLTerm, GoldTerm, HKLTerm, StrictTerm, BytePrefixTerm, SharedPrefixTerm, ESCDTerm, ALMTerm, ULDTerm)


UNITS = {"normalizer": "units"}
POSITIONS = [BytePrefixTerm(**UNITS, positions="all", ends=ends) for ends in ("drop", "cover", "rest")]
CONTINUED = [
    term(**UNITS, continuation_weight=0.5) for term in CROSS_TERMS if "continuation_weight" in term.model_fields
]


@pytest.mark.parametrize(
    "settings", [SameVocabTerm(), *(term(**UNITS) for term in CROSS_TERMS), *CONTINUED, *POSITIONS], ids=repr
)
def test_units_are_counted_as_the_loss_counts_them(settings):
    """Ranks divide by the driver's count. Catches a term that skips units the driver counts, and one that adds the
    likelihoods of chunks that are not its units.
    """
    term = type(settings)
    chunks = (torch.tensor([[-1, 0, 1, 2, 2, -1, 3]]), torch.tensor([[-1, 0, 1, 1, 2, 3]]))
    ids = (torch.tensor([[5, 1, 2, 3, 3, 4, 4]]), torch.tensor([[5, 1, 2, 2, 3, 0]]))
    student, teacher = (TokenRows(side, *(side[:, 0], side > 1, side.int())) for side in ids)
    batch = student, TeacherRows(student if term is SameVocabTerm else teacher, ChunkRows(*chunks))
    loss = build(settings, cases.identity(9))
    width = 7 if term is SameVocabTerm else 6
    out = loss.plan(logits(7, 9, 0)[:1], logits(width, 9, 1)[:1], *batch, None).compute()
    longer = 2 if settings in CONTINUED else 0
    expected = {SameVocabTerm: 5, StrictTerm: 1 + longer}.get(term, 4)
    assert loss.count(*batch) == out.metrics["kd"].count == expected


@pytest.mark.parametrize("term", CROSS_TERMS)
def test_a_sum_is_divided_by_the_tokens_of_texts_that_have_a_chunk(term):
    """Bugs: chunks counted instead of tokens; tokens of a text without a teacher; token 0; rollout weights lost."""
    chunks = (torch.tensor([[-1, 0, 1, 2, 2, -1, 3]] * 2), torch.tensor([[-1, 0, 1, 1, 2, 3]] * 2))
    chunks[0][1] = chunks[1][1] = -1
    ids = (torch.tensor([[5, 1, 2, 3, 3, 4, 4]] * 2), torch.tensor([[5, 1, 2, 2, 3, 0]] * 2))
    student, teacher = (TokenRows(side, *(side[:, 0], side > 1, side.int())) for side in ids)
    loss = build(term(), cases.identity(9))
    assert loss.count(student, TeacherRows(teacher, ChunkRows(*chunks))) == 5
    weights = torch.tensor([0.5, 4.0])
    assert loss.count(student, TeacherRows(teacher, ChunkRows(*chunks), rollout_weights=weights)) == 2.5


@pytest.mark.parametrize(
    ("term", "compat"), [(PKLTerm, "nemo_rl"), (GoldTerm, "trl"), (HKLTerm, "trl"), (ULDTerm, "trl")]
)
def test_another_systems_formula_is_divided_by_chunks(term, compat):
    """Bug: `compat` with our default normalizer, so the value is not the other system's."""
    assert term(compat=compat).normalizer == "units"
    assert term(compat=compat, normalizer="student_tokens").normalizer == "student_tokens"
    assert term().normalizer == "student_tokens"


@pytest.mark.parametrize("term", [SameVocabTerm, TCADTerm, SampledKLTerm, *CROSS_TERMS])
def test_every_setting_of_a_term_is_an_argument_of_its_loss(term):
    """Catches a setting that a run accepts and no loss reads."""
    settings = set(term.model_fields) - {"type", "normalizer", "power_alpha"}
    for function in {getattr(losses, term().type), *([sampled_chunk_kl] if term is SampledKLTerm else [])}:
        assert settings <= set(inspect.signature(function).parameters)


def test_p_kl_needs_a_projection_and_chunks():
    """Bug: an AttributeError in place of a message with the missing input."""
    with pytest.raises(ConfigError, match="projection"):
        build(PKLTerm())
    loss = build(PKLTerm(), cases.identity(9))
    with pytest.raises(ConfigError, match="align"):
        loss.plan(logits(7, 9, 0), logits(7, 9, 1), rows(7), TeacherRows(rows(7), None), None)
