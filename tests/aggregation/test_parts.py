"""The objective over several teachers: units, divisors, metrics of microbatches, and rows of routed texts."""

from dataclasses import replace

import pytest
import torch

from nemo_opd.aggregation import (
    PART,
    SHARE,
    Divisor,
    build_objective,
    coverage_metrics,
    kd_of,
    share_metrics,
    weighted_by_confidence,
)
from nemo_opd.aggregation.rules import weighted
from nemo_opd.data.collate import mask_unrouted, shards
from nemo_opd.distributed.transfer import to_device
from nemo_opd.logits.planned import compute_together
from nemo_opd.losses.arguments import label_mask, sampled_mask
from nemo_opd.types import (
    Batch,
    ChunkRows,
    Mean,
    MovedRows,
    Normalizers,
    SampledRows,
    SequenceScores,
    TeacherRows,
    TokenRows,
)
from tests.composition import compose
from tests.rows import pad_rows
from tests.tiny import Tiny

LENGTHS = (5, 2, 4)


def rows(lengths: tuple[int, ...] = LENGTHS) -> TokenRows:
    width = max(lengths)
    ids = torch.arange(len(lengths) * width).view(len(lengths), width) % 9
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    return TokenRows(ids, torch.tensor(lengths), valid & (torch.arange(width) > 0), valid.int())


def batch() -> Batch:
    """Return a batch for a cross-tokenizer teacher, with a chunk per token, and a same-tokenizer teacher."""
    student = rows()
    chunks = torch.where(student.num_bytes > 0, torch.arange(5), -1).int()
    return Batch(student, (TeacherRows(student, ChunkRows(chunks, chunks)), TeacherRows(student, None)))


def test_only_the_chosen_teacher_has_a_row() -> None:
    routed = mask_unrouted(batch(), torch.tensor([1, 0, 1]))
    cross, same = routed.teachers
    assert cross.tokens.lengths.tolist() == [0, 2, 0]
    assert same.tokens.lengths.tolist() == [5, 0, 4]
    assert not cross.tokens.loss_mask[[0, 2]].any()
    assert not same.tokens.num_bytes[1].any()
    assert cross.chunks is not None
    assert (cross.chunks.student[[0, 2]] == -1).all()
    assert (cross.chunks.teacher[1] == batch().teachers[0].chunks.teacher[1]).all()
    micro = routed.rows(2, 3)
    assert micro.student.ids.shape == (1, 4)
    assert micro.teachers[0].tokens.ids.shape == (1, 1), "one position of padding if the teacher has no text"
    assert torch.equal(routed.student.ids, batch().student.ids)


def test_weights_follow_their_rows() -> None:
    """Bug: weights are lost if a batch is padded, cut or sent to ranks."""
    weights = torch.tensor([[0.1, 0.2, 0.3], [0.9, 0.8, 0.7]])
    first, second = shards(pad_rows(weighted(batch(), weights), 4), 2)
    assert first.teachers[0].weights.tolist() == pytest.approx([0.1, 0.2])
    assert second.teachers[1].weights.tolist() == pytest.approx([0.7, 0.0])
    assert to_device(second.rows(0, 1), "cpu").teachers[0].weights.tolist() == pytest.approx([0.3])


def with_samples(batch: Batch) -> Batch:
    """Return the batch with rows 0 and 2 as rollouts of one prompt; row 1 is from the dataset."""
    logprobs = -torch.arange(15.0).view(3, 5)
    sampled = SampledRows(
        torch.tensor([True, False, True]),
        logprobs,
        logprobs / 2,
        torch.tensor([1.0, 0.0, -1.0]),
        torch.tensor([4, 8, 4]),
    )
    weights = torch.tensor([0.25, 1.0, 0.75])
    teachers = tuple(replace(teacher, rollout_weights=weights) for teacher in batch.teachers)
    return replace(batch, teachers=teachers, sampled=sampled)


