"""All settings with their meaning, from the models that check them.

`python -m nemo_opd.config.reference` prints docs/settings.md, and writes the JSON schemas next to the recipes.
"""

from collections.abc import Iterable, Iterator

from nemo_opd.config.described import Key, Section, keys_of, section, sections
from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.run import RunConfig
from nemo_opd.config.schema import write_schemas
from nemo_opd.paths import configs_dir

PAGE = "docs/settings.md"


def page() -> str:
    """Write the Markdown page: a table a section, and one for each type of it that has more keys."""
    return "\n".join(
        (
            "# Settings",
            "",
            "Made by `uv run python -m nemo_opd.config.reference` from the models in `nemo_opd/config/`. On the",
            "command line a setting is `section.key=value`, and one of a list's elements `teachers.0.key=value`.",
            *(line for each in sections(RunConfig) for line in _section(each)),
            "",
            "## evaluate.py",
            "",
            *_table(keys_of(EvaluationConfig)),
            *(line for each in section("evaluate.py: data", EvaluationConfig, "data", 1) for line in _section(each)),
            "",
        )
    )


def _section(shown: Section) -> Iterator[str]:
    yield from ("", f"{'#' * (2 + shown.depth)} {shown.name}")
    if shown.meaning:
        yield from ("", shown.meaning)
    for table in shown.tables:
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
