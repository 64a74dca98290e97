"""Catches a page that needs files or the network, text that becomes markup, and runs that break the report."""

import base64
import json
import math
import re
import warnings
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nemo_opd.errors import DataError
from nemo_opd.logging import report
from nemo_opd.logging.charts import LIGHT, Theme, smooth, write_chart
from nemo_opd.logging.interface import ClosingRow, ClosingTable, Score, ScoreRow
from nemo_opd.logging.metrics import shares, step_parts
from nemo_opd.logging.plots import PLOTS, draw_loss, draw_questions, draw_step_time, not_taken, parts_by_step
from nemo_opd.logging.records import MovedRow, write_hardware, write_projections
from nemo_opd.logging.report import write_report
from nemo_opd.logging.scores import SampleLog, ShownAnswer
from tests.exit_status import exit_status
from tests.logging.synthetic import CLOSING, QUESTIONS, record, summary, validation

PNG = b"\x89PNG\r\n\x1a\n"
CONFIG = """
run: {name: "<b>demo</b>", seed: 3}
student: {model: llama-1b}
teachers:
- {name: phi4mini, model: microsoft/Phi-4-mini-instruct, type: cross_tokenizer, weight: 0.8, loss: null}
loss: {type: p_kl, kd_weight: 1, divergence: reverse_kl}
"""


def write_run(folder: Path, records: list[dict[str, float]]) -> None:
    (folder / "config.yaml").write_text(CONFIG)
    lines = [json.dumps({name: None if value != value else value for name, value in line.items()}) for line in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def a_run() -> list[dict[str, float]]:
    trained = [{"step": step, **record(step)} for step in range(1, 21)]
    trained[9] |= validation(1.75) | {"train/grad_norm": math.nan}
    trained[19] |= validation(1.5)
    return [{"step": 0, **validation(2.0)}, *trained]


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "data", "poster")]


