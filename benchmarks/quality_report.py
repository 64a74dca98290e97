"""What the runs of `quality.py` say: rows, a table, a record for other programs, and a plot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quality_runs import Outcome
from quality_settings import COMMON, CONTROL, Setting
from quality_statistics import Comparison, Interval, compare

from nemo_opd.files import write_atomically

NOTES = """\
* **interval**: 95 % of Student's t over the seeds; a seed draws another order of the training data, and the student
  starts from the same weights every time.
* **to CE**: the difference to `ce_only` with the same seed, so that what the order of the data does to both drops out.
  The rows are sorted by it. An interval that holds 0 says that the seeds do not tell the two apart.
* **bits per byte**: of the student on the validation text; less is better. **accuracy**: share of its tokens that have
  the largest logit; more is better."""


@dataclass(frozen=True)
class Row:
    setting: Setting
    bits_per_byte: Comparison | None
    """None where no run of it has ended well."""
    accuracy: Comparison | None
    missing: tuple[int, ...]
    """Seeds without a whole run."""

    @property
    def rank(self) -> float:
        """Sorts the best first, and last what cannot be compared."""
        if self.bits_per_byte is None or self.bits_per_byte.difference is None:
            return float("inf")
        return self.bits_per_byte.difference.mean


def rows(settings: Sequence[Setting], outcomes: Sequence[Outcome], seeds: Sequence[int]) -> list[Row]:
    """A row for every setting, of which one is the control, whether or not there are runs of it."""
    by_setting = {
        setting.name: {outcome.seed: outcome for outcome in outcomes if outcome.setting == setting.name}
        for setting in settings
    }
    control = by_setting[CONTROL]
    return sorted(
        (row(setting, by_setting[setting.name], control, seeds) for setting in settings), key=lambda r: r.rank
    )


def row(setting: Setting, own: Mapping[int, Outcome], control: Mapping[int, Outcome], seeds: Sequence[int]) -> Row:
    missing = tuple(seed for seed in seeds if seed not in own)
    if not own:
        return Row(setting, None, None, missing)
    bits = compare(
        {seed: outcome.end.bits_per_byte for seed, outcome in own.items()},
        {seed: outcome.end.bits_per_byte for seed, outcome in control.items()},
    )
    hits = compare(
        {seed: outcome.end.accuracy for seed, outcome in own.items()},
        {seed: outcome.end.accuracy for seed, outcome in control.items()},
    )
    return Row(setting, bits, hits, missing)


def plain(value: Interval | None) -> str:
    """`1.7000 ± 0.0100`."""
    if value is None:
        return "–"
    return f"{value.mean:.4f}" + ("" if value.half_width is None else f" ± {value.half_width:.4f}")


def signed(value: Interval | None) -> str:
    """`−0.0500 ± 0.0100`."""
    if value is None:
        return "–"
    return f"{value.mean:+.4f}".replace("-", "−") + ("" if value.half_width is None else f" ± {value.half_width:.4f}")


COLUMNS = ["setting", "bits per byte", "to CE", "accuracy", "to CE", "what it is"]


def cells(row: Row) -> list[str]:
    gaps = "; missing: seed " + ", ".join(map(str, row.missing)) if row.missing else ""
    about = f"{row.setting.group}: {row.setting.about}{gaps}"
    if row.bits_per_byte is None or row.accuracy is None:
        return [row.setting.name, *["missing"] * 4, about]
    is_control = row.setting.name == CONTROL
    to_control = ["–", "–"] if is_control else [signed(row.bits_per_byte.difference), signed(row.accuracy.difference)]
    means = [plain(row.bits_per_byte.mean), plain(row.accuracy.mean)]
    return [row.setting.name, means[0], to_control[0], means[1], to_control[1], about]


def table(given: Sequence[Row]) -> str:
    lines = [COLUMNS, ["---", *["---:"] * 4, "---"], *(cells(row) for row in given)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(given: Sequence[Row], facts: Mapping[str, str]) -> str:
    text = [
        "# Which loss: validation after equal steps on the demo pair",
        "",
        "![Differences to cross-entropy alone, with intervals](quality.png)",
        "",
        table(given),
        "",
        NOTES,
        "",
        *(f"* {name}: {value}" for name, value in facts.items()),
        "",
    ]
    return "\n".join(text)


def facts_of(outcomes: Sequence[Outcome], steps: int, seeds: Sequence[int], now: Mapping[str, str]) -> dict[str, str]:
    """Where, when and with what; commits and hardware are those of the runs, of which a resumed table can mix some."""
    starts = sorted({f"{outcome.start.bits_per_byte:.4f} / {outcome.start.accuracy:.4f}" for outcome in outcomes})
    return {
        "student before (bits per byte / accuracy)": ", ".join(starts),
        "steps": str(steps),
        "seeds": ", ".join(map(str, seeds)),
        "common settings": " ".join(f"`{override}`" for override in COMMON),
        "hardware": ", ".join(sorted({outcome.hardware for outcome in outcomes})),
        "commits of the runs (`-dirty`: with changes that were not committed)": ", ".join(
            sorted({outcome.commit for outcome in outcomes})
        ),
        **now,
    }


def write(folder: Path, given: Sequence[Row], outcomes: Sequence[Outcome], facts: Mapping[str, str]) -> None:
    from quality_plot import png

    record = {
        "facts": dict(facts),
        "rows": [asdict(row) for row in given],
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    write_atomically(folder / "quality.json", (json.dumps(record, indent=1) + "\n").encode())
    write_atomically(folder / "quality.md", markdown(given, facts).encode())
    write_atomically(folder / "quality.png", png(given))
