"""Closing table of a run, read from its directory."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from yaml import YAMLError

from nemo_opd.config.load import from_yaml
from nemo_opd.errors import OPDError
from nemo_opd.logging import ClosingTable
from nemo_opd.logging.base import Best
from nemo_opd.logging.jsonl import read
from nemo_opd.training.closing import closing_table
from nemo_opd.training.run_directory import checkpoints_of


def closing_of(folder: Path) -> ClosingTable | None:
    """Return the closing table up to the run's last record; None if its settings are of another version."""
    try:
        config = from_yaml(folder / "config.yaml")
    except (OSError, OPDError, YAMLError):
        return None
    records = read(folder / "metrics.jsonl")
    bits_per_byte: dict[str, float] = {}
    best, metric = None, config.train.keep_best and config.train.keep_best.metric
    with suppress(OPDError):  # only checkpoints have these figures
        if newest := checkpoints_of(config, folder).newest(hashed=False):
            bits_per_byte = dict(newest.progress.bits_per_byte)
            if metric and newest.progress.best.values and (folder / "best").is_dir():
                step, value = next(iter(newest.progress.best.values.items()))
                best = Best(metric, int(step), value)
    validated = [record for record in records if record["step"] and "val/bits_per_byte" in record]
    last = validated[-1] if validated else {}
    table = closing_table(config, folder, bits_per_byte, last.get("val/bits_per_byte"), int(last.get("step", 0)))
    return replace(table, best=best)
