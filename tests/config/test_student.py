"""Settings of models that exclude each other, reported before anything starts."""

import pytest

from nemo_opd.errors import ConfigError
from tests.composition import compose


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["student.compile=true", "student.parallelism.tp=2"], "student.compile=true with parallelism.tp=2: "),
        (
            ["teachers.0.compile=true", "teachers.0.parallelism.tp=2"],
            "teachers.0.compile=true with parallelism.tp=2: ",
        ),
        (
            ["student.attn_implementation=eager", "student.parallelism.cp=2"],
            "student.attn_implementation=eager with parallelism.cp=2: ",
        ),
        (["student.lora={rank:2}", "student.parallelism.cp=2"], "student: lora with parallelism.cp=2: "),
    ],
)
def test_what_does_not_go_together(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(*overrides)
    assert str(caught.value).startswith(message)