@pytest.fixture
def charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw charts again, at a low resolution, which is faster."""
    monkeypatch.setattr(report, "PLOTS", PLOTS)
    monkeypatch.setattr("nemo_opd.logging.charts._DPI", 30)


@pytest.mark.usefixtures("charts")
def test_the_page_holds_its_figures_and_loads_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, a_run())
    page = write_report(tmp_path, CLOSING)
    assert page == tmp_path / "report" / "report.html"
    text = page.read_text()
    parsed = Page(text)
    assert all(url.startswith("data:") for url in parsed.loads)
    assert not re.search(r"https?://|@import|url\(|<script", text)
    images = [base64.b64decode(url.split(",")[1]) for url in parsed.loads if url.startswith("data:image/png")]
    files = {file.name: file.read_bytes() for file in (tmp_path / "report").glob("*.png")}
    assert set(files) == {"loss.png", "validation.png", "teachers.png", "optimizer.png", "speed.png", "step_time.png"}
    assert all(content.startswith(PNG) for content in (*images, *files.values()))
    assert set(files.values()) <= set(images)
    assert len(images) == 2 * len(files)  # light and dark


def test_the_page_shows_results_facts_and_config(tmp_path: Path) -> None:
    write_run(tmp_path, a_run())
    text = write_report(tmp_path, CLOSING).read_text()
    # 20 steps of 4,096 tokens and 2 s; bits per byte 2.0 → 1.5
    for part in ("1.5000", "−25.0 %", "81.9k", "0:40", "1.2500", "microsoft/Phi-4-mini-instruct", "weight 0.8"):
        assert part in text
    assert "(loss p_kl (reverse_kl), weight 1)" in text
    assert "<b>demo" not in text
    assert "&lt;b&gt;demo&lt;/b&gt;" in text
    assert "None" not in text


def test_a_score_that_is_no_share_is_no_percentage(tmp_path: Path) -> None:
    """Bug: a perplexity of 2 is shown as 200 %."""
    write_run(tmp_path, a_run())
    row = ScoreRow("wiki/word_perplexity", Score(4.0, 3.0, 5.0), Score(2.0, 1.5, 2.5))
    text = write_report(tmp_path, ClosingTable(None, None, scores=(row,))).read_text()
    assert "<b>2.000</b><span>wiki/word_perplexity, was 4.000</span>" in text


def test_text_of_a_closing_row_is_escaped(tmp_path: Path) -> None:
    write_run(tmp_path, a_run())
    closing = ClosingTable(None, ClosingRow("<script>x</script>", 1.0, "<i>"))
    assert not {"script", "i"} & set(Page(write_report(tmp_path, closing).read_text()).tags)


def test_scores_stand_in_the_columns_of_their_models(tmp_path: Path) -> None:
    """Bugs: a teacher's score in the student's column; an unknown score shifts the row."""
    write_run(tmp_path, a_run())
    text = write_report(tmp_path, QUESTIONS).read_text().replace("\N{NO-BREAK SPACE}", " ")
    table = text.partition("<h2>Questions</h2>")[2].partition("</table>")[0]
    rows = [re.findall(r"<(?:th|td|small)(?: [^>]*)?>(?:<b>)?([^<]*)", row) for row in table.split("</tr>")[:-1]]
    assert rows == [
        ["measure", "student before", "student after", "teacher phi4mini"],
        ["greedy", "20.0 %", "10.0 to 30.0 %", "40.0 %", "30.0 to 50.0 %", "90.0 %", "80.0 to 95.0 %"],
        ["pass@4", "–", "60.0 %", "50.0 to 70.0 %", "–"],
    ]


@pytest.mark.parametrize(
    ("evaluation", "right"), [("{correct_reward: 0.5}", 3), ("{correct_reward: 2}", 0), ("null", 2)]
)
def test_answers_are_right_by_the_reward_that_scores_ask_for(tmp_path: Path, evaluation: str, right: int) -> None:
    (tmp_path / "config.yaml").write_text(f"evaluation: {evaluation}\n")
    rewards = (0.4, 0.5, 1.0, 1.5)
    SampleLog(tmp_path / "samples.jsonl").replace(
        (ShownAnswer(0, i, "greedy", 0, "?", None, "!", reward, "stop", 1) for i, reward in enumerate(rewards)),
    )
    verdicts = re.findall(">(right|wrong)<", write_report(tmp_path).read_text())
    assert verdicts == ["wrong"] * (4 - right) + ["right"] * right


def test_a_teachers_score_is_a_level_line_in_the_colour_of_its_measure() -> None:
    """Bugs: a teacher whose name ends in `_low` is drawn as a measure; a bound is drawn as a teacher."""
    figure = Figure()
    scores = {
        f"eval/{name}{end}{model}": value
        for name, model, value in (
            ("greedy", "", 0.2),
            ("pass@4", "", 0.3),
            ("greedy", "/a", 0.8),
            ("pass@4", "/a", 0.9),
            ("greedy", "/a_low", 0.6),
        )
        for end in ("", "_low", "_high")
    }
    draw_questions(figure, [{"step": 0, **scores}], ClosingTable(None, None), LIGHT)
    drawn = {(line.get_color(), *line.get_ydata()) for line in figure.axes[0].lines}
    assert drawn == {
        (LIGHT.cycle[0], 0.2),
        (LIGHT.cycle[1], 0.3),
        (LIGHT.cycle[0], 0.8, 0.8),
        (LIGHT.cycle[1], 0.9, 0.9),
        (LIGHT.cycle[0], 0.6, 0.6),
        (LIGHT.muted,),
    }


def test_each_set_has_its_axes_and_no_share_is_cut() -> None:
    """Bugs: a legend of ten curves; a perplexity above an axis that ends at 100 %."""
    figure = Figure()
    scores = ("gsm8k/pass@1", 0.2), ("gsm8k/mean@4", 0.2), ("gsm8k/greedy", 0.1), ("wikitext/word_perplexity", 12.5)
    figures = {f"eval/{name}{end}": value for name, value in scores for end in ("", "_low", "_high")}
    draw_questions(figure, [{"step": 0, **figures}], ClosingTable(None, None), LIGHT)
    curves = {axes.get_ylabel(): [line.get_label() for line in axes.lines] for axes in figure.axes}
    assert curves == {"gsm8k": ["greedy", "pass@1"], "wikitext": ["word_perplexity"]}
    low, high = figure.axes[1].get_ylim()
    assert low < 12.5 < high


@pytest.mark.usefixtures("charts")
@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 0, **validation(2.0)}],
        [{"step": 1, "train/loss": math.nan}],
        [{"step": 1, "perf/step_s": 1.0}, {"step": 2, "train/lr": 0.0}],
    ],
    ids=["nothing", "start_only", "nan_only", "few_keys"],
)
def test_a_report_of_few_records(tmp_path: Path, records: list[dict[str, float]]) -> None:
    if records:
        write_run(tmp_path, records)
    assert "</html>" in write_report(tmp_path).read_text()
    assert not [file for file in (tmp_path / "report").iterdir() if file.name.startswith(".")]


def lines(draw, records: list[dict[str, float]]) -> list[list[str]]:
    figure = Figure()
    draw(figure, records, ClosingTable(None, None), LIGHT)
    return [[str(line.get_label()) for line in axes.lines] for axes in figure.axes]


def test_a_term_without_weight_is_no_curve() -> None:
    """Bugs: a flat line at 0; a KD curve that hides the loss."""
    records = [{"step": step, **record(step)} for step in (1, 2)]
    assert lines(draw_loss, records) == [["loss", "KD", "CE"]]
    alone = [line | {"train/ce": 0.0, "train/kd": line["train/loss"]} for line in records]
    assert lines(draw_loss, alone) == [["loss"]]


def test_steps_that_were_not_taken_are_marked() -> None:
    """Bug: a gap in the curve without a mark, or no sign at all if only the gradient was not finite."""
    records = [{"step": step, **record(step), "train/skipped_steps": step // 3} for step in range(1, 8)]
    assert lines(draw_loss, records) == [["loss", "KD", "CE", "step not taken"]]
    assert not_taken(records) == [3, 6]


@pytest.mark.parametrize(("slowest_s", "num_marks"), [(2.0, 0), (4.0, 0), (40.0, 1)])
def test_no_step_is_cut_without_a_mark(slowest_s: float, num_marks: int) -> None:
    """Bug: curves leave the plot at its top without a mark."""
    records = [{"step": step, **record(step)} for step in range(1, 60)]
    records[30] |= {"perf/step_s": slowest_s, "perf/other_s": slowest_s - 1.875}
    figure = Figure()
    draw_step_time(figure, records, ClosingTable(None, None), LIGHT)
    axes = figure.axes[1]
    assert len(axes.texts) == num_marks
    if num_marks:
        assert axes.texts[0].get_text().endswith("40.000 s")
    else:
        assert axes.get_ylim()[1] > slowest_s


def test_the_page_shows_hardware_adapters_coverage_and_skipped_steps(tmp_path: Path) -> None:
    """Bug: the page says `device auto`, and lacks coverage and skipped steps."""
    more = {"train/kd_coverage/phi4mini": 0.875, "train/skipped_steps": 3}
    write_run(tmp_path, [line | more for line in a_run()])
    lora = "lora: {rank: 8, alpha: 16, dropout: 0.1, target_modules: [q_proj, v_proj], export: merged}"
    config = CONFIG.replace("{model: llama-1b}", f"{{model: llama-1b, {lora}}}")
    (tmp_path / "config.yaml").write_text(f"{config}cluster: {{device: auto}}\n")
    write_hardware(summary(tmp_path))
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", write_report(tmp_path).read_text()))
    assert facts["device"] == "cpu"
    assert facts["layout"] == "2 ranks: 2 data parallel"
    assert facts["LoRA"] == "rank 8, alpha 16, dropout 0.1; q_proj, v_proj; exported merged"
    assert facts["phi4mini"].endswith("KD on 87.5 % of the scored tokens")
    assert facts["skipped steps"] == "3"


def test_the_page_shows_the_rows_of_a_learned_projection(tmp_path: Path) -> None:
    """Bugs: weights before and after are swapped; tokens become markup; a damaged file is ignored."""
    write_run(tmp_path, a_run())
    entries = [(("'<b>'", 0.9), ("'2'", 0.1)), (("'<b>'", 0.25), ("'2'", 0.75))]
    write_projections(tmp_path, {"phi4mini": [MovedRow("'12'", 0.65, *entries)]})
    text = write_report(tmp_path).read_text()
    cells = re.findall(r"<td[^>]*>(.*?)</td>", text[text.index("Learned projection of phi4mini") :], re.DOTALL)
    contents = [re.sub(r"</?code>", "", cell).strip() for cell in cells]
    assert contents == [
        "&#39;12&#39;",
        "65.0 %",
        "&#39;&lt;b&gt;&#39; 0.90, &#39;2&#39; 0.10",
        "&#39;&lt;b&gt;&#39; 0.25, &#39;2&#39; 0.75",
    ]
    (tmp_path / "projections.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        write_report(tmp_path)


def test_legends_of_many_teachers_leave_the_axes_their_width(tmp_path: Path) -> None:
    """Bug: a legend wider than the figure left a third of it or nothing to the axes."""

    def width(number: int) -> float:
        widths: list[float] = []

        def draw(figure: Figure, theme: Theme) -> None:
            axes = figure.subplots()
            for i in range(number):
                axes.plot([1, 2], [i, 2 * i], label=f"top tokens shared with teacher-{i}")
            figure.canvas.mpl_connect("draw_event", lambda _: widths.append(axes.get_position().width))

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            write_chart(tmp_path / "chart.png", "title", draw, (6.2, 3.5))
        return widths[-1]

    assert width(6) > 0.95 * width(1)


def test_smoothing_is_the_mean_of_a_symmetric_window_without_nan() -> None:
    values = [float(i * i % 17) for i in range(240)]
    values[100] = math.nan
    averages = smooth(values)
    for i in (0, 1, 50, 99, 101, 239):
        half = min(240 // 80, i, 239 - i)
        window = [value for value in values[i - half : i + half + 1] if not math.isnan(value)]
        assert averages[i] == pytest.approx(sum(window) / len(window), rel=1e-12)


def test_parts_of_a_step_add_up_to_its_time() -> None:
    records = [{"step": 1, **record(1)}, {"step": 2, "train/loss": 1.0}, {"step": 3, "perf/step_s": 1.0}]
    steps, parts = parts_by_step(records)
    assert steps == [1, 3]
    assert list(parts) == ["data", "teachers", "forward", "loss", "backward", "other"]
    assert [sum(part) for part in zip(*parts.values(), strict=True)] == [2.0, 1.0]


def test_the_wait_for_teachers_is_their_part_of_the_step() -> None:
    """Bug: teachers that work while the student trains add to the step's time."""
    at_once = record(1) | {"perf/teacher_wait_s": 0.125, "perf/step_s": 1.5}
    assert step_parts(at_once)["teachers"] == 0.125
    assert sum(step_parts(at_once).values()) == 1.5
    assert step_parts(record(1))["teachers"] == 0.75


