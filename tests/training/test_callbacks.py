"""Users' callbacks: the calls that a run makes, how a callback ends the run, and errors in one."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import nemo_opd
from nemo_opd.errors import CallbackError, ConfigError
from nemo_opd.users_code import Callbacks
from tests.training.test_entry import SETTINGS

SEEN: list[tuple[str, int]] = []


class Watch(nemo_opd.Callback):
    """Records every call, and ends the run after its second step."""

    def on_step(self, step: int, record: Mapping[str, float]) -> bool:
        assert record["train/loss"] > 0
        SEEN.append(("step", step))
        return step == 2

    def on_save(self, step: int, folder: Path) -> None:
        AutoModelForCausalLM.from_pretrained(folder / "student")
        SEEN.append(("save", step))

    def on_evaluate(self, step: int, values: Mapping[str, float]) -> None:
        assert "val/bits_per_byte" in values
        assert not any(name.startswith("train/") for name in values)
        SEEN.append(("evaluate", step))


def counted(step: int, record: Mapping[str, float]) -> None:
    SEEN.append(("function", step))


class Fails:
    def on_step(self, step: int, record: Mapping[str, float]) -> None:
        raise KeyError("no such metric")


def test_callbacks_see_a_run_and_end_it(tmp_path: Path) -> None:
    """Bug: a method that is called twice, never, or before its files exist; a run that ends without a checkpoint."""
    SEEN.clear()
    settings = SETTINGS | {
        "run": {"output_dir": str(tmp_path), "callbacks": f"{__name__}:Watch"},
        "train": SETTINGS["train"] | {"max_steps": 5, "validate_every": 1},
        "data": SETTINGS["data"] | {"validation": {"arrow_files": "demo:validation", "max_samples": 2}},
    }
    finished = nemo_opd.distil(settings, callbacks=[counted])
    steps = [("evaluate", 1), ("step", 1), ("function", 1), ("evaluate", 2), ("step", 2), ("function", 2)]
    assert [("evaluate", 0), *steps, ("save", 2)] == SEEN
    assert finished.model is None
    assert (tmp_path / "checkpoints" / "step_000002").is_dir()


def test_an_exception_is_reported_with_its_place() -> None:
    with pytest.raises(CallbackError, match=r"Fails: on_step raised KeyError: 'no such metric'") as caught:
        Callbacks([f"{__name__}:Fails"]).on_step(1, {})
    assert "raise KeyError" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere:Watch", "cannot be imported"), (f"{__name__}:SEEN", "neither a function"), ("builtins:int", "neither")],
)
def test_a_name_that_is_not_a_callback_is_refused_before_the_run(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"run.callbacks={name}: .*{reason}"):
        nemo_opd.distil(SETTINGS | {"run": {"callbacks": [name], "output_dir": str(tmp_path / "run")}})
    assert not (tmp_path / "run").exists()


def test_a_class_from_python_is_instantiated_and_other_objects_are_refused() -> None:
    """Bug: the error comes at the first step, after models were loaded; the class itself is called as an instance."""
    with pytest.raises(CallbackError, match="Fails of callbacks: on_step raised KeyError"):
        Callbacks([], [Fails]).on_step(1, {})
    for callback in (3, int, "watch"):
        with pytest.raises(ConfigError, match=f"callbacks={callback!r}: neither a function nor a class with on_step,"):
            Callbacks([], [callback])
