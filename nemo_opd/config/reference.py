"""Reference of all settings, generated from their models.

`python -m nemo_opd.config.reference` prints docs/settings.md and writes the JSON schemas next to the recipes.
"""

from collections.abc import Iterable, Iterator

from nemo_opd.config.described import Key, Section, keys_of, section, sections
from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.run import RunConfig
from nemo_opd.config.schema import write_schemas
from nemo_opd.paths import configs_dir

PAGE = "docs/settings.md"


def page() -> str:
    """Return the Markdown page: a table for each section, and one for each type that adds keys."""
    return "\n".join(
        (
            "# Settings",
            "",
            "Made by `uv run python -m nemo_opd.config.reference` from the models in `nemo_opd/config/`. On the",
            "command line a setting is `section.key=value`, or `teachers.0.key=value` for an element of a list.",
            *(line for part in sections(RunConfig) for line in _section(part)),
            "",
            "## evaluate.py",
            "",
            *_table(keys_of(EvaluationConfig)),
            *(line for part in section("evaluate.py: data", EvaluationConfig, "data", 1) for line in _section(part)),
            "",
        )
    )


def _section(section: Section) -> Iterator[str]:
    yield from ("", f"{'#' * (2 + section.depth)} {section.name}")
    if section.meaning:
        yield from ("", section.meaning)
    for table in section.tables:
        yield ""
        if table.tag:
            yield from (f"**`type: {table.tag}`** {table.meaning}".rstrip(), "")
        yield from _table(table.keys)


def _table(keys: Iterable[Key]) -> Iterator[str]:
    rows = [
        (
            f"`{key.name}`",
            f"`{key.type}`" if key.type else "see its section",
            key.default if key.default in ("", "required") else f"`{key.default}`",
            key.meaning,
        )
        for key in keys
    ]
    if rows:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    write_schemas(configs_dir())
    print(page(), end="")
