"""Catches cards that the hub cannot read, figures of other weights, and invented licences."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from nemo_opd.logging.card import Exported, write_card
from nemo_opd.logging.interface import ClosingTable, Score
from nemo_opd.logging.loggers import JsonlLogger
from nemo_opd.logging.provenance import ModelOrigin, Provenance, read_provenance, write_provenance
from nemo_opd.models.folder import OwnCard, read_own_card
from tests.logging.synthetic import CLOSING, QUESTIONS, record, summary, validation

GEMMA = OwnCard("other", "gemma", "https://ai.google.dev/gemma/terms", ("en", "de"))
CONFIG = """\
run: {name: trial, seed: 3}
student: {model: google/gemma-3-1b-pt, optimizer: {lr: 0.001}}
data: {train: {hub: {path: some/corpus}}, validation: {jsonl_files: [held_out.jsonl]}}
"""
COMMAND = "nemo-opd distil train.max_steps=30"
SCORES = [replace(QUESTIONS.scores[0], measure="sums/greedy", differences={"student before": Score(0.2, 0.1, 0.3)})]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of 30 steps with a validation after each."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    log = JsonlLogger(tmp_path / "metrics.jsonl")
    log.start(summary(tmp_path), 0)
    for step in range(1, 31):
        log.log(step, record(step) | validation(2 - step / 100))
    log.close()
    student = ModelOrigin("student", "google/gemma-3-1b-pt", "google/gemma-3-1b-pt", 262144, GEMMA)
    teachers = (
        ModelOrigin(
            "phi", "microsoft/phi-4", "microsoft/phi-4", 100352, OwnCard("mit"), 1.0, "p_kl", ("overlap 0.674",)
        ),
        ModelOrigin("own", "a|b", "a|b", 10, OwnCard(), 0.5, "h_kl"),
    )
    write_provenance(tmp_path, Provenance(COMMAND, {"torch": "2.13.0"}, student, teachers))
    (tmp_path / "final").mkdir()
    return tmp_path


def card_of(run: Path, step: int = 30, closing: ClosingTable | None = None) -> ModelCard:
    write_card(run, Exported(run / "final", "The student", step, closing))
    return ModelCard.load(run / "final" / "README.md")


def rows(card: ModelCard, beginning: str) -> list[list[str]]:
    """Return the cells of the table whose first line begins with `beginning`."""
    lines = card.text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(beginning))
    table = lines[start : lines.index("", start)]
    return [[cell.strip() for cell in row.replace("\\|", "¦").strip("|").split("|")] for row in table]


def test_the_hub_reads_models_licence_and_results(run: Path) -> None:
    data = card_of(run, closing=replace(CLOSING, scores=tuple(SCORES))).data
    assert (data.base_model, data.library_name, data.pipeline_tag) == (
        "google/gemma-3-1b-pt",
        "transformers",
        "text-generation",
    )
    assert (data.license, data.license_name, data.license_link, data.language) == (
        "other",
        "gemma",
        "https://ai.google.dev/gemma/terms",
        ["en", "de"],
    )
    assert data.datasets == ["some/corpus"]
    assert "distillation" in data.tags
    origin = read_provenance(run)
    assert origin is not None
    write_provenance(run, replace(origin, started_from="me/w"))  # by checkpoint from-hf
    assert card_of(run).data.base_model == "me/w"
    results = {(result.dataset_name, result.metric_type): result.metric_value for result in data.eval_results}
    assert results == {("validation text", "bits_per_byte"): 1.5, ("sums", "greedy"): 0.4}


def test_people_read_models_results_curves_and_settings(run: Path) -> None:
    card = card_of(run, closing=replace(CLOSING, scores=tuple(SCORES)))
    models = rows(card, "| | model |")
    assert [row[0] for row in models[2:]] == ["student", "teacher phi", "teacher own"]
    assert models[3][3:] == ["100,352", "1", "p_kl", "mit"]
    assert (models[4][1], models[4][-1]) == ("a¦b", "unknown")
    assert "Unknown: check the terms of a|b before this model is published" in card.text
    assert "- overlap 0.674" in card.text
    assert rows(card, "| validation text")[3] == ["student after", "1.5000", "1.7500", "-25.0 %"]
    scores = rows(card, "| questions")
    assert scores[2][1:3] == ["20.0 % (10.0 to 30.0 %); after: +20.0 ± 10.0 points", "40.0 % (30.0 to 50.0 %)"]
    assert {len(row) for row in scores} == {4}
    curves = rows(card, "| step")
    assert curves[0] == ["step", "loss", "KD", "CE", "bits per byte"]
    assert [row[0] for row in curves[2:]] == ["1", "4", "7", "11", "14", "17", "20", "24", "27", "30"]
    assert curves[-1] == ["30", "0.000", "0.000", "0.000", "1.700"]
    assert ["learning rate", "0.001"] in rows(card, "| | |")
    settings = card.text.split("~~~~~~yaml\n")[1].split("~~~~~~")[0]
    assert yaml.safe_load(settings) == yaml.safe_load(CONFIG)
    assert f"~~~~~~sh\n{COMMAND}\n~~~~~~" in card.text
    assert "torch 2.13.0" in card.text


def test_a_card_of_an_earlier_step_has_nothing_of_later_ones(run: Path) -> None:
    card = card_of(run, step=12)
    assert rows(card, "| step")[-1][0] == "12"
    assert card.data.eval_results is None
    assert "Nothing was measured with exactly these weights" in card.text


def test_little_is_known_of_a_run_of_other_versions(tmp_path: Path) -> None:
    """Bug: a checkpoint that was copied out of its run has no card, or a wrong licence."""
    (tmp_path / "final").mkdir()
    (tmp_path / "adapter_config.json").touch()
    write_card(tmp_path, Exported(tmp_path, "The student", 4), "student: {model: 'demo:student'}")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.base_model, card.data.license) == ("peft", None, None)
    assert "Licences of the models are unknown" in card.text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, OwnCard()),
        ("no front matter", OwnCard()),
        ("---\nlicense: [\n---\n", OwnCard()),
        ("---\nlicense: apache-2.0\nlanguage: en\n---\n# A model", OwnCard("apache-2.0", language=("en",))),
        ("---\nlicense: [mit, apache-2.0]\nlanguage: [de, false]\n---\n", OwnCard("mit, apache-2.0", language=("de",))),
    ],
)
def test_a_models_own_card_is_read(content: str | None, expected: OwnCard, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "README.md").write_text(content)
    assert read_own_card(str(tmp_path)) == expected
    assert read_own_card("nobody/has-this-name") == OwnCard()
