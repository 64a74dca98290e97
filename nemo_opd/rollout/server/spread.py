"""Load balancing over several equal servers."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0
"""Pauses before a retry; each is twice as long as the one before."""
_LONGEST_REST_S = 30.0
"""Longest pause of a failed server while other servers answer."""


def pause_s(failures: int, longest: float = _LONGEST_PAUSE_S) -> float:
    """Return the seconds to wait after this number of failures, 1 or more."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30), longest)


class Address:
    """A server's address, and the state of its requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = self.sent = self.failures = 0
        """Requests in flight, requests so far, and failures since the last answer."""
        self.rests_until = 0.0

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """Count a request; an exception counts as a failure."""
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


class LoadBalancer:
    """A load balancer over equal servers. A failed server rests for a while, and is then tried with one request."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._addresses = [Address(url) for url in urls]

    def next(self, *, is_retry: bool = False) -> Address:
        """Return the address with the fewest requests; if all rest, the one whose rest ends first.

        is_retry: the request has failed before, so it goes to a server without failures if there is one.
        """
        now = time.monotonic()
        sound = [server for server in self._addresses if not server.failures]
        rested = [
            server
            for server in self._addresses
            if server.failures and now >= server.rests_until and not server.in_flight
        ]
        if candidates := sound if sound and is_retry else sound + rested:
            return min(candidates, key=lambda server: (server.in_flight, server.sent))
        return min(self._addresses, key=lambda server: server.rests_until)
