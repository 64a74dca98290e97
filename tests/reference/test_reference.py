"""The reference is short and shares no code with the package."""

import ast
from pathlib import Path

FILES = [file for file in Path(__file__).parent.glob("*.py") if not file.name.startswith("test_")]


def test_nothing_of_the_package_is_imported() -> None:
    """Bug: a helper of the package in the reference; an error in it would be in both."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] != "nemo_opd", file
                assert not name.startswith("tests.") or name.startswith("tests.reference."), file


def test_it_can_be_read_in_one_sitting() -> None:
    """Lines without blank lines, comments and docstrings. Some files can be read alone. Bug: a second implementation
    that nobody checks by reading.
    """
    lines = {file.name: lines_of_code(file) for file in FILES}
    for name in ("positions.py", "completions.py", "truncated.py"):
        assert lines.pop(name) <= 100
    assert sum(lines.values()) <= 300


def lines_of_code(file: Path) -> int:
    source = file.read_text(encoding="utf-8")
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr) and is_text(node.value)]
    inside = {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in inside for i, line in lines)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
