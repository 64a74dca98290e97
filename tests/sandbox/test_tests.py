"""Catches misread tests of datasets, and programs with wrong verdicts."""

import json

import pytest

from nemo_opd.config.reward import SandboxSettings
from nemo_opd.errors import ConfigError, DataError, RolloutError
from nemo_opd.sandbox import checker as checker_module
from nemo_opd.sandbox.checker import Checker, InputOutput, Verdict, isolation_of, read_tests
from nemo_opd.sandbox.process import SandboxError

SETTINGS = SandboxSettings(isolation="none", workers=4)
HUMAN_EVAL = "METADATA = {}\ndef check(candidate):\n    assert candidate([3, 1], k=1) == [1, 3]\n"
CASES = {
    "as HumanEval": (
        "def sort(xs: list, k): return sorted(xs)",
        "def sort(xs: list, k): return xs",
        HUMAN_EVAL,
    ),
    "as MBPP, with a class of the program": (
        "class Pair:\n  def __init__(s, a): s.a = a\ndef total(ps): return sum(p.a for p in ps)",
        "class Pair:\n  def __init__(s, a): s.a = a\ndef total(ps): return 0",
        json.dumps(
            ["assert total([Pair(1), Pair(2)]) == 3", "import math", "assert math.isclose(total([Pair(.1)]), .1)"]
        ),
    ),
    "standard input and output": (
        "a, b = map(int, input().split())\nif __name__ == '__main__': print(a + b, end=' \\n\\n')",
        "print(input())",
        json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": [3, "7\n"]}),
    ),
    "pairs": ("print(input()[::-1])", "print(input())", json.dumps([{"input": "ab", "output": "ba"}])),
    "calls, as APPS": (
        "class Solution:\n  def add(self, a, b): return (a, b)",
        "class Solution:\n  def add(self, a, b): return [b, a]",
        json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[1, 2]]}),
    ),
    "calls, as LiveCodeBench": (
        "def sort(a, b): return a + b",
        "def sort(a, b): return a - b",
        json.dumps([{"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional"}]),
    ),
    "arguments that are changed": (
        "def fill(xs, names): xs.append(1); names['a'] = {1}",
        "def fill(xs, names): xs.append(1)",
        "xs, names = [], {}\nfill(xs, names)\nassert xs == [1] and names == {'a': {1}}",
    ),
    "errors that are expected": (
        "def f(x):\n  class Own(ValueError): pass\n  raise Own('no')",
        "def f(x): raise KeyError",
        "try:\n    f(1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'",
    ),
    "plain values": (
        "def f(x): return x",
        "def f(x): return str(x)",
        "values = [None, True, 1 << 9000, 0.1, float('inf'), 'é\\ud800', 1j, b'x', bytearray(b'y'), (1, [2]), {3}, "
        "frozenset({4}), {(5,): {6: []}}, range(7)]\nfor x in values:\n    assert f(x) == x and type(f(x)) is type(x)\n"
        "assert f(x=values) == values and list(f(map(str, [1]))) == ['1']",
    ),
    "errors that take more than a text": (
        "def f(x): return b'\\xff'.decode()",
        "def f(x): raise KeyError",
        "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass",
    ),
    "much that is printed": (
        "def f(x):\n  print('x' * 200_000)\n  return x",
        "def f(x): print('passed')",
        "assert f(1) == 1\nprint('all passed')",
    ),
    "names of modules": (
        "def string(x): return x",
        "def string(x): return -x",
        "nt = 1\nassert string(nt) == 1",
    ),
    "functions as pytest calls them": (
        "def f(x): return x",
        "def f(x): return -x",
        "def test_f():\n  assert f(1) == 1",
    ),
    "unittest": (
        "def f(x): return x",
        "def f(x): return -x",
        "import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(f(1), 1)\n"
        "if __name__ == '__main__': unittest.main()",
    ),
    "a response that was cut": ("def f(x):\n  return x + 1\nprint(f('", "def f(x): return x", "assert f(1) == 2"),
}


@pytest.mark.world
def test_right_programs_pass_and_wrong_ones_do_not() -> None:
    with Checker(SETTINGS, "sandbox") as checker:
        futures = {
            name: [checker.submit(program, read_tests(tests, "sort")) for program in (right, wrong)]
            for name, (right, wrong, tests) in CASES.items()
        }
        passed = {name: [future.result().passed for future in pair] for name, pair in futures.items()}
    assert passed == {name: [True, False] for name in CASES}


@pytest.mark.world
def test_equal_programs_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("nemo_opd.sandbox.checker.judge", lambda *arguments: calls.append(arguments))
    tests = read_tests("assert True")
    with Checker(SETTINGS, "sandbox") as checker:
        for program in ("a", "b", "a"):
            checker.submit(program, tests).result()
        checker.submit("a", read_tests("assert False")).result()
    assert len(calls) == 3


@pytest.mark.world
def test_a_sandbox_that_can_no_longer_be_created_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: every program counts as wrong if memory is full; the failure is cached as the program's verdict."""

    def judge(*_: object) -> None:
        raise SandboxError("no memory")

    tests = InputOutput((("", ""),))
    with Checker(SETTINGS, "sandbox") as checker:
        monkeypatch.setattr("nemo_opd.sandbox.checker.judge", judge)
        with pytest.raises(RolloutError, match="could not be created any more: no memory"):
            checker.submit("a", tests).result()
        monkeypatch.setattr("nemo_opd.sandbox.checker.judge", lambda *_: Verdict(True))
        assert checker.submit("a", tests).result().passed


def test_a_machine_without_sandboxes_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(kind: str, *_: object) -> None:
        raise SandboxError(f"no {kind}")

    monkeypatch.setattr(checker_module, "judge", judge)
    isolation_of.cache_clear()
    with pytest.raises(ConfigError) as caught:
        isolation_of(SandboxSettings(), "reward.sandbox")
    assert str(caught.value) == (
        "reward.sandbox.isolation=auto: no sandbox for untrusted programs works here (bubblewrap: no bubblewrap; "
        "namespaces: no namespaces); install bubblewrap (apt install bubblewrap), or allow unprivileged user "
        "namespaces, in Docker with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "--security-opt systempaths=unconfined`; reward.sandbox.isolation=none is for programs that you trust "
        "(docs/sandbox.md)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run nothing, so that every program would pass"),
        ("import f\nclass T:\n  def test(self): assert f(1) == 1\ndef test(x): assert x", "such as unittest.main()"),
        ("assert (", "not Python code"),
        ("[1, 2]", "neither a list of assertions"),
        ('{"inputs": [1], "outputs": []}', "of the same length"),
        (HUMAN_EVAL, "name the function to test"),
        ('[{"input": "1", "output": "2", "testtype": "functional"}]', "the tests call a function"),
    ],
)
def test_invalid_tests_are_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_tests(text)
