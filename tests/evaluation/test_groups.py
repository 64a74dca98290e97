"""Validation by domain, token class and chunk kind against an oracle over texts and offsets, for several batch cuts."""

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pyarrow as pa
import pytest

from nemo_opd.data.loader import Domains
from nemo_opd.evaluation.validation import CLASSES, class_of, validate, validate_teachers
from nemo_opd.preflight.plan import Plan
from nemo_opd.types import Mean, Metric
from tests.evaluation.test_validation import Read
from tests.tiny import SENTENCES, Tiny
from tests.workers.local import opened, plan_of

DOMAINS = ("prose", "code", "languages", "code")
TEXTS = [(text, domain) for text, domain in zip(SENTENCES, DOMAINS, strict=True)] * 2 + [("x", "prose")]


@dataclass(frozen=True)
class Measured:
    student: dict[str, Metric]
    teachers: dict[str, Metric]
    names: tuple[str, ...]


def measure(plan: Plan) -> Measured:
    with opened(plan) as models:
        size = plan.config.train.global_batch_size
        student, teachers = (
            function(models, plan.data.validation_batches(size)) for function in (validate, validate_teachers)
        )
    return Measured(student, teachers, plan.config.active_names)


@pytest.fixture(scope="module")
def measured(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Measured]:
    file = tmp_path_factory.mktemp("domains") / "validation.arrow"
    texts, domains = zip(*TEXTS, strict=True)
    table = pa.table({"text": texts, "source": domains})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    common = (f"data.validation.arrow_files={file}", "data.domain_key=source", "data.validation.max_samples=null")
    return [
        measure(plan_of(tiny.overrides(*common, "train.max_length=1000", f"train.micro_batch_size={size}")))
        for size in (2, 1)
    ]


def whole_characters(text: str, tokens: list[tuple[int, int, float | None]]) -> bytes:
    """Return the characters that lie inside one token each, otherwise the tokens' first byte."""
    ends = list(accumulate((len(character.encode()) for character in text), initial=0))
    characters = [
        text[i] for i, (start, end) in enumerate(pairwise(ends)) if any(a <= start and end <= b for a, b, _ in tokens)
    ]
    return "".join(characters).encode() or text.encode()[tokens[0][0] : tokens[0][0] + 1]


@pytest.mark.world
def test_figures_are_those_of_stretches_between_offsets(tiny: Tiny, measured: list[Measured]) -> None:
    """Compare with sums in Python floats over stretches of text between two cuts that all models share. Bugs: another
    row's domain after dealing to ranks, a token's class for its stretch's, bytes that a model does not predict, nats
    for bits."""
    result, (cross, same) = measured[0], measured[0].names
    folders = {"student": tiny.student, cross: tiny.teacher_cross, same: tiny.teacher_same}
    read = {name: Read(folder, 1000) for name, folder in folders.items()}
    bits: dict[tuple[str, str], float] = defaultdict(float)
    num_bytes: dict[str, int] = defaultdict(int)
    for text, domain in TEXTS:
        tokens = {name: model(text) for name, model in read.items()}
        common = sorted(set.intersection(*({0, *(end for _, end, _ in spans)} for spans in tokens.values())))
        for start, stop in pairwise(common):
            inside = {name: [token for token in spans if start < token[1] <= stop] for name, spans in tokens.items()}
            if any(surprise is None for spans in inside.values() for _, _, surprise in spans):
                continue
            text_class = CLASSES[class_of(whole_characters(text, inside["student"]))]
            for group in (f"domain/{domain}", f"class/{text_class}"):
                num_bytes[group] += stop - start
                for name, spans in inside.items():
                    bits[name, group] += math.fsum(surprise for _, _, surprise in spans if surprise is not None)
    for group, number in num_bytes.items():
        for name in folders:
            source, key = (result.student, group) if name == "student" else (result.teachers, group)
            metric = source[f"{key}/shared_bits_per_byte" + ("" if name == "student" else f"/{name}")]
            assert isinstance(metric, Mean)
            assert metric.count == number, (name, group)
            assert metric.value() == pytest.approx(bits[name, group] / number, rel=1e-5), (name, group)
    assert {"class/word", "class/numeral", "class/code", "class/cjk", "class/other_script"} <= set(num_bytes)


