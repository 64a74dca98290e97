"""Identities of methods.md §5.12, §7 and §8 that hold for every loss."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.errors import ConfigError
from nemo_opd.losses import same_vocab

from .cases import ALL_LOSSES, DIVERGENCES, Batch, Case, identity, one_tokenizer, random_logits
from .test_memory import B, S, V, bytes_saved

TEACHER_SIDE = ("teacher", "teacher_ids", "teacher_chunk_id")
every_loss = pytest.mark.parametrize("case", ALL_LOSSES, ids=str)
every_divergence = pytest.mark.parametrize("case", DIVERGENCES, ids=str)
FP32_NATS = 3 * 50 * 2**-23
"""fp32 rounds log-ratios of at most 50 nats by 2^−24 of their size, on either side."""


def cases_with(cases: list[Case], holds: Callable[[Case], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in cases if holds(case)], ids=str)


def equal_sides(case: Case) -> Batch:
    """Make bf16 logits over 500 columns, with many ties; in row 1, chunks of two tokens."""
    batch = one_tokenizer(positions=S, width=V).to(torch.bfloat16)
    batch.student_chunk_id[1] = torch.arange(S) // 2
    return (batch.rows([0]) if case.needs_one_to_one else batch).with_student_as_teacher()


@cases_with(DIVERGENCES, lambda case: not case.pulls_at_equal_sides)
def test_equal_sides_are_the_minimum(case: Case):
    """Bug: rounding noise pulls at a student that is already right."""
    batch = equal_sides(case)
    numbers = [None] if case.needs_every_token else [None, 300]
    for projection in (identity(V, number) for number in numbers):
        loss, gradient = case.value_and_gradient(replace(batch, projection=projection), temperature=0.7)
        assert not gradient.any()
        if case.is_zero_for_equal_sides:
            assert loss.item() == 0
        else:
            assert loss.item() > 0


@every_divergence
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), tau=st.floats(1, 4), scale=st.floats(0.1, 3))
def test_not_negative(case: Case, seed: int, tau: float, scale: float):
    """Bug: a divergence that subtracts more than it adds, beyond rounding."""
    batch = case.batch(seed, torch.float32, scale)
    assert case.run(batch, temperature=tau).loss.item() >= -(tau**2) * FP32_NATS


@cases_with(DIVERGENCES, lambda case: case.same_vocab_options is not None)
def test_one_tokenizer_is_same_vocab(case: Case):
    """Bug: a form for two tokenizers that differs from same_vocab if both are the same."""
    batch = one_tokenizer()
    student = batch.student.requires_grad_()
    kind = {name: case.options[name] for name in ("divergence", "beta", "mixed_weight") if name in case.options}
    values = (
        case.run(batch, temperature=1.4).loss,
        same_vocab(
            student,
            batch.teacher,
            mask=batch.student_chunk_id >= 0,
            temperature=1.4,
            **kind,
            **case.same_vocab_options,
        ).loss,
    )
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(value, student)[0] for value in values]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-15)


@every_divergence
def test_gradient_along_random_directions(case: Case):
    """An error in any logit shows in each direction, so a few are enough for every divergence."""
    batch, step = case.batch(), 1e-4
    _, gradient = case.value_and_gradient(batch, temperature=1.7, chunk_size=2)
    for seed in range(3):
        direction = random_logits(*batch.student.shape, seed=seed)
        direction /= direction.norm()
        ahead, behind = (
            case.run(batch.with_logits(batch.student + sign * step * direction), temperature=1.7, chunk_size=2).loss
            for sign in (1, -1)
        )
        # The third derivative along a unit vector is below 10, or ten times the first if that is large, so the
        # quotient's error, step²/6 times that, is below 2e-8 or 2e-8 of the first.
        torch.testing.assert_close((gradient * direction).sum(), (ahead - behind) / (2 * step), rtol=2e-8, atol=2e-8)


@every_divergence
def test_extreme_logits_are_finite(case: Case):
    """Logits of ±150 in fp32. Bug: a probability of e^−300 is 0, and its logarithm −inf."""
    for seed in range(3):
        batch = case.batch(seed, torch.float32)
        extreme = batch.with_logits(150 * batch.student.sign(), 150 * batch.teacher.sign())
        loss, gradient = case.value_and_gradient(extreme)
        assert loss.isfinite()
        assert loss >= 0
        assert gradient.isfinite().all()


@pytest.mark.parametrize("case", DIVERGENCES, ids=str)
@pytest.mark.parametrize("chunk_size", [16, None])
def test_saves_the_gradient_and_nothing_else(case: Case, chunk_size: int | None):
    """Chunks of 1:1, 2:2 and 1:2 tokens. Bug: a softmax kept for backward."""
    batch = one_tokenizer(positions=S, width=V)
    position = torch.arange(S).repeat(B, 1)
    one_to_one, in_twos = position < 32, 16 + position // 2
    batch = replace(
        batch,
        student_ids=torch.zeros_like(position),
        teacher_ids=torch.zeros_like(position),
        student_chunk_id=torch.where(one_to_one, position, torch.where(position < 48, in_twos, position - 8)),
        teacher_chunk_id=torch.where(one_to_one, position, in_twos),
    )
    saved = bytes_saved(lambda *logits: case.run(batch.with_logits(*logits), chunk_size=chunk_size).loss)
    assert saved <= 1.1


@cases_with(ALL_LOSSES, lambda case: case.takes_temperature and case.is_zero_for_equal_sides)
def test_temperature_divides_the_logits_and_tau_squared_the_loss(case: Case):
    """Bug: a missing τ², or a temperature on one side. test_values.py tests losses with likelihoods, which scale
    differently.
    """
    batch, tau = case.batch(), 2.5
    scaled = batch.with_logits(batch.student / tau, batch.teacher / tau)
    expected, gradient_at_one = case.value_and_gradient(scaled)
    loss, gradient = case.value_and_gradient(batch, temperature=tau)
    torch.testing.assert_close(loss, tau**2 * expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, tau * gradient_at_one, rtol=1e-11, atol=1e-15)


@every_loss
def test_invariant_to_chunks_microbatches_order_and_padding(case: Case):
    """Global sums with a fixed normalizer. Bug: blocks, microbatches, order or padding change value or gradient."""
    batch = case.batch()

    def settings_of(order: list[int], padding: int, chunk_size: int | None, rows_per_call: int) -> tuple:
        ordered = batch.rows(order).padded(padding, padding if case.is_of_one_vocabulary else 2 * padding)
        parts = [ordered.rows(slice(k, k + rows_per_call)) for k in range(0, len(batch), rows_per_call)]
        results = [case.value_and_gradient(part, chunk_size=chunk_size, normalizer=5) for part in parts]
        gradient = torch.cat([gradient for _, gradient in results])
        assert not gradient[:, batch.student.shape[1] :].any()
        return sum(loss for loss, _ in results), gradient[order, : batch.student.shape[1]]

    reference = settings_of([0, 1], 0, None, 2)
    split = 2 if case.chooses_per_call else 1
    for setting in (([0, 1], 0, 1, 2), ([0, 1], 0, 3, split), ([1, 0], 0, None, 2), ([1, 0], 4, 2, split)):
        torch.testing.assert_close(settings_of(*setting), reference, rtol=1e-12, atol=1e-15)


@every_loss
def test_a_wider_head_changes_nothing_and_gets_no_gradient(case: Case):
    """Columns beyond the vocabulary are the most likely ones. Bug: they are cut off after a softmax."""
    batch = case.batch()
    sizes = {"student_vocab_size": batch.student.shape[-1], "teacher_vocab_size": batch.teacher.shape[-1]}
    narrow = case.value_and_gradient(batch)
    for named in (sizes, {}) if case.needs_projection else (sizes,):
        loss, gradient = case.value_and_gradient(batch.widened(2, 3), **named)
        assert torch.equal(loss, narrow[0])
        assert torch.equal(gradient[..., :-2], narrow[1])
        assert not gradient[..., -2:].any()


@every_loss
def test_no_unit_stays_connected(case: Case):
    """Bug: a rank without units skips the backward collectives, and the other ranks hang."""
    batch = case.batch().without_chunks()
    for normalizer in (None, 0, 5):
        out = case.run(batch.with_logits(batch.student.requires_grad_()), normalizer=normalizer)
        (gradient,) = torch.autograd.grad(out.loss, batch.student)
        assert out.loss.item() == 0
        assert not gradient.any()
        assert (out.metrics["kd"].count, out.metrics["kd"].value()) == (0, 0)


@cases_with(ALL_LOSSES, lambda case: case.kd_is_the_loss)
def test_normalizer_divides_the_loss_and_not_the_metric(case: Case):
    """Bug: the metric is divided by the global count of units and then averaged again."""
    batch = case.batch()
    plain, divided = case.run(batch), case.run(batch, normalizer=7)
    total, count = plain.metrics["kd"].total, plain.metrics["kd"].count
    assert count > 1
    torch.testing.assert_close(plain.loss, total / count, rtol=1e-15, atol=0)
    torch.testing.assert_close(divided.loss, total / 7, rtol=1e-15, atol=0)
    assert (divided.metrics["kd"].total, divided.metrics["kd"].count) == (total, count)


@cases_with(ALL_LOSSES, lambda case: not case.chooses_per_call)
@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_sequence_weights_multiply_the_loss_of_each_row(case: Case, chunk_size: int | None):
    """Bug: a block with units of two rows gives one the weight of the other. Metrics are not weighted."""
    batch, weights = case.batch(), torch.tensor([0.3, 2.0], dtype=torch.float64)
    loss, gradient = case.value_and_gradient(batch, sequence_weights=weights, normalizer=5, chunk_size=chunk_size)
    alone = [case.value_and_gradient(batch.rows([b]), normalizer=5) for b in range(2)]
    expected = sum(weight * value for weight, (value, _) in zip(weights, alone, strict=True))
    expected_gradient = torch.cat([weight * value for weight, (_, value) in zip(weights, alone, strict=True)])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-15)
    weighted, plain = (case.run(batch, **options).metrics["kd"] for options in ({"sequence_weights": weights}, {}))
    assert weighted.count == plain.count
    torch.testing.assert_close(weighted.value(), plain.value(), rtol=1e-12, atol=0)


@every_loss
def test_a_sequence_weight_of_zero_leaves_the_row_out(case: Case):
    """Bug: the row counts in the default normalizer, or its NaN logits spread."""
    batch = case.batch()
    batch.student[0], batch.teacher[0] = float("nan"), float("nan")
    weights = {"sequence_weights": torch.tensor([0.0, 1.0])}
    loss, gradient = case.value_and_gradient(batch, **weights)
    alone, gradient_alone = case.value_and_gradient(batch.rows([1]))
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient[1:], gradient_alone, rtol=1e-12, atol=1e-15)
    assert not gradient[0].any()
    metric, expected = case.run(batch, **weights).metrics["kd"], case.run(batch.rows([1])).metrics["kd"]
    assert (metric.count, metric.value()) == (expected.count, expected.value())


@every_loss
def test_only_sequence_weights_of_zero_stay_connected(case: Case):
    """Bug: 0/0 with the default normalizer."""
    loss, gradient = case.value_and_gradient(case.batch(), sequence_weights=torch.zeros(2))
    assert loss.item() == 0
    assert not gradient.any()


@every_loss
def test_sequence_weights_of_a_wrong_shape_are_named(case: Case):
    with pytest.raises(ConfigError, match="sequence_weights"):
        case.run(case.batch(), sequence_weights=torch.ones(3))


@every_loss
def test_low_precision_is_computed_in_fp32_and_returned_in_its_dtype(case: Case):
    """Bug: a softmax or a sum in bf16."""
    batch = case.batch(dtype=torch.bfloat16)
    loss, gradient = case.value_and_gradient(batch)
    expected, exact_gradient = case.value_and_gradient(batch.to(torch.float64))
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    # The gradient is rounded to 8 bits when it is saved and when it is scaled, after differences of probabilities in
    # fp32. A continuation adds two rounded gradients, which may cancel.
    added = float(gradient.abs().max()) * 2**-8 if "continuation_weight" in case.options else 0.0
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=2 * 2**-8, atol=16 * 2**-24 + added)


@every_loss
def test_logits_are_not_written_to(case: Case):
    """Bug: adjacent rows are a view, and an operation in place writes to the caller's logits."""
    batch = case.batch()
    student, teacher = batch.student.clone(), batch.teacher.clone()
    case.value_and_gradient(batch, chunk_size=1)
    case.value_and_gradient(batch)
    assert torch.equal(batch.student, student)
    assert torch.equal(batch.teacher, teacher)


