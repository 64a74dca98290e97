"""Catches a box that ends at the wrong brace, and the wrong one of several boxes."""

import time

import pytest

from nemo_opd.rewards.extraction import last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} no, \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed{x = \boxed{3}}", r"x = \boxed{3}"),
        (r"\fbox{5} no: \fboxed{6}", "6"),
        (r"\boxed 7", "7"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"\boxed{ \boxed{5}", "5"),
        ("\\boxed{\n 8 \n}", "8"),
        (r"\boxed{}", ""),
        (r"no box, 42", None),
        (r"\boxed{42", None),
        ("}}} \\boxed{9}", "9"),
    ],
)
def test_the_last_closed_box_counts(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize("part", ["\\boxed{", "\\boxed{1}", "}", "{"])
def test_a_runaway_response_takes_linear_time(part: str) -> None:
    start = time.process_time()
    last_boxed(part * 20_000)

    assert time.process_time() - start < 2  # linear: 0.05 s; quadratic: minutes