@pytest.mark.world
def test_the_students_figures_use_its_own_tokens(tiny: Tiny, measured: list[Measured]) -> None:
    """Bugs: classes of stretches that end at the teachers' cuts; bytes that only count if a teacher predicts them."""
    read = Read(tiny.student, 1000)
    bits, num_bytes = defaultdict[str, float](float), defaultdict[str, int](int)
    for text, domain in TEXTS:
        for token in read(text):
            start, end, surprise = token
            if surprise is None or start == end:
                continue
            for group in (f"domain/{domain}", f"class/{CLASSES[class_of(whole_characters(text, [token]))]}"):
                bits[group] += surprise
                num_bytes[group] += end - start
    for group, number in num_bytes.items():
        metric = measured[0].student[f"{group}/bits_per_byte"]
        assert isinstance(metric, Mean)
        assert metric.count == number, group
        assert metric.value() == pytest.approx(bits[group] / number, rel=1e-5), group


@pytest.mark.world
def test_groups_add_up_to_the_whole(measured: list[Measured]) -> None:
    """Bugs: a token or a unit in no group or in two; KD of a unit at a token that is not its first."""
    result, (cross, same) = measured[0], measured[0].names

    def total(pattern: str, measure: str) -> tuple[float, float]:
        metrics = [
            metric
            for name, metric in result.student.items()
            if name.startswith(pattern) and name.endswith(measure) and isinstance(metric, Mean)
        ]
        return math.fsum(float(metric.total) for metric in metrics), math.fsum(
            float(metric.count) for metric in metrics
        )

    overall = {name: metric for name, metric in result.student.items() if isinstance(metric, Mean)}
    kd = [f"kd/{name}" for name in (cross, same)]
    without_kd = {f"chunk/{cross}/": kd[1:], f"position/{cross}/": kd}
    for table in ("domain/", "class/", *without_kd):
        for measure in ("ce", "accuracy", "bits_per_byte", "shared_bits_per_byte", *kd):
            if measure in without_kd.get(table, []):
                continue
            expected = float(overall[measure].total), float(overall[measure].count)
            assert total(table, f"/{measure}") == pytest.approx(expected, rel=1e-5), (table, measure)
    shares = [
        metric.value() for name, metric in overall.items() if name.startswith("class/") and name.endswith("/share")
    ]
    assert math.fsum(shares) == pytest.approx(1)
    assert {f"chunk/{cross}/{kind}/ce" for kind in ("1:1", "1:n", "n:1")} <= set(overall)
    assert {f"position/{cross}/{kind}/accuracy" for kind in ("start", "inside")} <= set(overall)


@pytest.mark.world
def test_microbatches_change_nothing(measured: list[Measured]) -> None:
    """Bug: padding that counts. tests/workers compares layouts."""
    for name, metric in measured[0].student.items():
        if name.startswith(("domain/", "class/", "chunk/", "position/")):
            assert measured[1].student[name].value() == pytest.approx(metric.value(), rel=1e-4), name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "special"),
        (" \n\t", "white_space"),
        (" 1234", "numeral"),
        ("½", "numeral"),
        (", ", "punctuation"),
        ("🙂", "punctuation"),
        (" naïve", "word"),
        ("x1", "word"),
        ("print(", "word"),
        ("x_1", "code"),
        (" += 1", "code"),
        (" привет", "other_script"),
        ("東京と", "cjk"),
        ("한국어", "cjk"),
        ("。", "cjk"),
    ],
)
def test_classes(text: str, expected: str) -> None:
    assert CLASSES[class_of(text.encode())] == expected


def test_a_part_of_a_character_has_a_class() -> None:
    assert CLASSES[class_of("東".encode()[:2])] == "part_of_character"


def test_two_texts_together_have_the_lower_class() -> None:
    """Stretches of several tokens rely on this."""
    texts = [b" ", b"1", b"ab", b"{", b"!", "東".encode(), "ж".encode(), b""]
    for first in texts:
        for second in texts:
            assert class_of(first + second) == min(class_of(first), class_of(second))


def test_rare_domains_share_a_group() -> None:
    domains = Domains.of([f"d{i % 30:02}" for i in range(60)] + ["d29", None])
    assert domains.names[0] == "d29"
    assert len(domains.names) == 21
    assert domains.names[-1] == "others"
    assert int((domains.numbers == 20).sum()) == 2 * 10 + 1