def test_shares_of_measured_times() -> None:
    assert shares({"a": 3.0, "b": 1.0}) == {"a": 0.75, "b": 0.25}
    assert shares({"a": 0.0}) == shares({}) == {}
    assert step_parts({"train/loss": 1.0}) == {}


@pytest.mark.parametrize(
    ("written", "reason"), [("run: [1", "while parsing a flow sequence"), ("[1]", "it has no keys")]
)
def test_a_damaged_configuration_is_named(written: str, reason: str, tmp_path: Path) -> None:
    """Bug: a traceback of the YAML reader without the file's name."""
    write_run(tmp_path, a_run())
    (tmp_path / "config.yaml").write_text(written)
    with pytest.raises(DataError, match=rf"config\.yaml is damaged \({reason}.*; repair or remove it"):
        write_report(tmp_path)
    assert exit_status("report", str(tmp_path)) == 1
    (tmp_path / "other").mkdir()
    write_run(tmp_path / "other", a_run())
    assert exit_status("compare", str(tmp_path), str(tmp_path / "other"), "--output", str(tmp_path / "page.html")) == 1


LONG_NAME = "/lustre/users/somebody/checkpoints/a-teacher-named-by-the-whole-path-of-its-checkpoint-step-120000"


def _drawn(tmp_path: Path, draw: Callable[[Axes], None]) -> Axes:
    """Draw and write a chart; return its axes."""
    figures = []

    def draw_figure(figure: Figure, theme: Theme) -> None:
        figures.append(figure)
        draw(figure.subplots())

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns if a legend leaves no room for the axes
        write_chart(tmp_path / "chart.png", "a chart", draw_figure, (6.2, 3.5))
    return figures[0].axes[0]


