"""Figures of few dots, which are sooner drawn."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *to, **more: save(self, *to, **{**more, "dpi": 30}))
