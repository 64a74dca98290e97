"""Catches results under the wrong run, a damaged run that prevents the page, and numbers sorted as text."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from rich.console import Console

from nemo_opd.logging.comparison import (
    SweptRun,
    headline_measures,
    measures_of,
    read_runs,
    read_sweep,
    setting_tables,
    sweep_table,
    terminal_table,
    write_comparison,
)
from nemo_opd.logging.records import BASELINE, by_size
from tests.logging.synthetic import record, validation


def page_of(root: Path, runs: Sequence[SweptRun]) -> str:
    write_comparison(root / "report.html", runs, setting_tables(runs))
    return (root / "report.html").read_text()


def write_run(folder: Path, bits: float, steps: int = 4, is_complete: bool = True, **more: float) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {name: demo}\n")
    records = [{"step": 0, **validation(2.0)}]
    records += [{"step": step, **record(step), **more} for step in range(1, steps + 1)]
    records[-1] |= validation(bits)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    if is_complete:
        (folder / "report").mkdir()
        (folder / "report" / "report.html").write_text("")


def test_each_run_is_a_row_with_its_own_result(tmp_path: Path) -> None:
    write_run(tmp_path / "run.seed=10", 1.0, steps=3, is_complete=False)
    write_run(tmp_path / "run.seed=2", 1.5)
    write_run(tmp_path / "run.seed=2" / BASELINE, 1.8, steps=3)
    (tmp_path / "run.seed=3").mkdir()
    (tmp_path / "run.seed=3" / "config.yaml").touch()
    (tmp_path / "run.seed=3" / "metrics.jsonl").write_text("[]\n{}\n")
    runs = read_sweep(tmp_path)
    assert [run.name for run in runs] == ["run.seed=2", "run.seed=2/baseline", "run.seed=3", "run.seed=10"]
    assert [run.cells(["val/bits_per_byte"])[1:] for run in runs] == [
        ["1.5000 (-25.0 %)", "4", "0:08"],
        ["1.8000 (-10.0 %)", "3", "0:06"],
        ["-", "0, not finished", "0:00"],
        ["1.0000 (-50.0 %)", "3, not finished", "0:06"],
    ]
    console = Console(width=80, record=True, quiet=True)
    console.print(terminal_table(sweep_table(runs, headline_measures(runs))))
    page = page_of(tmp_path, runs)
    link, _ = re.findall(r'href="([^"]*/report[^"]*)"', page)
    assert unquote(link) == "run.seed=2/report/report.html"
    assert "default-src 'none'" in page
    assert (tmp_path / "report" / "val_bits_per_byte.png").read_bytes().startswith(b"\x89PNG")
    assert not re.search(r"https?://|@import|url\(|<script", page)


def test_questions_have_their_interval(tmp_path: Path) -> None:
    scores = {"eval/pass@1": 0.43, "eval/pass@1_low": 0.36, "eval/pass@1_high": 0.5, "eval/pass@1/teacher": 0.9}
    write_run(tmp_path / "a", 1.5, **scores)
    (run,) = read_sweep(tmp_path)
    assert run.cells(["eval/pass@1"])[1] == "43.0 % (36.0 to 50.0 %)"
    assert measures_of([run]) == ["val/bits_per_byte", "val/ce", "eval/pass@1"]
    assert headline_measures([run]) == ["val/bits_per_byte", "eval/pass@1"]


def test_a_mean_that_is_pass_at_1_has_no_column(tmp_path: Path) -> None:
    """Bug: the same score twice, and no room for pass@2."""
    ends = ("", "_low", "_high")
    equal = {f"eval/held/{name}{end}": 0.5 for name in ("pass@1", "mean@2", "pass@2") for end in ends}
    different = {f"eval/held/{name}{end}": value for name, value in (("pass@1", 0.5), ("mean@4", 0.6)) for end in ends}
    write_run(tmp_path / "a", 1.5, **equal)
    assert measures_of(read_sweep(tmp_path))[2:] == ["eval/held/pass@1", "eval/held/pass@2"]
    write_run(tmp_path / "b", 1.5, **different)
    assert measures_of(read_sweep(tmp_path))[2:] == ["eval/held/pass@1", "eval/held/pass@2", "eval/held/mean@4"]


def test_names_are_text_and_not_markup(tmp_path: Path) -> None:
    write_run(tmp_path / "<b>x", 1.5)
    assert "<b>x" not in page_of(tmp_path, read_sweep(tmp_path))


@pytest.mark.parametrize("name", ["javascript:alert(1)", "data:text", "a#b?c%20d"])
def test_the_name_of_a_folder_is_only_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Bugs: a click on a run named `javascript:…` runs a script; the link of a name with # is broken."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / name, 1.5)
    sweep = page_of(tmp_path, read_sweep(tmp_path))
    write_comparison(tmp_path / "page.html", read_runs([tmp_path / name]), [])
    for page in (sweep, (tmp_path / "page.html").read_text()):
        links = [link for link in re.findall(r'href="([^"]*)"', page) if link != "data:,"]
        assert [urlsplit(link)[:2] for link in links] == [("", "")]
        assert [unquote(urlsplit(link).path) for link in links] == [f"{name}/report/report.html"]


def test_a_sweep_of_nothing_has_a_page(tmp_path: Path) -> None:
    assert "</html>" in page_of(tmp_path, read_sweep(tmp_path / "nothing"))


def test_numbers_are_sorted_by_size() -> None:
    assert sorted(["lr=1e-3", "lr=2e-4", "lr=10", "lr=9"], key=by_size) == ["lr=2e-4", "lr=1e-3", "lr=9", "lr=10"]


def test_a_run_that_was_refused_is_a_row(tmp_path: Path) -> None:
    write_run(tmp_path / "run.seed=1", 1.5)
    runs = read_sweep(tmp_path, ["run.seed=1", "run.seed=2"])
    assert [run.cells([])[1] for run in runs] == ["4", "refused, or not started"]
    page = page_of(tmp_path, runs)
    assert "run.seed=2/" not in page
    assert "Settings that differ" not in page, "only one run has settings"


def test_evaluations_have_their_own_results(tmp_path: Path) -> None:
    """Bug: an evaluation has no figures and counts as not finished."""
    folder = tmp_path / "n=8"
    folder.mkdir()
    (folder / "config.yaml").touch()
    estimates = {
        "pass@1": {"value": 0.43, "low": 0.36, "high": 0.5},
        "mean@8": {"value": 3.2, "low": 3.0, "high": 3.4},
    }
    (folder / "results.json").write_text(json.dumps({"seconds": 61, "estimates": estimates}))
    (run,) = read_sweep(tmp_path)
    assert measures_of([run]) == ["eval/pass@1", "eval/mean@8"]
    assert run.cells(measures_of([run])) == [
        "n=8",
        "43.0 % (36.0 to 50.0 %)",
        "3.200 (3.000 to 3.400)",
        "0",
        "1:01",
    ]
    assert 'href="n%3D8/results.json"' in page_of(tmp_path, [run])
