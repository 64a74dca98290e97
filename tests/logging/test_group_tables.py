"""Tables of validation by group: the right figures in the right places, in HTML and in Markdown."""

import json
from pathlib import Path

from nemo_opd.logging.records import group_tables, markdown
from nemo_opd.logging.report import write_report

START = {
    "step": 0,
    "val/bits_per_byte": 2.0,
    "val/domain/web/news/share": 0.25,
    "val/domain/web/news/ce": 3.0,
    "val/domain/web/news/bits_per_byte": 2.0,
    "val/domain/web/news/shared_bits_per_byte": 2.5,
    "val/domain/web/news/shared_bits_per_byte/big": 1.0,
    "val/domain/code|x/share": 0.75,
    "val/domain/code|x/bits_per_byte": 4.0,
    "val/domain/code|x/shared_bits_per_byte": 5.0,
    "val/domain/code|x/shared_bits_per_byte/big": 6.0,
    "val/chunk/big/1:n/share": 1.0,
    "val/chunk/big/1:n/bits_per_byte": 2.0,
    "val/class/special/share": 0.5,
    "val/class/special/ce": 1.0,
}
END = {
    "step": 7,
    "val/domain/web/news/share": 0.25,
    "val/domain/web/news/ce": 2.5,
    "val/domain/web/news/kd/big": 0.5,
    "val/domain/web/news/bits_per_byte": 1.5,
    "val/domain/web/news/shared_bits_per_byte": 2.0,
    "val/domain/code|x/share": 0.75,
    "val/domain/code|x/bits_per_byte": 4.4,
    "val/chunk/big/1:n/share": 1.0,
    "val/chunk/big/1:n/bits_per_byte": 2.0,
    "val/class/special/share": 0.5,
    "val/class/special/ce": 0.5,
}


def test_figures_are_in_their_columns() -> None:
    """Bugs: figures of the start in the columns of the end; a group's name is cut at its slash; teachers are lost at
    later steps; a missing figure shifts the row."""
    domains, classes, chunks = group_tables([START, {"step": 3, "train/loss": 1.0}, END])
    assert domains.title == "Validation by domain"
    heads = [f"{bits} {time}" for bits in ("bits per byte", "over shared bytes") for time in ("before", "after")]
    assert list(domains.heads) == ["", "share of tokens", *heads, "teacher big", "cross-entropy after", "KD of big"]
    assert [list(row) for row in domains.rows] == [
        ["code|x", "75.0 %", "4.0000", "4.4000 (+10.0 %)", "5.0000", "-", "6.0000 (+20.0 %)", "-", "-"],
        [
            *("web/news", "25.0 %", "2.0000", "1.5000 (-25.0 %)"),
            *("2.5000", "2.0000 (-20.0 %)", "1.0000 (-60.0 %)", "2.500", "0.500"),
        ],
    ]
    assert [list(row) for row in classes.rows] == [["special", "50.0 %", "-", "-", "0.500"]]
    assert chunks.title == "Validation by aligned chunk, student : big"
    assert markdown(domains).splitlines()[4].startswith("| code\\|x | 75.0 % |")


def test_the_report_has_them(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (START, END)))
    page = write_report(tmp_path).read_text()
    assert "Validation by class of token" in page
    assert "1.5000 (-25.0\N{NO-BREAK SPACE}%)" in page
    assert (tmp_path / "report" / "tables.md").read_text().count("## ") == 3


def test_a_run_without_them_has_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/bits_per_byte": 2.0}\n')
    write_report(tmp_path)
    assert not (tmp_path / "report" / "tables.md").exists()