def test_fields_of_samples_follow_their_rows() -> None:
    """Bugs: fields are lost if a batch is padded, cut, routed or sent to ranks; a view keeps the full batch alive."""
    first, second = shards(pad_rows(with_samples(mask_unrouted(with_samples(batch()), torch.tensor([1, 0, 1]))), 4), 2)
    assert second.sampled is not None
    assert second.sampled.is_sampled.tolist() == [True, False]
    assert second.sampled.prompts.tolist() == [4, -1]
    assert second.sampled.advantages.tolist() == [-1.0, 0.0]
    assert second.sampled.logprobs.tolist() == [[-10.0, -11.0, -12.0, -13.0], [0.0] * 4]
    assert second.sampled.behaviour_logprobs.tolist() == [[-5.0, -5.5, -6.0, -6.5], [0.0] * 4]
    assert second.teachers[1].rollout_weights.tolist() == [0.75, 0.0]
    assert to_device(first.rows(1, 2), "cpu").teachers[0].rollout_weights.tolist() == [1.0]
    assert first.rows(1, 2).sampled.logprobs.tolist() == [[-5.0, -6.0]]
    assert to_device(first.rows(1, 2), "cpu").sampled.behaviour_logprobs.tolist() == [[-2.5, -3.0]]
    for logprobs in (second.sampled.logprobs, second.sampled.behaviour_logprobs):
        assert logprobs.untyped_storage().nbytes() == 8 * 4
    assert sampled_mask(second.student.loss_mask, second.sampled).sum() == 3
    assert label_mask(first).sum() == 1


def test_units_of_rollouts_count_by_their_weight(tiny: Tiny) -> None:
    """4·0.25 + 1 + 3·0.75 units per teacher; only row 1 has labels for cross-entropy, the policy has 4 + 3 tokens."""
    weighted_counts = objective_of(tiny).normalizers(with_samples(batch()))
    assert (weighted_counts.kd, weighted_counts.ce, weighted_counts.policy) == ((4.25, 4.25), 1, 7)
    plain = objective_of(tiny).normalizers(batch())
    assert (plain.ce, plain.policy) == (8, 1)


def test_confidence_weighs_the_rollouts_of_a_prompt() -> None:
    """Mean log-probabilities in nats per token: 2 bits over 1 token against 6 bits over 2."""
    bits, tokens = torch.tensor([2.0, 9.0, 6.0], dtype=torch.float64), torch.tensor([1, 1, 2])
    teacher_scores = [None, SequenceScores(bits, tokens, tokens)]
    weighted_batch = weighted_by_confidence(
        replace(with_samples(batch()), teachers=batch().teachers), teacher_scores, [None, 1.0]
    )
    assert weighted_batch.teachers[0].rollout_weights is None
    assert weighted_batch.teachers[1].rollout_weights.tolist() == pytest.approx([2 / 3, 1.0, 1 / 3], rel=1e-6)
    assert weighted_by_confidence(batch(), teacher_scores, [None, 1.0]).teachers[1].rollout_weights is None


def test_statistics_of_samples(tiny: Tiny) -> None:
    """Overlap needs a shared tokenizer or a projection; a batch without samples has no statistics."""
    objective, sampled_batch = objective_of(tiny), with_samples(batch())
    student = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(0))
    plans = objective.plan_statistics(student, views([student, student], sampled_batch, 0), sampled_batch)
    metrics = compute_together(plans).metrics
    assert metrics["overlap/same"].value() == 1
    assert metrics["overlap/same"].count == 2, "one token in sixteen is measured: token 1 of rows 0 and 2"
    assert metrics["entropy"].count == 7
    assert objective.plan_statistics(student, [], batch()) == []
    texts = compute_together(objective.plan_overlaps(student, views([student, student], batch(), 0), batch())).metrics
    assert texts["overlap/same"].value() == 1


def objective_of(tiny: Tiny, *overrides: str):  # type: ignore[no-untyped-def]
    config = compose(*tiny.overrides("loss=uld", "teachers.0.weight=0.5", "teachers.1.weight=0.5", *overrides))
    return build_objective(config, [None, None], student_vocab_size=9, teacher_vocab_sizes=[9, 9])


def test_units_are_counted_together_where_each_text_has_one_teacher(tiny: Tiny) -> None:
    """5 + 4 − 2 tokens for the same-tokenizer teacher and 2 − 1 chunks for the cross-tokenizer teacher."""
    routed = mask_unrouted(batch(), torch.tensor([1, 0, 1]))
    assert objective_of(tiny).normalizers(batch()).kd == (8, 8)
    assert objective_of(tiny).normalizers(routed).kd == (1, 7)
    together = objective_of(tiny, "aggregation=select_teacher")
    assert together.normalizers(routed).kd == (8, 8)
    assert together.normalizers(mask_unrouted(batch(), torch.tensor([5, 5, 5]))).kd == (1, 1)


TCAD = ["loss=same_vocab", "teachers.0.type=same_tokenizer", "+teachers.0.loss={type: tcad, support_size: 3}"]


