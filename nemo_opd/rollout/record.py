"""Names under which users' rewards and environments import them."""

from nemo_opd.data.record import EnvironmentStep, Message, Prompt, Rollout

__all__ = ["EnvironmentStep", "Message", "Prompt", "Rollout"]
