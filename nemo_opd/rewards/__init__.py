"""Rewards of rollouts: verifiable rewards, the environment's, and users' functions (methods.md §10)."""

from nemo_opd.rewards.configured import build_reward, check_answer, check_answers
from nemo_opd.rewards.reward_function import RewardFunction

__all__ = ["RewardFunction", "build_reward", "check_answer", "check_answers"]
