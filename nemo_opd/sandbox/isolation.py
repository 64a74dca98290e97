"""Choice of a kind of sandbox that works on this machine."""

import logging
from functools import cache

from nemo_opd.config.sandbox import Isolation, SandboxSettings
from nemo_opd.errors import ConfigError
from nemo_opd.sandbox.inside import landlock
from nemo_opd.sandbox.process import SandboxError
from nemo_opd.sandbox.tests import Assertions
from nemo_opd.sandbox.verdict import judge

_AUTO: tuple[Isolation, ...] = ("bubblewrap", "namespaces")
"""Kinds that `auto` tries. `process` protects less, so it must be set explicitly."""
_PROGRAM, _TESTS = "def one():\n    return 1\n", Assertions("assert one() == 1")

_log = logging.getLogger(__name__)


@cache
def isolation_of(settings: SandboxSettings, key: str) -> Isolation:
    """Return the first kind of sandbox that the settings allow and that works, tested with a correct program.

    key: the settings' key, for messages. Raises ConfigError if no kind works.
    """
    kinds = _AUTO if settings.isolation == "auto" else (settings.isolation,)
    problems = []
    for kind in kinds:
        problem = _problem_of(kind, settings)
        if problem is None:
            if kind == "process":
                _log.warning("%s.isolation=process: %s", key, _missing_protection())
            return kind
        problems.append(f"{kind}: {problem}")
    raise ConfigError(
        f"{key}.isolation={settings.isolation}: no sandbox for untrusted programs works here "
        f"({'; '.join(problems)}); install bubblewrap (apt install bubblewrap), allow unprivileged user namespaces, or "
        f"accept less protection with {key}.isolation=process (docs/sandbox.md)"
    )


def _problem_of(kind: Isolation, settings: SandboxSettings) -> str | None:
    """Return why a kind of sandbox does not work, or None if it does."""
    try:
        verdict = judge(kind, settings, _PROGRAM, _TESTS)
    except SandboxError as error:
        return str(error)
    return None if verdict.passed else f"a correct program fails ({verdict.reason}); raise the limits"


def _missing_protection() -> str:
    if landlock.version():
        return "programs share the machine's processes and memory with the run; files are protected by Landlock"
    return (
        "programs can read and write every file of this user, and end its processes; Landlock, which would protect "
        "them, is not available"
    )
