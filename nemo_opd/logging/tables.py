"""Tables for the console: facts of a run and its results."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nemo_opd.logging.base import ClosingTable, RunSummary, change, difference, score


def titled_table(title: str) -> Table:
    """Return an empty table in the common style."""
    return Table(title=title, title_justify="left", title_style="bold", border_style="dim")


def header(run: RunSummary, step: int) -> Panel:
    """Return the facts of a run.

    step: last step of the run that is continued; 0 for a new run.
    """
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("student", Text(run.student, "bold"))
    if run.teachers:
        facts.add_row("teachers" if len(run.teachers) > 1 else "teacher", _teachers(run))
    else:
        facts.add_row("teachers", Text("none, only cross-entropy"))
    facts.add_row("device", Text(f"{run.device}, {run.layout}"))
    continued = f", continued after step {step:,}" if step else ""
    facts.add_row("steps", Text(f"{run.total_steps:,}{continued}"))
    facts.add_row("batch", Text(f"{run.batch}, {run.tokens_at_a_time:,} tokens at a time per rank"))
    facts.add_row("output", Text(str(run.output_dir)))
    for warning in run.warnings:
        facts.add_row("warning", Text(warning, "yellow"))
    title = Text.assemble(("nemo_opd", "bold cyan"), " ", run.name)
    return Panel(facts, title=title, title_align="left", border_style="cyan", padding=(0, 1))


def _teachers(run: RunSummary) -> Group:
    lines: list[RenderableType] = []
    for teacher in run.teachers:
        facts = f"weight {teacher.weight:g}, {teacher.type}, {teacher.loss}"
        details = [Text(fact, "dim") for fact in (facts, *teacher.coverage)]
        details += [Text(f"warning: {warning}", "yellow") for warning in teacher.warnings]
        lines.append(Text.assemble((teacher.name, "bold"), f"  {teacher.model}"))
        lines += [Padding(detail, (0, 0, 0, 2)) for detail in details]
    return Group(*lines)


def closing_table(closing: ClosingTable) -> Table:
    """Return the bits per byte of the student before and after, and of its teachers."""
    table = titled_table("Validation")
    table.add_column("model", overflow="fold")
    table.add_column("bits per byte", justify="right", no_wrap=True)
    table.add_column("vs start", justify="right", no_wrap=True)
    table.add_column("", style="dim", overflow="fold")
    for row in closing.rows:
        style = "bold green" if row is closing.after else ""
        bits = "-" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}"
        table.add_row(Text(row.name), bits, change(closing.change(row)), Text(row.note), style=style)
    return table


def score_table(closing: ClosingTable) -> Table:
    """Return scores with confidence intervals: of the student before and after, and of its teachers.

    The last column is the final student's gain over each other model, on the same questions.
    """
    table = titled_table("Questions")
    table.add_column("measure, model", overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    is_compared = any(row.differences for row in closing.scores)
    if is_compared:
        table.add_column("student after\nis better by", justify="right")
    for row in closing.shown_scores:
        table.add_row(Text(row.measure, "bold"))
        for model, model_score in row.by_model.items():
            style = "bold green" if model_score is row.after else ""
            gain = row.differences.get(model)
            gain_text = "" if gain is None else difference(*gain, is_share=row.is_share)
            text = Text(score(*model_score, is_share=row.is_share), style)
            table.add_row(Padding(Text(model, style), (0, 0, 0, 2)), text, *([gain_text] if is_compared else []))
        table.add_section()
    return table
