"""KD as a sum of parts: the metric that adds up, and rows that are emptied."""

import pytest
import torch

from nemo_opd.aggregation import PART, build_parts, share_metrics
from nemo_opd.aggregation.weighted_sum import weighted
from nemo_opd.data.collate import only_chosen, pad_rows, shards
from nemo_opd.losses.planned import compute_together
from nemo_opd.types import Batch, ChunkRows, Mean, TeacherRows, TokenRows
from tests.composition import compose
from tests.tiny import Tiny

LENGTHS = (5, 2, 4)


def rows(lengths: tuple[int, ...] = LENGTHS) -> TokenRows:
    width = max(lengths)
    ids = torch.arange(len(lengths) * width).view(len(lengths), width) % 9
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    return TokenRows(ids, torch.tensor(lengths), valid & (torch.arange(width) > 0), valid.int())


def batch() -> Batch:
    """A cross-tokenizer teacher whose tokens are the student's, so every token is a chunk, and a same-tokenizer one."""
    student = rows()
    chunks = torch.where(student.num_bytes > 0, torch.arange(5), -1).int()
    return Batch(student, (TeacherRows(student, ChunkRows(chunks, chunks)), TeacherRows(student, None)))


def test_only_the_chosen_teacher_has_a_row() -> None:
    chosen = only_chosen(batch(), torch.tensor([1, 0, 1]))
    cross, same = chosen.teachers
    assert cross.tokens.lengths.tolist() == [0, 2, 0]
    assert same.tokens.lengths.tolist() == [5, 0, 4]
    assert not cross.tokens.loss_mask[[0, 2]].any()
    assert not same.tokens.num_bytes[1].any()
    assert cross.chunks is not None
    assert (cross.chunks.student[[0, 2]] == -1).all()
    assert (cross.chunks.teacher[1] == batch().teachers[0].chunks.teacher[1]).all()
    micro = chosen.rows(2, 3)
    assert micro.student.ids.shape == (1, 4)
    assert micro.teachers[0].tokens.ids.shape == (1, 1), "one position where it is asked nothing"
    assert torch.equal(chosen.student.ids, batch().student.ids)


def test_weights_follow_their_rows() -> None:
    """Bugs: weights left behind where a batch is padded, cut or sent to ranks."""
    weights = torch.tensor([[0.1, 0.2, 0.3], [0.9, 0.8, 0.7]])
    first, second = shards(pad_rows(weighted(batch(), weights), 4), 2)
    assert first.teachers[0].weights.tolist() == pytest.approx([0.1, 0.2])
    assert second.teachers[1].weights.tolist() == pytest.approx([0.7, 0.0])
    assert second.rows(0, 1).to("cpu").teachers[0].weights.tolist() == pytest.approx([0.3])


def parts_of(tiny: Tiny, *overrides: str):  # type: ignore[no-untyped-def]
    config = compose(*tiny.overrides("loss=uld", "teachers.0.weight=0.5", "teachers.1.weight=0.5", *overrides))
    return build_parts(config, [None, None], student_vocab_size=9, teacher_vocab_sizes=[9, 9])


def test_units_are_counted_together_where_each_text_has_one_teacher(tiny: Tiny) -> None:
    """9 − 1 label tokens of the chosen same-tokenizer teacher, 2 − 1 chunks of the other."""
    chosen = only_chosen(batch(), torch.tensor([1, 0, 1]))
    assert parts_of(tiny).normalizers(batch()).kd == (8, 8)
    assert parts_of(tiny).normalizers(chosen).kd == (1, 7)
    together = parts_of(tiny, "aggregation=select_teacher")
    assert together.normalizers(chosen).kd == (8, 8)
    assert together.normalizers(only_chosen(batch(), torch.tensor([5, 5, 5]))).kd == (1, 1)


@pytest.mark.parametrize("aggregation", ["weighted_sum", "select_teacher"])
def test_parts_add_up_however_batches_are_pooled(tiny: Tiny, aggregation: str) -> None:
    """The sum of the PART metrics over microbatches is the loss of the whole with its own normalizers."""
    parts = parts_of(tiny, f"aggregation={aggregation}")
    torch.manual_seed(0)
    whole = batch() if aggregation == "weighted_sum" else only_chosen(batch(), torch.tensor([1, 0, 1]))
    student, *teachers = (torch.randn(3, 5, 9, dtype=torch.float64) for _ in range(3))
    student.requires_grad_()
    normalizers = parts.normalizers(whole).kd
    expected = compute_together(parts.plan(student, views(teachers, whole, 0), whole, (1, 1), normalizers)).loss
    pooled: dict[str, Mean] = {}
    for b in range(3):
        micro = whole.rows(b, b + 1)
        logits = student[b : b + 1, : micro.student.ids.shape[1]]
        for part in parts.plan(logits, views(teachers, micro, b), micro, parts.num_units(micro), (1, 1)):
            for name, metric in part.compute().metrics.items():
                if name.startswith(PART):
                    pooled[name] = pooled[name].merge(metric) if name in pooled else metric
    assert sum(metric.value() for metric in pooled.values()) == pytest.approx(float(expected.detach()), rel=1e-12)


def views(logits: list[torch.Tensor], part: Batch, start: int) -> list[torch.Tensor]:
    """What the student's worker is handed for these rows."""
    stop = start + len(part)
    pairs = zip(logits, part.teachers, strict=True)
    return [teacher[start:stop, : own.tokens.ids.shape[1]] for teacher, own in pairs]


def test_what_is_said_of_the_shares(tiny: Tiny) -> None:
    assert share_metrics(parts_of(tiny), batch()) == {}
    chosen = only_chosen(batch(), torch.tensor([1, 0, 1]))
    shares = share_metrics(parts_of(tiny, "aggregation=select_teacher"), chosen)
    assert shares == {"share/cross": Mean(1, 3), "share/same": Mean(2, 3)}
    weights = weighted(batch(), torch.tensor([[0.25, 0.25, 0.4], [0.75, 0.75, 0.6]]))
    said = share_metrics(parts_of(tiny, "aggregation.weights=entropy"), weights)
    assert {name: metric.value() for name, metric in said.items()} == pytest.approx(
        {"weight/cross": 0.3, "weight/same": 0.7}
    )