def without_chunks(batch: Batch) -> Batch:
    return replace(batch, teachers=(TeacherRows(batch.student, None), batch.teachers[1]))


def test_kinds_of_units_count_by_their_texts(tiny: Tiny) -> None:
    """Teacher 0 has one text, which is one unit; teacher 1 has two texts of 7 tokens: shares of 1/3 and 2/3.

    Bug: one divisor of 8 for texts and tokens, which makes teacher 0's share tiny.
    """
    objective = objective_of(tiny, "aggregation=select_teacher", *TCAD)
    routed = mask_unrouted(without_chunks(batch()), torch.tensor([1, 0, 1]))
    assert objective.divisors(routed) == (Divisor(1, Mean(1, 3)), Divisor(7, Mean(2, 3)))
    assert objective.normalizers(routed).kd == pytest.approx((3, 10.5))
    alone = mask_unrouted(without_chunks(batch()), torch.tensor([1, 1, 1]))
    assert objective.normalizers(alone).kd == (1, 8), "as without a second teacher"
    nothing = mask_unrouted(without_chunks(batch()), torch.tensor([5, 5, 5]))
    assert objective.normalizers(nothing).kd == (1, 1)


def test_a_text_counts_as_much_whichever_kind_of_unit_it_has(tiny: Tiny) -> None:
    """Equal texts, half of them with tcad over the full vocabulary, which is the mean of same_vocab over tokens."""
    objective = objective_of(
        tiny,
        "aggregation=select_teacher",
        "loss=same_vocab",
        TCAD[1],
        "+teachers.0.loss={type: tcad, coverage_coef: 0}",
    )
    student = rows((5, 5, 5, 5))
    unrouted = Batch(student, (TeacherRows(student, None), TeacherRows(student, None)))
    routed = mask_unrouted(unrouted, torch.tensor([0, 1, 0, 1]))
    torch.manual_seed(0)
    row, teacher = (torch.randn(1, 5, 9, dtype=torch.float64).expand(4, -1, -1).contiguous() for _ in range(2))
    row.requires_grad_()
    plans = objective.plan(
        row, [teacher, teacher], routed, objective.divisors(routed), objective.normalizers(routed), terms=("kd",)
    )
    (gradient,) = torch.autograd.grad(compute_together(plans).loss, row)
    torch.testing.assert_close(gradient, gradient[:1].expand(4, -1, -1), rtol=1e-12, atol=0)


def test_averaged_teachers_are_compared_where_all_of_them_read(tiny: Tiny) -> None:
    """Bug: all tokens of the first teacher count, though the second reads a longer prompt and fewer of them."""
    objective = objective_of(tiny, "aggregation=averaged_logits", "loss=same_vocab", "teachers.0.type=same_tokenizer")
    student = rows()
    scored = student.loss_mask.clone()
    scored[0, 3:] = False
    behind = TeacherRows(rows((7, 4, 6)), None, moved=MovedRows(torch.tensor([2, 2, 2]), scored))
    for teachers in ((TeacherRows(student, None), behind), (behind, TeacherRows(student, None))):
        two_teachers = Batch(student, teachers)
        (part,) = objective.parts
        assert part.student_side(two_teachers).loss_mask.equal(scored)
        assert part.loss.count(*part.rows(two_teachers)) == int(scored.sum()) == 6
        assert coverage_metrics(objective, two_teachers, ["cross", "same"])["kd_coverage/same"].value() == 6 / 8


AGGREGATIONS = {
    "weighted_sum": [],
    "select_teacher": ["aggregation=select_teacher"],
    "select_teacher, kinds of units": ["aggregation=select_teacher", *TCAD],
}


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_parts_add_up_however_batches_are_pooled(tiny: Tiny, aggregation: str, is_sampled: bool) -> None:
    """KD from the pooled metrics of microbatches equals the loss of the full batch."""
    objective = objective_of(tiny, *AGGREGATIONS[aggregation])
    torch.manual_seed(0)
    full_batch = without_chunks(batch()) if "kinds" in aggregation else batch()
    full_batch = full_batch if aggregation == "weighted_sum" else mask_unrouted(full_batch, torch.tensor([1, 0, 1]))
    full_batch = with_samples(full_batch) if is_sampled else full_batch
    student, *teachers = (torch.randn(3, 5, 9, dtype=torch.float64) for _ in range(3))
    student.requires_grad_()
    plans = objective.plan(
        student,
        views(teachers, full_batch, 0),
        full_batch,
        objective.divisors(full_batch),
        objective.normalizers(full_batch),
        terms=("kd",),
    )
    expected = compute_together(plans).loss
    pooled: dict[str, Mean] = {}
    for b in range(3):
        micro = full_batch.rows(b, b + 1)
        logits = student[b : b + 1, : micro.student.ids.shape[1]]
        for part in objective.plan(
            logits,
            views(teachers, micro, b),
            micro,
            objective.divisors(micro),
            Normalizers(1, (1, 1), 1),
            terms=("kd",),
        ):
            for name, metric in part.compute().metrics.items():
                if name.startswith((PART, SHARE)):
                    pooled[name] = pooled[name].merge(metric) if name in pooled else metric
    assert any(name.startswith(SHARE) for name in pooled) == ("kinds" in aggregation)
    assert kd_of(pooled) == pytest.approx(float(expected.detach()), rel=1e-12)


