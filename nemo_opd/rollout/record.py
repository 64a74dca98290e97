"""Types for users' rewards and environments to import."""

from nemo_opd.data.row_types import Message, Prompt, Rollout
from nemo_opd.rollout.environment import EnvironmentStep

__all__ = ["EnvironmentStep", "Message", "Prompt", "Rollout"]
