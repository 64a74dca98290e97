"""Docstrings begin as CONTRIBUTING.md says: of a function with a verb, of a class, module or field with a noun."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "nemo_opd"
PREPOSITIONS = {
    "Of",
    "Those",
    "As",
    "What",
    "Where",
    "That",
    "Who",
    "Whose",
    "When",
    "In",
    "At",
    "By",
    "For",
    "How",
    "From",
}
NOUNS = {"The", "A", "An", "One", "This", "All", "Every", "Each", "Some", "No", "Whether", "These"}
"""Words that begin a noun phrase, which is right for everything but a function."""


def openings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield line and first word of each docstring, and whether it is that of a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
            if text := ast.get_docstring(node):
                yield node.lineno, text.split()[0], not decorators & {"property", "cached_property"}
        elif isinstance(node, ast.ClassDef | ast.Module):
            for part in node.body:
                if (
                    isinstance(part, ast.Expr)
                    and isinstance(part.value, ast.Constant)
                    and isinstance(part.value.value, str)
                ):
                    yield part.lineno, part.value.value.split()[0], False


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda path: path.name)
def test_docstrings_begin_with_the_right_kind_of_word(folder: Path) -> None:
    wrong = [
        f"{file.name}:{line}: {word}"
        for file in sorted(folder.glob("*.py"))
        for line, word, is_function in openings(ast.parse(file.read_text(encoding="utf-8")))
        if word in PREPOSITIONS or (is_function and (word in NOUNS or word[0] in "[("))
    ]
    assert wrong == []
