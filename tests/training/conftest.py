"""Configurations of runs with the tiny models, and a look at what a call leaves on disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_opd.config import RunConfig
from tests.composition import compose
from tests.tiny import Tiny

Configure = Callable[..., RunConfig]


@pytest.fixture
def configure(tiny: Tiny) -> Configure:
    """Overrides → the validated configuration of a run with the tiny models."""
    return lambda *overrides: compose(*tiny.overrides(*overrides))


@contextmanager
def nothing_is_created(folder: Path) -> Iterator[None]:
    before = sorted(folder.rglob("*"))
    yield
    assert sorted(folder.rglob("*")) == before
