"""Destinations of metrics: metrics.jsonl, the console, TensorBoard, wandb, and the report."""

from nemo_opd.logging.base import ClosingRow, ClosingTable, Logger, RunSummary, TeacherSummary
from nemo_opd.logging.loggers import Loggers, build
from nemo_opd.logging.metrics import Timer, merge, values
from nemo_opd.logging.report import write_report

__all__ = [
    "ClosingRow",
    "ClosingTable",
    "Logger",
    "Loggers",
    "RunSummary",
    "TeacherSummary",
    "Timer",
    "build",
    "merge",
    "values",
    "write_report",
]
