"""The figures of an evaluation in a terminal."""

from rich.table import Table

from nemo_opd.config.evaluation import Questions
from nemo_opd.evaluation.intervals import Estimate
from nemo_opd.evaluation.tasks import EvaluationResult
from nemo_opd.logging.formats import figure


def estimates_table(result: EvaluationResult, settings: Questions) -> Table:
    """A row an estimate, with its interval, and what is known of the answers beneath."""
    table = Table(title=f"{len(result.questions):,} questions, {settings.n:,} sampled answers each")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column(f"{settings.confidence:.4g} interval", justify="right")
    for name, estimate in result.estimates.items():
        table.add_row(name, figure(estimate.value), _interval(estimate))
    table.add_section()
    table.add_row("response length", f"{result.response_length:.1f}", "tokens")
    table.add_row("truncated", f"{result.truncation_rate:.1%}".replace("%", " %"), "of sampled answers")
    return table


def _interval(estimate: Estimate) -> str:
    return f"{figure(estimate.low)} to {figure(estimate.high)}"
