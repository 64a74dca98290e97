"""Checkpoints: complete or absent, and enough to continue as if nothing had happened."""
