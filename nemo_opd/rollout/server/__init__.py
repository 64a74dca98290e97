"""Sampling by an OpenAI-compatible server, in its own process and world."""

from nemo_opd.rollout.server.engine import ServerEngine

__all__ = ["ServerEngine"]
