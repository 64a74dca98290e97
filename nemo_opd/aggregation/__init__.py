"""How the losses of several teachers become one (METHODS §6)."""

from nemo_opd.aggregation.weighted_sum import weighted_sum, weighted_value

__all__ = ["weighted_sum", "weighted_value"]