def test_a_curve_of_one_point_is_a_dot_with_its_value(tmp_path: Path) -> None:
    """Bug: a run of one step has an empty chart, as a line needs two points, and ticks at fractions of steps."""
    axes = _drawn(tmp_path, lambda axes: (axes.plot([1, 2], [math.nan, 0.25]), axes.axhline(0.5)))
    assert [line.get_marker() for line in axes.lines] == ["o", "None"]
    assert [text.get_text() for text in axes.texts] == ["0.25"]
    among_curves = _drawn(tmp_path, lambda axes: (axes.plot([1], [0.25]), axes.plot([1, 2], [0.25, 0.5])))
    assert not among_curves.texts, "they would lie on the curves"
    low, high = axes.get_xlim()
    assert all(tick == round(tick) for tick in axes.get_xticks() if low <= tick <= high)


@pytest.mark.parametrize("scale", [1e-9, 1e5])
def test_huge_and_tiny_values_stand_at_their_ticks(tmp_path: Path, scale: float) -> None:
    """Bug: a factor such as 1e5 stands above the axes, hidden by the legend, and ticks lack it."""
    axes = _drawn(tmp_path, lambda axes: axes.plot([1, 2], [scale, 2 * scale], label="loss"))
    assert not axes.yaxis.get_offset_text().get_text()
    labels = [label.get_text().replace("\N{MINUS SIGN}", "-") for label in axes.get_yticklabels()]
    assert list(map(float, labels)) == pytest.approx(list(axes.get_yticks()))


