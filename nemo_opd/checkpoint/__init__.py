"""Checkpoints, which are complete or absent and continue a run exactly."""
