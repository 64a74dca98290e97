"""A reward of 1 if the last boxed formula equals the answer, and the comparison of formulas."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from nemo_opd.config.reward import MathReward
from nemo_opd.data.row_types import Rollout
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.rewards.extraction import build_extractor, last_boxed
from nemo_opd.rewards.numeric import TEXT_COMMAND, units_differ
from nemo_opd.rewards.reward_function import RewardFunction, last_turn

# Run as a file, since importing the package takes time. -P: modules in its folder shadow the standard library's.
_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("equivalence_process.py")))
SLOW_S = 60.0
"""Longest wait for an answer, in addition to twenty times its limit of processor time; a busy machine needs both."""
MANY = 16
"""Comparisons per batch of rollouts that may run out of time before the limit is lowered."""
LEAST_S = 1.0
"""Lowered limit of processor time, or a twentieth of the limit if that is more. Ordinary comparisons need much less."""
_EMPTY_SET = r"\emptyset"
_NO_SOLUTION_PHRASES = re.compile(
    r"(?:x=|x\\in)?(?:\\emptyset|∅|\\\{\\\}|(?:the)?emptyset|none"
    r"|(?:therea?(?:is|re)|ithas|(?:theequation|thesystem|it)has)?no(?:real|valid|possible|such)?solutions?(?:exists?)?)"
)
"""Phrases for no solution, in lower case without spaces."""
_UNDEFINED = "undefined"
_UNDEFINED_PHRASES = re.compile(
    r"(?:(?:it|thelimit|thevalue|theexpression)?(?:is)?(?:undefined|notdefined)"
    r"|(?:it|thelimit|thevalue)?(?:doesnotexist|doesn['’]texist)|d\.?n\.?e\.?)"
)
"""Phrases for a value that does not exist, in lower case without spaces."""
_INTEGER = re.compile(r"[+-]?\d{1,1000}")
_WORD = re.compile(r"[^\W\d_]{3,}")
_GROUPS = re.compile(r"(?<=\d)(?:\\[,; !]|~|\{,\}|[ \u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_MIXED_NUMBER = re.compile(r"(?<![\w.^/])(\d{1,20})(?:\\[,; ]|~|\s){1,4}(\d{1,20})\s?/\s?(\d{1,20})(?![\d.])")
_POWER_OF_TEN = re.compile(r"(?<=\d)[eE]([+-]?\d+)")
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
_DEGREES = re.compile(_NUMBER + r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°|(?:\\text\s*\{)?\s*degrees?\b\s*\}?)")
_RADIANS = re.compile(r"(?:\\(?:text|mathrm)\s*\{)?\s*\brad(?:ian)?s?\b\s*\}?")
_PER_CENT = re.compile(r"\s*(?:\\,)?\s*(?:%|(?:\\text\s*\{)?\s*per\s?cent\s*\}?)$")
_SIZES = re.compile(r"\\(?:left|right|big|Big|bigg|Bigg)[lr]?(?![A-Za-z])\s*")
_NAME = re.compile(r"^(?:\(?\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\)?)\s*(?:=|\\in)\s*")
_CLOSING = {r"\{": (r"\}",), "(": (")", "]"), "[": (")", "]")}
_TOKEN = re.compile(r"\\?.", re.DOTALL)


class MathMatch(RewardFunction):
    """A reward of 1 if the last \\boxed{…} of the last turn is mathematically equal to the answer, else 0."""

    votes = True

    def __init__(self, settings: MathReward) -> None:
        super().__init__(settings)
        self._extract = build_extractor(settings.extract)
        self._equivalence = Equivalence(settings.timeout_s)

    @classmethod
    def check_answer(cls, answer: str) -> None:
        _formula_of(answer)

    def score(self, rollout: Rollout) -> float:
        expected, formula = _formula_of(self.answer(rollout)), self._extract(last_turn(rollout))
        return float(formula is not None and self._equivalence.equal(expected, formula))

    def vote(self, rollout: Rollout) -> str | None:
        formula = self._extract(last_turn(rollout))
        return self._equivalence.canonical(formula) if formula else None

    def begin(self) -> None:
        self._equivalence.begin()

    def close(self) -> None:
        self._equivalence.close()


def _formula_of(answer: str) -> str:
    """Return the content of the answer's last box or, without a box, the whole answer.

    Raises DataError if it is empty or its braces are not balanced.
    """
    boxed = last_boxed(answer)
    formula = answer.strip().strip("$").strip() if boxed is None else boxed
    if not formula:
        raise DataError(f"the answer {answer!r} holds no formula that reward.type=math could compare with")
    bare = formula.replace("\\{", "").replace("\\}", "")
    if bare.count("{") != bare.count("}"):
        raise DataError(f"the answer {answer!r} has braces that are not balanced, so reward.type=math cannot read it")
    return formula


class Equivalence:
    """A comparison of formulas with math-verify and SymPy, in a process that starts on first use."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._num_overdue = self._num_asked = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        # Rollouts of a prompt repeat each other's answers, and wrong answers recur every epoch.
        self._ask_cached = lru_cache(maxsize=1 << 16)(self._ask)

    def begin(self) -> None:
        """Reset the count of comparisons that ran out of time. Call it before each batch of rollouts."""
        self._num_overdue = 0

    def equal(self, expected: str, answer: str) -> bool:
        """Return whether LaTeX formulas are equal; False if that takes more than `timeout_s` of processor time."""
        expected, answer = _normalized(expected), _normalized(answer)
        word = _bare_text(expected)
        if word == _bare_text(answer):
            return bool(word)
        if _WORD.fullmatch(word):
            return False  # algebra would read a word as a product of letters
        if _INTEGER.fullmatch(expected) and _INTEGER.fullmatch(answer):
            return int(expected) == int(answer)
        if not answer or not _same_kind(expected, answer) or units_differ(expected, answer):
            return False
        return any(self._answer("equal", *pair) is True for pair in _readings(expected, answer))

    def canonical(self, formula: str) -> str | None:
        """Return the same text for all formulas with the same simplified form, or None for an empty formula."""
        formula = _normalized(formula)
        word = _bare_text(formula)
        if _WORD.fullmatch(word):
            return word
        if _INTEGER.fullmatch(formula):
            return str(int(formula))
        text = self._answer("canonical", formula)
        return text if isinstance(text, str) else word or None

    def close(self) -> None:
        with self._lock:
            self._end()

    def _answer(self, task: str, *formulas: str) -> Any:
        """Return the answer, or None on a timeout. Cached timeouts count too: rewards must not depend on the cache."""
        limit_s = self.timeout_s
        if self._num_overdue >= MANY:
            limit_s = min(limit_s, max(LEAST_S, limit_s / 20))
        reply = self._ask_cached(task, limit_s, *formulas)
        if "answer" not in reply:
            self._num_overdue += 1
        return reply.get("answer")

    def _ask(self, task: str, limit_s: float, *formulas: str) -> dict[str, Any]:
        """Return the process's reply: `answer`, or `ended` if time ran out or the algebra crashed.

        Raises RolloutError if the process was killed twice, has ended, or does not reply.
        """
        for _ in range(2):
            reply = self._exchange(task, limit_s, *formulas)
            if reply.get("ended") != signal.SIGKILL:
                return reply
        texts = " and ".join(map(repr, formulas))
        raise RolloutError(
            f"the process that compares formulas was killed twice at {texts}; see whether the machine's memory is full"
        )

    def _exchange(self, task: str, limit_s: float, *formulas: str) -> dict[str, Any]:
        longest_s = SLOW_S + 20 * limit_s
        with self._lock:
            self._num_asked += 1
            number = self._num_asked
            question = json.dumps({"number": number, "task": task, "formulas": formulas, "timeout_s": limit_s})
            process = self._ensure_process()
            assert process.stdin is not None
            assert process.stdout is not None
            watch = threading.Timer(longest_s, process.kill)
            watch.start()
            try:
                process.stdin.write(question + "\n")
                process.stdin.flush()
                # Earlier lines may answer an abandoned question.
                for line in process.stdout:
                    with contextlib.suppress(ValueError):  # from a child that was killed while writing
                        reply: dict[str, Any] = json.loads(line)
                        if reply["number"] == number:
                            return reply
            except OSError:
                pass
            finally:
                is_overdue = not watch.is_alive()
                watch.cancel()
            status = process.wait()
            self._end()
        if is_overdue:
            raise RolloutError(
                f"the process that compares formulas gave no answer in {longest_s:.2g} s; see whether it was stopped, "
                "or whether the machine's memory is full"
            )
        raise RolloutError(
            f"the process that compares formulas ended with status {status}; run `{' '.join(_COMMAND)}` to see why"
        )

    def _ensure_process(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
        return self._process

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # buffered output has no reader any more
                pipe.close()


def _normalized(formula: str) -> str:
    """Strip dollar signs, write numbers as algebra reads them (1000 for 1 000, 2·10^3 for 2e3), and replace phrases for
    no solution by the empty set and phrases for a non-existent value by one word.
    """
    bare = _bare_text(formula)
    if _NO_SOLUTION_PHRASES.fullmatch(bare.rstrip(".")):
        return _EMPTY_SET
    if _UNDEFINED_PHRASES.fullmatch(bare.rstrip(".")):
        return _UNDEFINED
    if (text := TEXT_COMMAND.fullmatch(formula.strip().strip("$"))) and re.search(r"\d", text[1]):
        formula = text[1]
    formula = formula.strip().strip("$").strip().replace("\\%", "%").replace("\\varnothing", "\\emptyset")
    formula = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", _GROUPS.sub("", formula))
    return " ".join(_POWER_OF_TEN.sub(r"\\times 10^{\1}", formula).rstrip(".").split())


def _bare_text(formula: str) -> str:
    """Return the formula in lower case, without spaces and text commands."""
    text = TEXT_COMMAND.sub(r"\1", formula.strip().strip("$")).replace("\\ ", "").replace("\\,", "")
    return "".join(text.split()).casefold()


def _same_kind(expected: str, answer: str) -> bool:
    """Return whether the formulas are compatible: not a set of several elements and a tuple or interval.

    A list without brackets is compatible with both.
    """
    kinds = {_opening(formula) for formula in (expected, answer) if len(_elements(formula)) > 1}
    return not (r"\{" in kinds and kinds & {"(", "["})


def _readings(expected: str, answer: str) -> Iterator[tuple[str, str]]:
    """Yield pairs to compare: the two formulas, then alternative readings of both.

    50 % is 50 and 1/2, 30 degrees are 30 and pi/6, and the set of one point is that point.
    """
    formulas = [expected, answer]
    if not (_are_degrees_and_radians(expected, answer) or _are_degrees_and_radians(answer, expected)):
        yield expected, answer
    numbers = [_PER_CENT.sub("", formula) for formula in formulas]
    if numbers != formulas:
        yield numbers[0], numbers[1]
        if expected not in numbers and answer not in numbers:
            return
        hundredths = [
            formula if formula == number else rf"\frac{{{number}}}{{100}}"
            for formula, number in zip(formulas, numbers, strict=True)
        ]
        yield hundredths[0], hundredths[1]
    radians = [_RADIANS.sub("", _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", formula)) for formula in formulas]
    if radians != formulas:
        yield radians[0], radians[1]
    points = [_only_element(formula) for formula in formulas]
    if points != formulas:
        yield points[0], points[1]


def _are_degrees_and_radians(degrees: str, radians: str) -> bool:
    return _DEGREES.search(degrees) is not None and _RADIANS.search(radians) is not None


def _only_element(formula: str) -> str:
    """Return the tuple in a set of one tuple; any other formula unchanged."""
    elements = _elements(formula)
    is_point = _opening(formula) == r"\{" and len(elements) == 1 and len(_elements(elements[0])) > 1
    return elements[0] if is_point else formula


def _opening(formula: str) -> str:
    """Return the opening bracket around the entire formula; empty without brackets."""
    text = _without_name(formula)
    return next((opening for opening in _CLOSING if text.startswith(opening) and text.endswith(_CLOSING[opening])), "")


def _without_name(formula: str) -> str:
    """Return the value of `x = …` or `x in …`, without commands for bracket sizes."""
    return _NAME.sub("", _SIZES.sub("", formula)).strip()


def _elements(formula: str) -> list[str]:
    """Return the comma-separated elements inside the formula's outer brackets; empty without brackets."""
    opening = _opening(formula)
    elements, depth = [""], 0
    for token in _TOKEN.findall(_without_name(formula)[len(opening) : -len(opening)]) if opening else ():
        depth += (token[-1] in "([{") - (token[-1] in ")]}")
        if depth < 0:  # (1,2),(3,4)
            return []
        if token == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += token
    return [element.strip() for element in elements] if opening else []
