"""Rewards of rollouts: verifiable rewards, the environment's, and users' functions (methods.md §10)."""

from nemo_opd.rewards.base import RewardFunction
from nemo_opd.rewards.build import build_reward, check_answer, check_answers

__all__ = ["RewardFunction", "build_reward", "check_answer", "check_answers"]