@every_loss
def test_the_teacher_gets_no_gradient(case: Case):
    batch = case.batch()
    teacher = batch.teacher.clone().requires_grad_()
    case.run(batch.with_logits(batch.student.clone().requires_grad_(), teacher)).loss.backward()
    assert teacher.grad is None
    assert not case.run(batch.with_logits(batch.student.detach(), teacher)).loss.requires_grad


@every_loss
def test_without_gradient_the_value_is_the_same(case: Case):
    """Bug: another branch under no_grad."""
    batch = case.batch()
    loss, _ = case.value_and_gradient(batch)
    with torch.no_grad():
        value = case.run(batch.with_logits(batch.student.requires_grad_())).loss
    torch.testing.assert_close(value, loss, rtol=1e-13, atol=0)


@every_loss
def test_repeated_it_is_the_same_to_the_bit(case: Case):
    """Bug: sums in an order that changes between calls."""
    batch = case.batch(dtype=torch.float32)
    first, second = (case.value_and_gradient(batch) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@cases_with(ALL_LOSSES, lambda case: case.takes_temperature)
@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_an_invalid_temperature_is_named(case: Case, wrong: float):
    with pytest.raises(ConfigError, match=f"temperature={wrong}"):
        case.run(case.batch(), temperature=wrong)


@every_loss
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"student_vocab_size": 99}, "student_vocab_size=99: the logits have"),
        ({"student_vocab_size": 0}, "student_vocab_size=0"),
        ({"teacher_vocab_size": 99}, "_vocab_size=99: the logits have"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_is_named(case: Case, wrong: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        case.run(case.batch(), **wrong)


@every_loss
def test_a_wrong_shape_is_named(case: Case):
    batch = case.batch()
    correct = case.arguments(batch)
    for name in correct.keys() - {"projection"}:
        arguments = {**correct, name: correct[name][:, 1:]}
        with pytest.raises(ConfigError, match=f"{name} has shape"):
            case.loss(batch.student, batch.teacher, **arguments, **case.options)
    first_row, both_rows = ({name: getattr(side, name) for name in TEACHER_SIDE} for side in (batch.rows([0]), batch))
    for differing in (replace(batch, **first_row), replace(batch.rows([0]), **both_rows)):
        with pytest.raises(ConfigError, match=r"has shape|numbers of sequences differ"):
            case.run(differing)


@cases_with(ALL_LOSSES, lambda case: case.takes_divergence)
def test_a_wrong_divergence_is_named(case: Case):
    for wrong, message in (
        ({"divergence": "kl"}, "divergence='kl'.*choose from"),
        ({"beta": 1.5}, "beta=1.5"),
        ({"mixed_weight": -0.5}, "mixed_weight=-0.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            case.run(case.batch(), **wrong)


def test_each_row_of_the_batches_has_units():
    """Bug: a row without units; the identities would hold trivially."""
    for case in ALL_LOSSES:
        for b in range(2):
            assert case.run(case.batch().rows([b])).metrics["kd"].count > 0, case


@every_loss
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_values_that_are_not_finite_show_in_the_loss(case: Case, side: str):
    """Bug: a maximum, a clamp or a sort hides a NaN; training checks loss and gradient (methods.md §12)."""
    batch = case.batch()
    spoilt = {"student": batch.student, "teacher": batch.teacher} | {side: getattr(batch, side) * float("nan")}
    loss, gradient = case.value_and_gradient(batch.with_logits(**spoilt))
    assert not (loss.isfinite() and gradient.isfinite().all())
