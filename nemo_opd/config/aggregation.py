"""How the losses of several teachers become one."""

from typing import Literal

from nemo_opd.config.base import Settings


class WeightedSum(Settings):
    """Σ weight_i · KD_i."""

    type: Literal["weighted_sum"] = "weighted_sum"
