"""A user's code that uses SIGALRM itself, or that fails in `__repr__` or `__str__`."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_opd import users_code
from nemo_opd.users_code import UsersCodeError, called, shown


def test_code_that_takes_the_alarm_away_is_late_when_it_returns() -> None:
    """Bug: math-verify's timeouts in a reward removed our time limit."""

    def late() -> float:
        signal.alarm(0)
        time.sleep(0.1)
        return 1.0

    with pytest.raises(UsersCodeError, match=r"did not return in 0\.05 s \(key\)"):
        called(late, timeout_s=0.05, key="key")


def test_an_alarm_that_rings_as_the_call_begins_or_returns_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: handler and timer stayed, and interrupted the driver later."""
    handler, set_timer = signal.getsignal(signal.SIGALRM), signal.setitimer
    rung = []

    def ring(seconds: float, trigger: float) -> None:
        if seconds == trigger:
            rung.append(trigger)
            signal.raise_signal(signal.SIGALRM)

    def set_ringing(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        ring(seconds, 0)
        previous = set_timer(which, seconds, interval)
        ring(seconds, 60)
        return previous

    monkeypatch.setattr(users_code.signal, "setitimer", set_ringing)
    assert called(lambda: 1, timeout_s=60, key="key") == 1
    assert rung == [60, 0]
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[1] == 0.0, "ours, which rings again and again"


class Mute:
    def __repr__(self) -> str:
        raise ValueError("no words")


class Leaving:
    def __repr__(self) -> str:
        raise SystemExit(3)


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_a_value_whose_repr_fails() -> None:
    """Bug: the error of the error's message ended the run instead."""
    assert shown(Mute()) == "Mute"
    assert shown(Leaving()) == "Leaving"

    def fail() -> None:
        raise MuteError

    with pytest.raises(UsersCodeError, match="raised MuteError: MuteError"):
        called(fail, timeout_s=60, key="key")


class Endless:
    def __repr__(self) -> str:
        while True:
            pass


def test_a_value_whose_repr_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the error about a reward that returned such an object never came, and the run hung."""
    monkeypatch.setattr(users_code, "TEXT_S", 0.05)
    assert shown(Endless()) == "Endless"


def test_calls_of_a_thread_share_a_helper_that_is_replaced_when_it_is_late() -> None:
    """Bugs: a thread started for each call takes longer than rendering a conversation; a call waits behind one that
    hangs; a helper outlives its thread.
    """
    released = threading.Event()

    def nested() -> tuple[threading.Thread, threading.Thread]:
        return threading.current_thread(), called(threading.current_thread, timeout_s=60, key="key")

    def calls() -> list[threading.Thread]:
        first, second = (called(threading.current_thread, timeout_s=60, key="key") for _ in range(2))
        outer, inner = called(nested, timeout_s=60, key="key")
        assert first is second is outer is not inner
        with pytest.raises(UsersCodeError, match="raised KeyError"):
            called({}.__getitem__, 0, timeout_s=60, key="key")
        with pytest.raises(UsersCodeError, match="did not return"):
            called(released.wait, timeout_s=0.05, key="key")
        third = called(threading.current_thread, timeout_s=60, key="key")
        assert third is not first
        return [first, inner, third]

    with ThreadPoolExecutor(1) as threads:
        helpers = threads.submit(calls).result()
    released.set()
    for helper in helpers:
        helper.join(5)
        assert not helper.is_alive()
