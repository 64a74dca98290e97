"""Which of several equal servers is asked next."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0
"""Pauses before a request is sent again, each twice as long as the one before."""
_LONGEST_REST_S = 30.0
"""The same for a server that has failed, while others answer."""


def pause_s(failures: int, longest: float = _LONGEST_PAUSE_S) -> float:
    """Return the seconds to wait after this number of failures, 1 or more."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30), longest)


class Address:
    """A server's address, and what has come of the requests to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = self.sent = self.failures = 0
        """Requests under way, requests so far, and failures since the last answer."""
        self.rests_until = 0.0

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Count a request; an exception is a failure."""
        self.in_flight += 1
        self.sent += 1
        try:
            yield
        except Exception:
            self.failures += 1
            self.rests_until = time.monotonic() + pause_s(self.failures, _LONGEST_REST_S)
            raise
        else:
            self.failures = 0
        finally:
            self.in_flight -= 1


class Spread:
    """Addresses of equal servers. One that has failed rests for a while, and is then tried with a single request."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._addresses = [Address(url) for url in urls]

    def next(self, *, is_retry: bool = False) -> Address:
        """Return the address with the fewest requests; where all rest, the one that rests the shortest.

        is_retry: the request has failed before, so servers that have not failed go first.
        """
        now = time.monotonic()
        sound = [each for each in self._addresses if not each.failures]
        tried = [each for each in self._addresses if each.failures and now >= each.rests_until and not each.in_flight]
        if candidates := sound if sound and is_retry else sound + tried:
            return min(candidates, key=lambda each: (each.in_flight, each.sent))
        return min(self._addresses, key=lambda each: each.rests_until)
