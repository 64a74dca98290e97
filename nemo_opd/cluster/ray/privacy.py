"""A Ray cluster on this machine that nobody else can use: a token for every call, and no port beyond this machine."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
VARIABLES = (MODE, TOKEN, TOKEN_PATH)
ANSWER_S = 60.0
"""Longest wait for a running cluster's word."""


@contextmanager
def private_start() -> Iterator[None]:
    """Inside, a cluster that `ray.init` starts listens on loopback alone and asks for a token.

    The token is the user's where RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH gives one. Else it is a new one, which only the
    memory of the cluster's processes holds: Ray's default is a file in the home folder that others may read.
    RAY_AUTH_MODE=disabled is the user's word.
    """
    before = {name: os.environ.get(name) for name in VARIABLES}
    is_for_several = ray_constants.ENABLE_RAY_CLUSTER
    if not before[TOKEN] and not before[TOKEN_PATH]:
        os.environ[TOKEN] = secrets.token_hex(32)
    try:
        # Ray takes loopback for a mistake and replaces it by the machine's address, except where clusters of several
        # machines are off, and knows no other way to bind its ports to one address.
        ray_constants.ENABLE_RAY_CLUSTER = False
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_for_several
        # Ray's processes have it by now; others that this one starts need not know it.
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def forget() -> None:
    """Make Ray read mode and token anew for the next cluster; to be called behind `ray.shutdown`."""
    # In this order: threads that still end would otherwise look for a token that is not there any more.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def require_token(address: str) -> None:
    """Raise AuthenticationError at once where the cluster at `host:port` refuses this process.

    `ray.init` itself would try for 20 seconds, and say that nothing answers.
    """
    GcsClient(address=address).get_all_node_info(timeout=ANSWER_S)
