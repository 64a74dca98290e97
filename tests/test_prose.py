"""Docstrings, comments and names stay plain: density of phrases and names that a reader stumbles over."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("nemo_opd", "tests")
_IS = "(?:is|are|was|were)"
_PREPOSITION = "(?:of|in|with|by|from|to|on|at|for|through|over|into|after|before|between)"
_SUBJECT = "there|it|that|this|the|they|an?|no|none|one|some|all|both|each|nothing|not|its|these|those|another|[a-z]+s"
_PREDICATE = f"{_IS}|has|have|had|can|cannot|would|will|it|they|each|an?|the|no|this|these|those|[a-z]+s"
_MADE = "(?:made|told|known|asked|given|put|kept|said|left|taken) (?:of|by|to|at|for|in|with|from|out)"
PHRASES = {
    "'where' for if or when": (rf"\b[Ww]here (?:{_SUBJECT}) ", 0.5),
    "'what …' without a noun": (rf"\b[Ww]hat (?:{_PREDICATE})\b", 0.5),
    "'of which', 'whose'": (rf"\b{_PREPOSITION} (?:which|whom|whose)\b", 0.5),
    "'; None: …', 'None where'": (r"; (?:None|null)(?::| for| where| without)|\b[Nn]one where\b", 0.2),
    "'that of', 'those with'": (r"\b(?:that|those) (?:of|with|from|in|on|by|at|for|to)\b", 0.5),
    "'is made of', 'told by'": (rf"\b{_IS} {_MADE}\b", 0.5),
    "'is no X' for 'is not an X'": (rf"\b(?:{_IS}|be) no [a-z]+", 0.5),
    "'there is no'": (rf"\bthere {_IS} (?:no|none|not|nothing)\b", 0.5),
    "'the others', 'the rest'": (r"\b(?:the others|all others|all else|everything else|the rest)\b", 0.5),
    "'x: of the …'": (r"(?:^|[.;] )`?[a-z_A-Z]+`?: (?:also )?of (?:the|an?|each|its|all)\b", 0.2),
    "'Of …' first": (r"(?:^|[.] )Of (?!course)[a-z]+", 0.2),
}
"""Pattern and the most occurrences in 1,000 words. A single one may be right; many make a text hard to read."""
VAGUE = {"each", "found", "own", "given", "known", "before", "others", "whole", "shown", "kept", "made", "left", "of"}
MOST_VAGUE = 2.0
"""Vague names in 1,000 uses of local names."""


@cache
def texts(folder: str) -> list[tuple[str, str]]:
    """Docstrings, also of fields, and comments, each with its place."""
    pieces = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        source, name = file.read_text(encoding="utf-8"), file.relative_to(ROOT)
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                pieces.append((f"{name}:{node.lineno}", " ".join(node.value.value.split())))
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                pieces.append((f"{name}:{token.start[0]}", token.string.lstrip("# ")))
    return pieces


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("kind", PHRASES)
def test_few_hard_phrases(kind: str, folder: str) -> None:
    """Catches a language of its own growing back."""
    pattern, limit = PHRASES[kind]
    hits = [f"{place}: {text[:100]}" for place, text in texts(folder) for _ in re.findall(pattern, text)]
    num_words = sum(len(text.split()) for _, text in texts(folder))
    assert 1000 * len(hits) / num_words <= limit, "\n".join(hits)


@pytest.mark.parametrize("folder", FOLDERS)
def test_few_vague_names(folder: str) -> None:
    """Catches locals that do not say what they hold."""
    names = [
        (f"{file.relative_to(ROOT)}:{node.lineno}", node.id if isinstance(node, ast.Name) else node.arg)
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name | ast.arg)
    ]
    hits = [f"{place}: {name}" for place, name in names if name in VAGUE]
    assert 1000 * len(hits) / len(names) <= MOST_VAGUE, "\n".join(hits)