def test_long_names_leave_room_for_the_curves(tmp_path: Path) -> None:
    """Bug: a model's path in the legend takes the figure's width, and the axes collapse."""
    axes = _drawn(tmp_path, lambda axes: axes.plot([1, 2], [1, 2], label=LONG_NAME))
    assert axes.get_window_extent().width > 0.6 * axes.figure.bbox.width
    assert axes.get_legend().get_texts()[0].get_text().endswith("step-120000")


def test_the_parts_of_one_step_have_no_empty_axes() -> None:
    """Bug: an area chart of one step, which has no width."""
    figure = Figure()
    draw_step_time(figure, [{"step": 1, **record(1)}], CLOSING, LIGHT)
    assert len(figure.axes) == 1


def test_a_run_without_kd_lists_no_teacher_and_no_setting_of_kd(tmp_path: Path) -> None:
    """Bug: the page lists teachers and their loss although the run loads no teacher."""
    write_run(tmp_path, a_run())
    text = CONFIG.replace("kd_weight: 1", "kd_weight: 0, ce_weight: 1")
    (tmp_path / "config.yaml").write_text(text + "aggregation: {type: weighted_sum}\n")
    page = write_report(tmp_path, ClosingTable(None, None)).read_text().partition("config.yaml</summary>")[0]
    assert not {word for word in ("Phi-4", "p_kl", "weighted_sum", "KD weight") if word in page}
    assert "CE weight" in page


def test_bits_per_byte_of_a_diverged_student_fit_their_column(tmp_path: Path) -> None:
    """Bug: 300000.0000 for a student that diverged."""
    write_run(tmp_path, a_run())
    page = write_report(tmp_path, ClosingTable(None, ClosingRow("student after", 3e5))).read_text()
    assert "3.00e+05" in page
    assert "300000" not in page
