"""Catches right answers that are refused for their spelling, wrong ones that pass, and comparisons that never end."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_opd.cluster.ray.services import has_ended
from nemo_opd.config.settings import YEAR_S
from nemo_opd.errors import RolloutError
from nemo_opd.rewards import math as equivalence_module
from nemo_opd.rewards.math import MANY, Equivalence
from tests.waiting import wait_until

pytestmark = pytest.mark.world

EQUAL = [
    (r"\frac12", "0.5"),
    ("1/3", "0.333333"),
    ("1000", r"1{,}000"),
    ("1000", "1 000"),
    ("2000", "2e3"),
    ("50", r"50\%"),
    ("0.5", r"50\%"),
    ("90", r"90^\circ"),
    ("5", r"\$5"),
    ("5", r"5\text{ cm}"),
    ("5", r"5\,\text{cm}^2"),
    ("x=3", "3"),
    ("2x+1", "y=2x+1"),
    ("6", "$6$"),
    ("025", "25"),
    (r"\emptyset", r"\varnothing"),
    (r"[0,\infty)", r"x \ge 0"),
    ("x<3", "3>x"),
    (r"(\frac12,3)", r"\left(0.5, 3\right)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"),
    (r"2\sqrt{2}", r"\sqrt8"),
    (r"(x+1)^2", "x^2+2x+1"),
    ("A", r"\text{(A)}"),
    (r"\text{Tuesday}", "Tuesday"),
    ("3.5", "3 1/2"),
    ("-3.5", r"-3\ 1/2"),
    # Phrases for a value that does not exist.
    (r"\text{undefined}", r"\text{DNE}"),
    ("DNE", "The limit does not exist."),
    ("D.N.E.", r"\text{does not exist}"),
    # Units: spellings of the same unit, and a missing unit.
    (r"5\text{ cm}", r"5\text{ centimeters}"),
    ("5 km/h", r"5\,\mathrm{km}/\mathrm{h}"),
    (r"5\frac{\text{m}}{\text{s}}", r"5\text{ meters per second}"),
    (r"5\text{ m/s}^2", r"5\text{ m}\cdot\text{s}^{-2}"),
    (r"5\text{ cm}^2", r"5\text{ square cm}"),
    (r"\$10", r"10\text{ dollars}"),
    (r"\$10.00", "10"),
    (r"6\text{ apples}", r"6\text{ pieces of fruit}"),
    (r"6\text{ US dollars}", r"\$6"),
    (r"50\text{ per cent}", r"50\%"),
    (r"20^\circ\text{C}", r"20\text{ degrees Celsius}"),
    (r"9{:}00\text{ a.m.}", r"9{:}00\text{ AM}"),
    ("12_{5}", "12_5"),
    ("12_5", "12"),
    (r"90^\circ", r"\frac{\pi}{2}\text{ radians}"),
    (r"\frac{\pi}{2}\text{ rad}", "90 degrees"),
    # Variables that are also symbols of units.
    (r"\frac{2m}{s}", r"2\frac{m}{s}"),
    ("2gh", "2hg"),
    (r"\text{no solution}", r"\textbf{No Solution}"),
    # Degrees, read as numbers and as angles.
    ("30", r"30\text{ degrees}"),
    (r"90^\circ", r"\text{90 degrees}"),
    ("30,60,90", r"30^\circ, 60^\circ, 90^\circ"),
    (r"30^{\circ}", r"\frac{\pi}{6}"),
    (r"\frac{\pi}{6}", "30°"),
    (r"\frac12", r"\sin 30^\circ"),
    # The imaginary unit.
    ("i", r"\sqrt{-1}"),
    ("5", "|3+4i|"),
    (r"\{i,-i\}", r"\pm i"),
    # Phrases for no solution.
    (r"\text{no solution}", r"\emptyset"),
    (r"\emptyset", r"\text{There are no solutions.}"),
    (r"\text{no real solutions}", "no solution"),
    (r"\text{no solution}", r"x \in \varnothing"),
    (r"\{\}", "∅"),
    ("none", r"\text{No solution exists}"),
    # Per cent.
    ("50%", "50"),
    (r"33\frac13\%", r"\frac13"),
    ("150%", "1.5"),
    ("50", r"50\text{ percent}"),
    # Sets, tuples and lists.
    ("1,2", r"\{2,1\}"),
    (r"\{1,1,2\}", r"\{1,2\}"),
    (r"\{1,2\}", r"x=1 \text{ or } x=2"),
    ("(1,2)", "1,2"),
    ("(1,2)", r"\{(1,2)\}"),
    ("(x,y)=(1,2)", r"\left(1, 2\right)"),
    (r"\{(1,2),(3,4)\}", "(3,4),(1,2)"),
]
DIFFERENT = [
    ("2", "3"),
    ("5", ""),
    ("5", "five hundred"),
    ("0", "1 000"),
    ("12", "1,2"),
    ("(1,2]", "[1,2)"),
    ("(1,2)", "(2,1)"),
    ("x+1", "x+2"),
    ("yes", "yse"),  # equal as products of letters
    ("3.5", "4 1/2"),
    (r"\text{undefined}", "0"),
    # Units that contradict each other.
    (r"5\text{ cm}", r"5\text{ m}"),
    ("6 hours", "6 minutes"),
    (r"5\text{ ms}", r"5\text{ m}"),
    (r"5\text{ m/s}", r"5\text{ m/s}^2"),
    (r"5\text{ cm}^2", r"5\text{ cm}"),
    (r"x = 5\text{ square feet}", r"5\text{ cubic feet}"),
    (r"\$10", r"10\text{ cents}"),
    (r"9{:}00\text{ a.m.}", r"9{:}00\text{ p.m.}"),
    (r"50\%", r"50\text{ cm}"),
    (r"90^\circ", "90 radians"),
    (r"90\text{ rad}", r"90\text{ degrees}"),
    (r"30^\circ", "30'"),
    (r"30^{\circ}", r"30^\prime"),
    (r"20^\circ\text{C}", r"20^\circ\text{F}"),
    ("12_5", "12_6"),
    ("3", r"\frac{1}{0}"),
    ("3", r"\frac{1}{"),
    (r"30^\circ", r"60^\circ"),
    ("30", r"\frac{\pi}{6}"),
    ("i", "1"),
    ("3+4i", "3-4i"),
    (r"\text{no solution}", "0"),
    (r"\text{no solution}", r"\{0\}"),
    (r"\text{no solution}", r"\text{one solution}"),
    (r"\emptyset", r"\{\emptyset\}"),
    ("50", "0.5"),
    ("50", r"0.5\%"),
    ("50%", "0.5%"),
    ("50%", "5000"),
    (r"\{1,2\}", "(1,2)"),
    ("(1,2)", r"\{1,2\}"),
    (r"\{1,2\}", "[1,2]"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "2,1"),
    ("(1,2,3)", r"\left\{1,2,3\right\}"),
    ("x=(1,2)", r"\{1,2\}"),
    (r"\{(1,2)\}", "(2,1)"),
    (r"\{1\}", "(1,1)"),
]
Compare = Callable[[float], Equivalence]


@pytest.fixture(scope="module")
def limited_to() -> Iterator[Compare]:
    """Return a factory of comparisons by their limit. They share one process, as it takes seconds to start."""
    first = Equivalence(timeout_s=60)
    process = first._ensure_process()

    def limited_to(timeout_s: float) -> Equivalence:
        equivalence = Equivalence(timeout_s)
        equivalence._process = process
        return equivalence

    yield limited_to
    assert process.poll() is None, "its libraries would have to be loaded again"
    first.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.fixture(scope="module")
def equivalence(limited_to: Compare) -> Equivalence:
    return limited_to(60)


def test_different_spellings_of_a_formula_are_equal(equivalence: Equivalence) -> None:
    assert [pair for pair in EQUAL if not equivalence.equal(*pair)] == []


def test_different_formulas_are_not_equal(equivalence: Equivalence) -> None:
    assert [pair for pair in DIFFERENT if equivalence.equal(*pair)] == []


@pytest.mark.parametrize(
    "formulas",
    [
        (r"\frac12", "0.5", "x = 1/2"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\sqrt8", r"2\sqrt2"),
        ("1,2", r"\{2,1\}"),
        ("1{,}000", "1000"),
        (r"\text{Tuesday}", "tuesday"),
        (r"\text{no solution}", r"\emptyset", "No solutions."),
        ("i^2", "-1"),
    ],
)
def test_equal_formulas_have_one_canonical_form(equivalence: Equivalence, formulas: tuple[str, ...]) -> None:
    forms = {equivalence.canonical(formula) for formula in formulas}

    assert len(forms) == 1
    assert None not in forms
    assert equivalence.canonical("17") not in forms


def test_threads_may_ask_at_once(equivalence: Equivalence) -> None:
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(4) as threads:
        answers = list(
            threads.map(lambda i: equivalence.equal(rf"\frac{{{i}}}{{3}}", rf"\frac{{{2 * i}}}{{6}}"), range(8))
        )

    assert answers == [True] * 8


def test_a_comparison_that_never_ends_is_unequal_and_the_next_one_works(equivalence: Equivalence) -> None:
    equivalence.equal("x", "x+0")  # starts the process
    process = equivalence._process
    assert process is not None
    equivalence.timeout_s = 0.3
    try:
        assert not equivalence.equal("5", "9^{9^{9^{9}}}")  # computed in C, which runs no Python handler
        equivalence.timeout_s = 60
        assert equivalence.equal(r"\frac{5}{10}", r"\frac{4}{8}")
        assert process.poll() is None, "its libraries would have to be loaded again"
    finally:
        equivalence.timeout_s = 60


BOMB = "9^{{9^{{9^{{9}}}}}}+{}"


def test_many_comparisons_that_never_end_get_a_lower_limit(
    limited_to: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a model that has learned to write such formulas delays each step by batch size times `timeout_s`."""
    limits = []
    monkeypatch.setattr(equivalence_module, "LEAST_S", 0.001)
    equivalence = limited_to(0.1)
    ask = equivalence._ask
    equivalence._ask_cached = lambda task, limit_s, *formulas: limits.append(limit_s) or ask(task, limit_s, *formulas)  # type: ignore[assignment, func-returns-value]
    assert not any(equivalence.equal("5", BOMB.format(i)) for i in range(MANY + 2))
    assert limits == [0.1] * MANY + [0.005] * 2
    equivalence.begin()
    equivalence.equal("5", BOMB.format(-1))
    assert limits[-1] == 0.1


