"""Isolation of a local Ray cluster for this run: a token for every call, and ports on loopback only."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
VARIABLES = (MODE, TOKEN, TOKEN_PATH)
_ANSWER_S = 60.0
"""Limit of the wait for a running cluster's answer."""


@contextmanager
def private_start() -> Iterator[None]:
    """Make a cluster that `ray.init` starts in this context listen on loopback only and require a token.

    RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH may provide the token. Otherwise a new token is held only in the memory of the
    cluster's processes, because Ray's default is a file in the home folder that others may read. RAY_AUTH_MODE=disabled
    is respected.
    """
    environment = {name: os.environ.get(name) for name in VARIABLES}
    is_cluster_enabled = ray_constants.ENABLE_RAY_CLUSTER
    if not environment[TOKEN] and not environment[TOKEN_PATH]:
        os.environ[TOKEN] = secrets.token_hex(32)
    try:
        # Ray replaces loopback by the machine's address unless multi-machine clusters are disabled. It has no other
        # setting that binds its ports to one address.
        ray_constants.ENABLE_RAY_CLUSTER = False
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_cluster_enabled
        # Ray's processes have the token by now; other child processes do not need it.
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def forget() -> None:
    """Make Ray read mode and token again for the next cluster. Call it after `ray.shutdown`."""
    # In this order, because threads that are still ending would otherwise look for a deleted token.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def require_token(address: str) -> None:
    """Raise AuthenticationError if the cluster at `host:port` refuses this process's token.

    `ray.init` would retry for 20 seconds and then report that nothing answers.
    """
    GcsClient(address=address).get_all_node_info(timeout=_ANSWER_S)
