"""The figures of an evaluation in a terminal."""

from rich.table import Table

from nemo_opd.config.evaluation import Questions
from nemo_opd.evaluation.tasks import EvaluationResult
from nemo_opd.logging.formats import figure, share


def estimates_table(result: EvaluationResult, settings: Questions) -> Table:
    """A row an estimate, with its interval, and what is known of the answers beneath.

    Shares are in per cent; a mean reward is a plain number where rewards are no shares.
    """
    table = Table(title=f"{len(result.questions):,} questions, {settings.n:,} sampled answers each")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column(f"{100 * settings.confidence:.4g} % interval", justify="right")
    form = share if are_shares(result) else figure
    for name, estimate in result.estimates.items():
        own = form if name.startswith("mean@") else share
        table.add_row(name, own(estimate.value), f"{own(estimate.low)} to {own(estimate.high)}")
    table.add_section()
    table.add_row("response length", f"{result.response_length:.1f}", "tokens")
    table.add_row("truncated", share(result.truncation_rate), "of sampled answers")
    return table


def are_shares(result: EvaluationResult) -> bool:
    """Whether rewards are from 0 to 1, so that their mean can be read as a share of the points."""
    return all(0 <= answer.reward <= 1 for question in result.questions for answer in question.sampled)