@pytest.mark.parametrize(("timeout_s", "lowered_s"), [(0.5, 0.5), (5, 1), (60, 3)])
def test_the_lowered_limit_is_enough_for_a_comparison(timeout_s: float, lowered_s: float) -> None:
    """Bug: a limit of a quarter of a second by default, which a right answer needs on a slow machine."""
    equivalence, limits = Equivalence(timeout_s), []
    equivalence._ask_cached = lambda task, limit_s, *formulas: limits.append(limit_s) or {"answer": True}  # type: ignore[assignment, func-returns-value]
    equivalence._num_overdue = MANY
    assert equivalence.equal("x+1", "1+x")
    assert limits == [lowered_s]


def test_answers_stay_right_at_the_lowered_limit(limited_to: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a new child spends the lowered limit on warming up its libraries: 0.4 s, and a comparison takes 0.04 s."""
    monkeypatch.setattr(equivalence_module, "LEAST_S", 0.2)
    equivalence = limited_to(1)
    for expected, answer in (
        (r"\sin(x)^2+\cos(x)^2", "1"),
        (r"\frac{x+1}{2}", "0.5x+0.5"),
        (r"\sqrt8", r"2\sqrt2"),
    ):
        assert not equivalence.equal("x", "y")
        kill_the_child_of(equivalence)
        equivalence._num_overdue = MANY
        assert equivalence.equal(expected, answer)


def kill_the_child_of(equivalence: Equivalence) -> None:
    assert equivalence._process is not None
    (child,) = psutil.Process(equivalence._process.pid).children()
    child.kill()
    wait_until(lambda: has_ended(child), "its end", every_s=0.01)


def test_a_child_that_is_killed_between_two_questions_costs_none(limited_to: Compare) -> None:
    """Bug: each later question got the previous question's answer."""
    equivalence = limited_to(60)
    assert equivalence.equal("x+1", "1+x")
    kill_the_child_of(equivalence)
    answers = [equivalence.equal(*pair) for pair in (("x+2", "2+x"), ("y+3", "y+4"), ("z+5", "5+z"), ("z+6", "z+7"))]
    assert answers == [True, False, True, False]


@pytest.mark.parametrize("times", [1, 2])
def test_a_child_that_is_killed_at_a_question_does_not_answer_it(times: int, limited_to: Compare) -> None:
    """Bug: right answers were judged wrong if another process used up the memory."""
    equivalence = limited_to(60)
    exchange, killed = equivalence._exchange, iter(range(times))

    def killed_first(*question: Any) -> dict[str, Any]:
        return exchange(*question) if next(killed, None) is None else {"ended": signal.SIGKILL}

    equivalence._exchange = killed_first  # type: ignore[method-assign]
    if times == 1:
        assert equivalence.equal("x+1", "1+x")
    else:
        with pytest.raises(RolloutError, match=r"was killed twice at 'x\+1' and '1\+x'; see whether"):
            equivalence.equal("x+1", "1+x")


INJECTED = "__import__('os').mkdir('{}')"


@pytest.mark.parametrize(
    "written",
    ["{}", r"\text{{{}}}", r"\operatorname{{{}}}(x)", r"\frac{{1}}{{{}}}", "1+{}", "({})*2", "lambda: {}", "f'{}'"],
)
def test_code_in_an_answer_is_not_run(written: str, equivalence: Equivalence, tmp_path: Path) -> None:
    answer = written.format(INJECTED.format(tmp_path / "mark"))
    equivalence.equal("2", answer)
    equivalence.equal(answer, "2")
    equivalence.canonical(answer)
    assert not (tmp_path / "mark").exists()


def test_signals_of_a_scheduler_or_terminal_do_not_end_a_comparison(limited_to: Compare) -> None:
    """Bug: a run that a signal stopped had wrong rewards in its last step, or no checkpoint."""
    equivalence = limited_to(60)
    assert equivalence.equal("x+1", "1+x")
    process = psutil.Process(equivalence._ensure_process().pid)
    (child,) = process.children()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for receiver in (child, process):
            receiver.send_signal(number)
        assert equivalence.equal(f"x+{number}", f"{number}+x")
    assert process.children() == [child]


def test_the_answer_to_an_abandoned_question_is_skipped(limited_to: Compare) -> None:
    """Bug: after Ctrl-C during a question, each later question got the previous question's answer."""
    equivalence = limited_to(60)
    process = equivalence._ensure_process()
    question = {"number": -1, "task": "equal", "formulas": ["1+x", "x+1"], "timeout_s": 60}
    process.stdin.write(json.dumps(question) + "\n")
    assert not equivalence.equal("x+1", "x+2")


def test_the_longest_limit_works(limited_to: Compare) -> None:
    equivalence = limited_to(YEAR_S)
    assert equivalence.equal("x+1", "1+x")


def test_cached_timeouts_count_as_new_ones(limited_to: Compare) -> None:
    """Bug: a resumed run, whose cache is empty, gave other rewards than an uninterrupted one."""
    equivalence = limited_to(0.2)
    for _ in range(2):
        equivalence.begin()
        assert not equivalence.equal("5", BOMB.format(1))
        assert equivalence._num_overdue == 1


def test_a_process_that_does_not_reply_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an endless wait for a stopped process, as its timer counts only processor time."""
    monkeypatch.setattr(equivalence_module, "SLOW_S", 0.1)
    with closing(Equivalence(timeout_s=0.01)) as equivalence:
        process = equivalence._ensure_process()
        os.kill(process.pid, signal.SIGSTOP)
        for child in psutil.Process(process.pid).children():
            child.suspend()
        with pytest.raises(RolloutError, match=r"gave no answer in 0.3 s; see whether it was stopped"):
            equivalence.equal("x+1", "1+x+0")
        assert process.poll() is not None