def views(logits: list[torch.Tensor], part: Batch, start: int) -> list[torch.Tensor]:
    """Return the teachers' logits for the rows of `part`, as the student's worker gets them."""
    stop = start + len(part)
    pairs = zip(logits, part.teachers, strict=True)
    return [teacher[start:stop, : rows_of_teacher.tokens.ids.shape[1]] for teacher, rows_of_teacher in pairs]


def test_metrics_of_shares_and_weights(tiny: Tiny) -> None:
    assert share_metrics(objective_of(tiny), batch()) == {}
    routed = mask_unrouted(batch(), torch.tensor([1, 0, 1]))
    shares = share_metrics(objective_of(tiny, "aggregation=select_teacher"), routed)
    assert shares == {"share/cross": Mean(1, 3), "share/same": Mean(2, 3)}
    weighted_batch = weighted(batch(), torch.tensor([[0.25, 0.25, 0.4], [0.75, 0.75, 0.6]]))
    metrics = share_metrics(objective_of(tiny, "aggregation.weights=entropy"), weighted_batch)
    assert {name: metric.value() for name, metric in metrics.items()} == pytest.approx(
        {"weight/cross": 0.3, "weight/same": 0.7}
    )


def test_the_share_of_tokens_that_get_kd(tiny: Tiny) -> None:
    """4 + 1 + 3 scored tokens: token 2 of row 0 and row 2 are in no chunk. Metrics of shards add up to the batch's."""
    names, full_batch = ["cross", "same"], batch()
    cross, same = full_batch.teachers
    assert cross.chunks is not None
    student_chunks = cross.chunks.student.clone()
    student_chunks[0, 2], student_chunks[2] = -1, -1
    full_batch = replace(
        full_batch, teachers=(replace(cross, chunks=replace(cross.chunks, student=student_chunks)), same)
    )
    coverage = coverage_metrics(objective_of(tiny), full_batch, names)
    assert coverage == {
        "kd_coverage/cross": Mean(3 + 1, 8),
        "kd_positions/cross": Mean(3 + 1, 8),
        "kd_positions/cross/start": Mean(4, 4),
        "kd_positions/cross/unaligned": Mean(0, 4),
        "kd_coverage/same": Mean(8, 8),
    }
    parts = [coverage_metrics(objective_of(tiny), part, names) for part in shards(pad_rows(full_batch, 4), 2)]
    assert parts[0]["kd_coverage/cross"].merge(parts[1]["kd_coverage/cross"]) == Mean(4, 8)
    routed = mask_unrouted(full_batch, torch.tensor([1, 0, 0]))
    shared = coverage_metrics(objective_of(tiny, "aggregation=select_teacher"), routed, names)
    assert shared["kd_coverage/cross"] == shared["kd_positions/cross"] == Mean(1, 4), "among the texts routed to it"
    assert shared["kd_coverage/same"] == Mean(4, 4), "among the texts routed to it"
    joined = replace(cross, chunks=ChunkRows(cross.chunks.student.clamp(max=2), cross.chunks.teacher.clamp(max=2)))
    several = coverage_metrics(objective_of(tiny), replace(full_batch, teachers=(joined, same)), names)
    assert several["kd_coverage/cross"] == Mean(8, 8)
    assert several["kd_positions/cross"] == Mean(2 + 1 + 2, 8), "a chunk of several tokens is compared once"
    assert {name: share.total for name, share in several.items() if name.startswith("kd_positions/cross/")} == {
        "kd_positions/cross/start": 5,
        "kd_positions/cross/later": 0,
    }
