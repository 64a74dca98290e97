from typing import get_args

from nemo_opd.aggregation.rules import NATS, RULES
from nemo_opd.config.objective import Aggregation, Score


def test_every_aggregation_and_score_of_the_config_is_there() -> None:
    """Bug: a type or score that the config accepts is a KeyError in a run."""
    assert set(get_args(get_args(Aggregation)[0])) == RULES.keys()
    assert {*get_args(Score), "log_probability"} == NATS.keys()
